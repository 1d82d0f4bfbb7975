"""The store: the event log, and the state that the events led to.

Each change is one transaction: the events of a change and the job's new record are written together or not at
all. What a user is told is on disk. Jobs that are over stay here and leave memory.

Migrations are a list of steps that only ever grows; a store remembers how many have been applied to it.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from swell.control.errors import Conflict, StoreUnavailable, Unreadable
from swell.control.model import Estimate, JobRecord, JobRequest, Phase, Promise
from swell.control.postgres import FAILED, is_postgres, open_database
from swell.domain import Event, EventKind, InputError

# One SQL dialect for two databases: SQLite by default, Postgres by URL.
#
# Only what the store needs: transactions, `?` parameters, rows as tuples. A database has one writer: for
# SQLite the one control plane of its home, for Postgres (`control/postgres.py`) the one that has the lease.


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
        with self._lock:
            return self._run(sql, parameters).fetchall()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _run(self, sql: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, parameters)
        except sqlite3.IntegrityError as error:
            raise Conflict(f"the store has this entry already ({error})") from error
        except sqlite3.Error as error:
            raise StoreUnavailable(FAILED.format(error)) from error


log = logging.getLogger(__name__)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE jobs (
            job_id TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            phase TEXT NOT NULL,
            submitted_s DOUBLE PRECISION NOT NULL,
            idempotency_key TEXT,
            record TEXT NOT NULL
        )""",
        "CREATE UNIQUE INDEX jobs_key ON jobs (owner, idempotency_key)",
        "CREATE INDEX jobs_phase ON jobs (phase, submitted_s)",
        """CREATE TABLE events (
            seq {auto_key},
            time_s DOUBLE PRECISION NOT NULL,
            kind TEXT NOT NULL,
            job_id TEXT,
            node TEXT,
            line TEXT NOT NULL
        )""",
        "CREATE INDEX events_job ON events (job_id, seq)",
        """CREATE TABLE history (
            fingerprint TEXT PRIMARY KEY,
            updated_s DOUBLE PRECISION NOT NULL,
            content TEXT NOT NULL
        )""",
        """CREATE TABLE tokens (
            digest TEXT PRIMARY KEY,
            user_name TEXT NOT NULL,
            role TEXT NOT NULL,
            expires_s DOUBLE PRECISION
        )""",
        "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    ),
)
"""Never change a step that has been released: add one."""

_BATCH = 500
"""Most events that are deleted in one transaction."""
OVER = tuple(phase.value for phase in Phase if phase.over)


class Store:
    """Everything the control plane must not forget."""

    def __init__(self, database: Database, *, migrate: bool = True) -> None:
        """`migrate`: bring the store up to this version; only the control plane that leads may do that."""
        self._database = database
        self.unreadable: dict[str, str] = {}
        """Jobs whose record cannot be read, and why."""
        if migrate:
            self._migrate()

    @property
    def leads(self) -> bool:
        """Whether the control plane of this process is the one that may decide now."""
        return self._database.leads

    @property
    def fence(self) -> int:
        """The fencing number of this control plane; 0 if the store cannot have several."""
        return self._database.fence

    def _migrate(self) -> None:
        db = self._database
        with db.transaction():
            db.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
            rows = db.query("SELECT version FROM schema_version")
            version = int(rows[0][0]) if rows else 0
            if version > len(MIGRATIONS):
                raise StoreUnavailable(
                    f"the store was written by a newer swell (schema {version}, here {len(MIGRATIONS)});"
                    " upgrade swell, or give another --store"
                )
            for step in MIGRATIONS[version:]:
                for statement in step:
                    db.execute(statement.format(auto_key=db.auto_key))
            if not rows:
                db.execute("INSERT INTO schema_version VALUES (?)", (len(MIGRATIONS),))
            elif version < len(MIGRATIONS):
                db.execute("UPDATE schema_version SET version = ?", (len(MIGRATIONS),))

    def close(self) -> None:
        self._database.close()

    def transaction(self) -> Any:
        """A context: at its end everything written inside is on disk, or, on an exception, nothing."""
        return self._database.transaction()

    # -- jobs and events ---------------------------------------------------------------------------------

    def accept(self, record: JobRecord, key: str | None, events: Iterable[Event]) -> list[int]:
        """Write a new job and its events; returns the numbers of the events."""
        db = self._database
        columns = (record.job_id, record.owner, record.phase.value, record.submitted_s, key)
        with db.transaction():
            db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?)", (*columns, record_to_json(record)))
            return self._append(events)

    def by_key(self, owner: str, key: str) -> JobRecord | None:
        """The job that an owner submitted with this idempotency key."""
        rows = self._database.query(
            "SELECT job_id, owner, record FROM jobs WHERE owner = ? AND idempotency_key = ?", (owner, key)
        )
        return self._read(*rows[0]) if rows else None

    def save(self, records: Iterable[JobRecord], events: Iterable[Event] = ()) -> list[int]:
        """Write changed jobs and events in one transaction; returns the numbers of the events."""
        db = self._database
        with db.transaction():
            for record in records:
                db.execute(
                    "UPDATE jobs SET phase = ?, record = ? WHERE job_id = ?",
                    (record.phase.value, record_to_json(record), record.job_id),
                )
            return self._append(events)

    def _append(self, events: Iterable[Event]) -> list[int]:
        sql = "INSERT INTO events (time_s, kind, job_id, node, line) VALUES (?, ?, ?, ?, ?) RETURNING seq"
        return [
            int(self._database.query(sql, (e.time_s, e.kind.value, e.job_id, e.node, e.to_json()))[0][0])
            for e in events
        ]

    def job(self, job_id: str) -> JobRecord | None:
        rows = self._database.query("SELECT job_id, owner, record FROM jobs WHERE job_id = ?", (job_id,))
        return self._read(*rows[0]) if rows else None

    def phase(self, job_id: str) -> Phase | None:
        """The phase of a job, also of one whose record cannot be read; None if the store does not know it."""
        rows = self._database.query("SELECT phase FROM jobs WHERE job_id = ?", (job_id,))
        return Phase(rows[0][0]) if rows else None

    def jobs(
        self,
        *,
        owner: str | None = None,
        over: bool | None = None,
        phase: Phase | None = None,
        before: JobRecord | None = None,
        limit: int = 1000,
    ) -> list[JobRecord]:
        """Jobs, newest first. `over`: only jobs that are over (True), or only those that are not (False).
        `before`: only jobs older than this one."""
        where, parameters = [], list[Any]()
        if owner is not None:
            where.append("owner = ?")
            parameters.append(owner)
        if phase is not None:
            where.append("phase = ?")
            parameters.append(phase.value)
        if before is not None:
            where.append("(submitted_s, job_id) < (?, ?)")
            parameters += [before.submitted_s, before.job_id]
        if over is not None:
            marks = ", ".join("?" * len(OVER))
            where.append(f"phase {'IN' if over else 'NOT IN'} ({marks})")
            parameters.extend(OVER)
        clause = f"WHERE {' AND '.join(where)}" if where else ""
        rows = self._database.query(
            f"SELECT job_id, record FROM jobs {clause} ORDER BY submitted_s DESC, job_id DESC LIMIT ?",
            (*parameters, limit),
        )
        return [record for row in rows if (record := self._readable(row[0], row[1])) is not None]

    def _read(self, job_id: str, owner: str, text: str) -> JobRecord:
        """A record by itself; raises Unreadable, after a line in the log, if it cannot be read."""
        record = self._readable(job_id, text)
        if record is None:
            raise Unreadable(
                f"the record of job '{job_id}' cannot be read, so the job is left as it is; the server's log"
                " says what is wrong with it, and 'swell restore' brings a backup back",
                owner,
            )
        return record

    def _readable(self, job_id: str, text: str) -> JobRecord | None:
        """A record for a list; None, and a line in the log, if it cannot be read."""
        try:
            return record_from_json(text)
        except Exception as error:  # whatever is wrong with it, it is wrong with this one job
            if job_id not in self.unreadable:
                log.error("the record of job %s cannot be read (%r): the job is left as it is", job_id, error)
            self.unreadable[job_id] = repr(error)
            return None

    @property
    def identity(self) -> str:
        """The id of this store, made when it was, by which a home recognises its own."""
        found = self.setting("store_id")
        if found is None:
            found = secrets.token_hex(8)
            self.set_setting("store_id", found)
        return found

    def events(
        self, since_seq: int = 0, *, job_id: str | None = None, limit: int = 1000
    ) -> list[tuple[int, Event]]:
        """Events with a number above `since_seq`, oldest first."""
        clause = "" if job_id is None else "AND job_id = ?"
        sql = f"SELECT seq, line FROM events WHERE seq > ? {clause} ORDER BY seq LIMIT ?"
        found: list[tuple[int, Event]] = []
        while True:
            missing = limit - len(found)
            rows = self._database.query(sql, (since_seq, *([] if job_id is None else [job_id]), missing))
            read = [(int(seq), _event(int(seq), line)) for seq, line in rows]
            found += [(seq, event) for seq, event in read if event is not None]
            if len(rows) < missing or len(found) >= limit:
                return found
            since_seq = read[-1][
                0
            ]  # some could not be read: a page that is not full says that there are no more

    def changes(self, kinds: Sequence[EventKind], since_s: float, limit: int) -> list[Event]:
        """Events of some kinds from a moment on, oldest first; only the newest if there are over `limit`."""
        marks = ", ".join("?" * len(kinds))
        rows = self._database.query(
            f"SELECT seq, line FROM events WHERE kind IN ({marks}) AND time_s >= ? ORDER BY seq DESC LIMIT ?",
            (*(kind.value for kind in kinds), since_s, limit),
        )
        read = (_event(int(seq), line) for seq, line in reversed(rows))
        return [event for event in read if event is not None]

    def tally(self, job_id: str, kind: EventKind) -> tuple[int, float]:
        """How many events of a kind a job has in the log, and the seconds from the first to the last."""
        what = "COUNT(*), COALESCE(MAX(time_s) - MIN(time_s), 0)"
        sql = f"SELECT {what} FROM events WHERE job_id = ? AND kind = ?"
        count, span_s = self._database.query(sql, (job_id, kind.value))[0]
        return int(count), float(span_s)

    def thin(self, job_id: str, kind: EventKind) -> None:
        """Delete every second event of a kind that a job has in the log."""
        numbered = (
            "SELECT seq, ROW_NUMBER() OVER (ORDER BY seq) AS n FROM events WHERE job_id = ? AND kind = ?"
        )
        with self._database.transaction():
            self._database.execute(
                f"DELETE FROM events WHERE seq IN (SELECT seq FROM ({numbered}) AS t WHERE n = 2 * (n / 2))",
                (job_id, kind.value),
            )

    def forget(self, job_id: str) -> None:
        """Delete a job that is over, and its events."""
        marks = ", ".join("?" * len(OVER))
        with self._database.transaction():
            self._database.execute(
                "DELETE FROM events WHERE job_id IN"
                f" (SELECT job_id FROM jobs WHERE job_id = ? AND phase IN ({marks}))",
                (job_id, *OVER),
            )
            self._database.execute(
                f"DELETE FROM jobs WHERE job_id = ? AND phase IN ({marks})", (job_id, *OVER)
            )

    def events_of_no_job(self, before_s: float) -> list[tuple[int, Event]]:
        """Events of nodes, reservations and the cluster before a moment, oldest first."""
        rows = self._database.query(
            "SELECT seq, line FROM events WHERE job_id IS NULL AND time_s < ? ORDER BY seq", (before_s,)
        )
        read = [(int(seq), _event(int(seq), line)) for seq, line in rows]
        return [(seq, event) for seq, event in read if event is not None]

    def drop_events(self, seqs: Sequence[int]) -> None:
        """Delete events by their numbers."""
        for i in range(0, len(seqs), _BATCH):
            some = seqs[i : i + _BATCH]
            with self._database.transaction():
                self._database.execute(
                    f"DELETE FROM events WHERE seq IN ({', '.join('?' * len(some))})", tuple(some)
                )

    def last_seq(self) -> int:
        """The number of the newest event; 0 if there is none."""
        return int(self._database.query("SELECT COALESCE(MAX(seq), 0) FROM events")[0][0])

    # -- history, tokens, settings -----------------------------------------------------------------------

    def remember(self, fingerprint: str, now_s: float, content: dict[str, Any]) -> None:
        """Keep what was learnt of a kind of job; replaces what was kept before."""
        self._put(
            "history", ("fingerprint", "updated_s", "content"), (fingerprint, now_s, json.dumps(content))
        )

    def prune_history(self, before_s: float, most: int) -> None:
        """Forget kinds of jobs that have not run since a moment, and all but the `most` that ran last."""
        newest = "SELECT fingerprint FROM history ORDER BY updated_s DESC, fingerprint LIMIT ?"
        with self._database.transaction():
            self._database.execute("DELETE FROM history WHERE updated_s < ?", (before_s,))
            self._database.execute(f"DELETE FROM history WHERE fingerprint NOT IN ({newest})", (most,))

    def recall(self, fingerprint: str) -> dict[str, Any] | None:
        """What is known of a kind of job."""
        rows = self._database.query("SELECT content FROM history WHERE fingerprint = ?", (fingerprint,))
        try:
            return dict(json.loads(rows[0][0])) if rows else None
        except (ValueError, TypeError) as error:
            log.error(
                "the history of %s cannot be read (%r): its next job starts without it", fingerprint, error
            )
            return None

    def add_token(self, digest: str, user: str, role: str, expires_s: float | None) -> None:
        """Accept a token from now on. Only its digest is kept."""
        columns = ("digest", "user_name", "role", "expires_s")
        self._put("tokens", columns, (digest, user, role, expires_s))

    def token(self, digest: str) -> tuple[str, str, float | None] | None:
        """User, role and expiry of a token."""
        rows = self._database.query(
            "SELECT user_name, role, expires_s FROM tokens WHERE digest = ?", (digest,)
        )
        return (rows[0][0], rows[0][1], rows[0][2]) if rows else None

    def tokens(self) -> list[tuple[str, str, str, float | None]]:
        """All tokens: digest, user, role, expiry."""
        rows = self._database.query(
            "SELECT digest, user_name, role, expires_s FROM tokens ORDER BY user_name"
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    def drop_token(self, digest: str) -> None:
        """Accept a token no longer."""
        with self._database.transaction():
            self._database.execute("DELETE FROM tokens WHERE digest = ?", (digest,))

    def setting(self, name: str) -> str | None:
        """A setting that survives restarts: the policy, the drained nodes."""
        rows = self._database.query("SELECT value FROM settings WHERE name = ?", (name,))
        return str(rows[0][0]) if rows else None

    def set_setting(self, name: str, value: str) -> None:
        self._put("settings", ("name", "value"), (name, value))

    def _put(self, table: str, columns: Sequence[str], values: Sequence[Any]) -> None:
        updates = ", ".join(f"{column} = excluded.{column}" for column in columns[1:])
        with self._database.transaction():
            self._database.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
                f" ON CONFLICT ({columns[0]}) DO UPDATE SET {updates}",
                values,
            )


def _event(seq: int, line: str) -> Event | None:
    """An event of the log; None, and a line in the server's log, if it cannot be read."""
    try:
        return Event.from_json(line)
    except Exception as error:  # one event keeps nobody from reading the others
        log.error("event %d cannot be read and is left out: %s", seq, error)
        return None


def record_to_json(record: JobRecord) -> str:
    return json.dumps(record, separators=(",", ":"), default=_plain)


def _plain(part: Any) -> dict[str, Any]:
    """One level of a dataclass as a dict; the encoder calls this again for dataclasses inside."""
    return {name: getattr(part, name) for name in part.__dataclass_fields__}


def record_from_json(text: str) -> JobRecord:
    """A record from the text written by `record_to_json`; fields of newer versions are ignored."""
    raw = json.loads(text, parse_constant=lambda _: None)
    if not isinstance(raw, dict):
        raise ValueError("a record is not an object")
    for name in ("done", "pause_s"):  # swell 0.1 took NaN from a job and stored it
        if raw.get(name) is None or not math.isfinite(raw[name]):
            raw[name] = 0.0
    promise = raw.pop("promise")
    request = raw.pop("request")
    return JobRecord(
        **_known(JobRecord, raw)
        | {
            "phase": Phase(raw["phase"]),
            "wanted": tuple(raw["wanted"]),
            "held": tuple(raw.get("held", ())),
            "request": JobRequest.from_json(request),
            "promise": Promise(
                **_known(Promise, promise) | {"estimate": Estimate(**_known(Estimate, promise["estimate"]))}
            ),
        }
    )


def _known(cls: type, raw: dict[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}  # type: ignore[attr-defined]
