"""A store on PostgreSQL, through psycopg: the lease of its one writer, and transactions that check it.

    lease         the fencing number of the present leader, changed only when another one takes over
    lease_term    until when the lease is good, by the database's clock; renewed every second

A transaction that writes holds a shared lock on the row of `lease` with its own number in it. To take over
is to change that row. So a take-over waits for a transaction that is under way, and every later transaction
of the former leader finds another number and fails. A leader that is frozen in the middle of a transaction
is cut off by the database itself (`idle_in_transaction_session_timeout`), before its lease has run out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from swell.control.errors import Conflict, NotLeading, StoreLost, StoreUnavailable
from swell.control.lease import LEASE_S, Leader, LeaseCandidate, LeaseHolder, Tenure
from swell.domain import InputError

FAILED = "the store failed ({}); nothing was changed: check its disk or database, then try again"
_WIN_S = LEASE_S + 5.0
"""How long to wait for the lease of a control plane that was killed."""
_IDLE_S = LEASE_S - 1.0
"""The database ends a transaction whose owner has said nothing for this long."""
_ASK_S = 3.0
"""The longest that a question about the lease may take."""
_NETWORK: dict[str, Any] = {
    # A connection that leads nowhere is noticed within seconds.
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 5000,
}
_TABLES = (
    "CREATE TABLE IF NOT EXISTS lease (one BOOLEAN PRIMARY KEY CHECK (one), number BIGINT NOT NULL,"
    " holder TEXT NOT NULL, url TEXT NOT NULL, host TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS lease_term (one BOOLEAN PRIMARY KEY CHECK (one), number BIGINT NOT NULL,"
    " until TIMESTAMPTZ NOT NULL)",
    "INSERT INTO lease VALUES (TRUE, 0, '', '', '') ON CONFLICT DO NOTHING",
    "INSERT INTO lease_term VALUES (TRUE, 0, 'epoch') ON CONFLICT DO NOTHING",
)
_TABLES_LOCK = (
    0x5357454C4C  # 'SWELL': two control planes that start at once make the tables one after the other
)


def is_postgres(url: str) -> bool:
    """Whether a store's URL names a Postgres database."""
    return url.startswith(("postgresql://", "postgres://"))


def open_database(url: str) -> PostgresDatabase:
    """The database, with the lease of its one writer; waits for a control plane that was killed."""
    candidate = LeaseCandidate(PostgresLease(url), LeaseHolder("alone", "", ""), once=True)
    tenure = candidate.win(_WIN_S)
    if tenure is None:
        candidate.stop()
        raise StoreUnavailable(
            candidate.trouble
            or "another control plane is using this Postgres store: stop it, give another --store, or start"
            " all of them with --ha"
        )
    candidate.start()
    try:
        return PostgresDatabase(url, tenure, candidate.stop)
    except BaseException:
        candidate.stop()
        raise


class _Connection:
    """A connection that is opened again after it was lost, and whose errors are ours."""

    def __init__(self, url: str, settings: dict[str, str]) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise InputError(
                "a Postgres store needs psycopg: pip install 'swell[postgres]'", field="store"
            ) from error
        self._psycopg = psycopg
        self._url = url
        self._settings = settings
        self._connection: Any = None

    @property
    def raw(self) -> Any:
        if self._connection is None or self._connection.closed:
            try:
                connection = self._psycopg.connect(self._url, autocommit=True, connect_timeout=5, **_NETWORK)
                connection.execute(
                    "SELECT set_config('application_name', %s, FALSE)", (f"swell process {os.getpid()}",)
                )
                for name, value in self._settings.items():
                    connection.execute("SELECT set_config(%s, %s, FALSE)", (name, value))
            except self._psycopg.Error as error:
                raise StoreLost(
                    f"cannot reach the Postgres store: {error}; check --store, and that the database runs"
                ) from error
            self._connection = connection
        return self._connection

    @property
    def current(self) -> Any:
        """The connection as it is, also if it was lost."""
        return self._connection

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn psycopg's errors into ours."""
        lost = (self._psycopg.OperationalError, self._psycopg.InternalError, self._psycopg.InterfaceError)
        try:
            yield
        except self._psycopg.errors.UniqueViolation as error:
            raise Conflict(f"the store has this entry already ({error})") from error
        except self._psycopg.errors.UndefinedTable as error:
            raise StoreUnavailable("this Postgres database has no store of swell in it yet") from error
        except lost as error:
            text = str(error).strip()
            if self._connection is None or self._connection.closed:
                raise StoreLost(f"the connection to the store was lost ({text}); try again") from error
            raise StoreUnavailable(FAILED.format(text)) from error

    def close(self) -> None:
        if self._connection is not None:
            with suppress(self._psycopg.Error):
                self._connection.close()


class PostgresLease:
    """The lease in a Postgres database, over a connection of its own. One thread at a time."""

    def __init__(self, url: str, *, make: bool = True) -> None:
        """`make`: make the tables if they are not there."""
        limit = f"{int(_ASK_S * 1000)}ms"
        settings = {"lock_timeout": limit, "statement_timeout": limit}
        settings["idle_in_transaction_session_timeout"] = limit
        self._connection = _Connection(url, settings)
        self._prepared = not make

    def take(self, holder: LeaseHolder) -> int | None:
        """Take the lease if it is free or has run out; returns the new fencing number, or None."""
        free = "SELECT 1 FROM lease_term WHERE until <= clock_timestamp()"
        with self._asking() as connection:
            if connection.execute(free).fetchone() is None:
                return None
            with connection.transaction():
                # Of several that try at once all but one wait here, and then find that it is not free.
                if connection.execute(f"{free} FOR UPDATE").fetchone() is None:
                    return None
                row = connection.execute(
                    "UPDATE lease SET number = number + 1, holder = %s, url = %s, host = %s RETURNING number",
                    (holder.name, holder.url, holder.host),
                ).fetchone()
                connection.execute(
                    "UPDATE lease_term SET number = %s, until = clock_timestamp() + %s * INTERVAL '1 second'",
                    (row[0], LEASE_S),
                )
            return int(row[0])

    def renew(self, number: int) -> bool:
        """Renew the lease of this number; False if another control plane has taken it over."""
        sql = "UPDATE lease_term SET until = clock_timestamp() + %s * INTERVAL '1 second' WHERE number = %s"
        with self._asking() as connection:
            return bool(connection.execute(sql, (LEASE_S, number)).rowcount)

    def release(self, number: int) -> None:
        """Give the lease of this number back; nothing can be written under the number from then on."""
        with self._asking() as connection, connection.transaction():
            connection.execute(
                "UPDATE lease_term SET number = number + 1, until = 'epoch' WHERE number = %s", (number,)
            )
            connection.execute("UPDATE lease SET number = number + 1 WHERE number = %s", (number,))

    def leader(self) -> Leader | None:
        """Who leads; None if nobody has a lease that has not run out."""
        sql = (
            "SELECT l.number, l.holder, l.url, l.host FROM lease l JOIN lease_term t ON l.number = t.number"
            " WHERE t.until > clock_timestamp()"
        )
        with self._asking() as connection:
            row = connection.execute(sql).fetchone()
        return None if row is None else Leader(int(row[0]), LeaseHolder(*row[1:]))

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        connection = self._connection.raw
        with self._connection.errors():
            if not self._prepared:
                with connection.transaction():
                    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
                    for statement in _TABLES:
                        connection.execute(statement)
                self._prepared = True
            yield connection


class PostgresDatabase:
    """The database itself, for the control plane that has the lease, or for reading."""

    auto_key = "BIGSERIAL PRIMARY KEY"

    def __init__(self, url: str, tenure: Tenure | None, closing: Callable[[], None] = lambda: None) -> None:
        """Without a tenure nothing can be written. `closing` is called when the database is closed."""
        idle = f"{int(_IDLE_S * 1000)}ms"
        self._connection = _Connection(url, {"idle_in_transaction_session_timeout": idle})
        self._lock = threading.RLock()
        self._depth = 0
        self._tenure = tenure
        self._closing = closing
        with self._lock, self._connection.errors():
            self._connection.raw.execute("SELECT 1")

    @property
    def leads(self) -> bool:
        """Whether no other control plane can lead now."""
        return self._tenure is not None and self._tenure.valid

    @property
    def fence(self) -> int:
        """The fencing number."""
        return 0 if self._tenure is None else self._tenure.number

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside is written, or nothing is; a nested transaction joins the outermost."""
        with self._lock:
            if self._depth:
                yield
                return
            connection = self._connection.raw
            self._depth += 1
            try:
                with self._connection.errors(), connection.transaction():
                    self._check(connection)
                    yield
            finally:
                self._depth -= 1

    def _check(self, connection: Any) -> None:
        """Refuse to write under a lease that was lost; until the transaction ends nobody can take over."""
        sql, number = "SELECT 1 FROM lease WHERE number = %s FOR SHARE", self.fence
        if self._tenure is None or connection.execute(sql, (number,)).fetchone() is None:
            raise NotLeading()

    def execute(self, sql: str, parameters: Any = ()) -> None:
        """Run a statement that may write."""
        with self.transaction():
            self._run(sql, parameters)

    def query(self, sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return list(self._run(sql, parameters).fetchall())

    def close(self) -> None:
        """Close the connection and release the lease."""
        with self._lock:
            self._connection.close()
        self._closing()

    def _run(self, sql: str, parameters: Any) -> Any:
        # Inside a transaction a lost connection must not be replaced: the transaction is lost with it.
        connection = self._connection.raw if not self._depth else self._connection.current
        with self._connection.errors():
            return connection.execute(sql.replace("?", "%s"), parameters)
