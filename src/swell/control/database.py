"""One SQL dialect for two databases: SQLite by default, Postgres by URL.

Only what the store needs: transactions, `?` parameters, rows as tuples. A database has one writer: for SQLite
the one control plane of its home, for Postgres (`control/postgres.py`) the one that has the lease.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from swell.control.errors import Conflict, StoreUnavailable
from swell.control.postgres import FAILED, is_postgres, open_database
from swell.domain import InputError

Row = tuple[Any, ...]
Parameters = Sequence[Any]


class Database(Protocol):
    """A connection that may be used from several threads, one transaction at a time."""

    auto_key: str
    """SQL that declares an integer key which grows by itself."""

    @property
    def leads(self) -> bool:
        """Whether this process is the one that may decide and write now."""

    @property
    def fence(self) -> int:
        """The fencing number of this writer, higher than all before it; 0 if there can be no other."""

    def transaction(self) -> Any:
        """A context in which `execute` and `query` are one transaction; rolled back on an exception."""

    def execute(self, sql: str, parameters: Parameters = ()) -> None: ...

    def query(self, sql: str, parameters: Parameters = ()) -> list[Row]: ...

    def close(self) -> None: ...


def connect(url: str) -> Database:
    """Open the database that a URL or a path names."""
    if is_postgres(url):
        return open_database(url)
    if "://" in url and not url.startswith("sqlite://"):
        raise InputError(f"store '{url}': need a path, sqlite:///path or postgresql://...", field="store")
    return SqliteDatabase(Path(url.removeprefix("sqlite://")))


class SqliteDatabase:
    """SQLite in WAL mode. A commit is on disk when it returns."""

    auto_key = "INTEGER PRIMARY KEY AUTOINCREMENT"
    leads = True  # the lock of its home keeps every other control plane away
    fence = 0

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
            full = path.parent.is_dir() and not shutil.disk_usage(path.parent).free
            remedy = "its disk is full: make room" if full else "check its permissions"
            raise StoreUnavailable(
                f"cannot open the store at {path}: {error}; {remedy}, or give another --store"
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
            raise StoreUnavailable(FAILED.format(error)) from error
