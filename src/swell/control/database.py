"""One SQL dialect for two databases: SQLite by default, Postgres by URL.

Only what the store needs: transactions, `?` parameters, rows as tuples. A database has one writer, this
process; a lock on the database itself keeps a second control plane from becoming one.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from swell.control.errors import Conflict, StoreUnavailable
from swell.domain import InputError

_LOCK_WAIT_S = 5.0
"""How long to wait for the lock of a control plane that has just ended or was killed."""

_FAILED = "the store failed ({}); nothing was changed: check its disk or database, then try again"

Row = tuple[Any, ...]
Parameters = Sequence[Any]


class Database(Protocol):
    """A connection that may be used from several threads, one transaction at a time."""

    auto_key: str
    """SQL that declares an integer key which grows by itself."""

    def transaction(self) -> Any:
        """A context in which `execute` and `query` are one transaction; rolled back on an exception."""

    def execute(self, sql: str, parameters: Parameters = ()) -> None: ...

    def query(self, sql: str, parameters: Parameters = ()) -> list[Row]: ...

    def close(self) -> None: ...


def connect(url: str) -> Database:
    """Open the database that a URL or a path names."""
    if url.startswith(("postgresql://", "postgres://")):
        return PostgresDatabase(url)
    if "://" in url and not url.startswith("sqlite://"):
        raise InputError(f"store '{url}': need a path, sqlite:///path or postgresql://...", field="store")
    return SqliteDatabase(Path(url.removeprefix("sqlite://")))


class SqliteDatabase:
    """SQLite in WAL mode. A commit is on disk when it returns."""

    auto_key = "INTEGER PRIMARY KEY AUTOINCREMENT"

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._connection = sqlite3.connect(
                path, check_same_thread=False, isolation_level=None, timeout=10.0
            )
            path.chmod(0o600)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute("PRAGMA foreign_keys=ON")
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(
                f"cannot open the store at {path}: {error}; check its permissions, or give another --store"
            ) from error
        self._depth = 0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is written, or nothing is; a nested transaction joins the outermost."""
        with self._lock:
            if self._depth:
                yield
                return
            self._run("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
                self._run("COMMIT")
            except BaseException:
                # After a full disk SQLite may have rolled back by itself already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1

    def execute(self, sql: str, parameters: Parameters = ()) -> None:
        """Run a statement."""
        with self._lock:
            self._run(sql, parameters)

    def query(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """Rows of a query."""
        with self._lock:
            return self._run(sql, parameters).fetchall()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()

    def _run(self, sql: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, parameters)
        except sqlite3.IntegrityError as error:
            raise Conflict(f"the store has this entry already ({error})") from error
        except sqlite3.Error as error:
            raise StoreUnavailable(_FAILED.format(error)) from error


class PostgresDatabase:
    """PostgreSQL through psycopg. An advisory lock makes sure that there is one control plane."""

    auto_key = "BIGSERIAL PRIMARY KEY"
    _LOCK = 0x5357454C4C  # 'SWELL'

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise InputError(
                "a Postgres store needs psycopg: pip install 'swell[postgres]'", field="store"
            ) from error
        self._psycopg = psycopg
        self._url = url
        self._lock = threading.RLock()
        self._depth = 0
        self._connection = self._open()

    def _open(self) -> Any:
        """Connect and take the lock; wait a little for that of a control plane that has just ended."""
        give_up = time.monotonic() + _LOCK_WAIT_S
        try:
            connection = self._psycopg.connect(self._url, autocommit=True, connect_timeout=10)
            while True:
                row = connection.execute("SELECT pg_try_advisory_lock(%s)", (self._LOCK,)).fetchone()
                if row and row[0]:
                    return connection
                if time.monotonic() > give_up:
                    break
                time.sleep(0.1)
        except self._psycopg.Error as error:
            raise StoreUnavailable(
                f"cannot reach the Postgres store: {error}; check --store, and that the database runs"
            ) from error
        connection.close()
        raise StoreUnavailable(
            "another control plane is using this Postgres store: stop it, or give another --store"
        )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is written, or nothing is; a nested transaction joins the outermost."""
        with self._lock:
            if self._depth:
                yield
                return
            if self._connection.closed:
                self._connection = self._open()
            self._depth += 1
            try:
                with self._connection.transaction():
                    yield
            except self._psycopg.OperationalError as error:
                raise StoreUnavailable(_FAILED.format(error)) from error
            finally:
                self._depth -= 1

    def execute(self, sql: str, parameters: Parameters = ()) -> None:
        """Run a statement."""
        with self._lock:
            self._run(sql, parameters)

    def query(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """Rows of a query."""
        with self._lock:
            return list(self._run(sql, parameters).fetchall())

    def close(self) -> None:
        """Close the connection, and with it the lock."""
        with self._lock:
            self._connection.close()

    def _run(self, sql: str, parameters: Parameters = ()) -> Any:
        if self._connection.closed and not self._depth:
            self._connection = self._open()
        try:
            return self._connection.execute(sql.replace("?", "%s"), parameters)
        except self._psycopg.errors.UniqueViolation as error:
            raise Conflict(f"the store has this entry already ({error})") from error
        except self._psycopg.OperationalError as error:
            raise StoreUnavailable(_FAILED.format(error)) from error
