"""One of several control planes on one store: `swell up --ha`.

All of them share the home, on one machine or on a shared file system, and the Postgres store. Each has a
folder of its own in the home, with its lock and its address:

    planes/<name>/up.lock, server.json

The lock of the home itself is shared by them, so that a control plane without --ha is refused while one of
them runs, and the other way round. `server.json` of the home names the one that leads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from swell.cli._platform import (
    Settings,
    check_store,
    listen,
    make_engine,
    make_plane,
    only_one,
    replayer,
    running_pid,
    stop,
    warm_up,
)
from swell.domain import InputError, SwellError

if TYPE_CHECKING:
    from swell.api.front import Front
    from swell.api.listener import Listener
    from swell.control.lease import Tenure
    from swell.control.plane import ControlPlane
    from swell.control.store import Store
    from swell.engines.supervised import SupervisedEngine

log = logging.getLogger(__name__)

Ready = Callable[[str, "ControlPlane", list[Path]], None]


def enter(home: Path) -> tuple[Path, tuple[TextIO, TextIO]]:
    """The folder of a new control plane of this home, and the locks to hold as long as it lives."""
    shared = only_one(home, shared=True)
    for number in itertools.count(1):
        folder = home / "planes" / _name(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(SwellError):
            return folder, (shared, only_one(folder))
    raise AssertionError


def _name(number: int) -> str:
    """The name of a control plane of this machine. Names of machines have no underscore."""
    return socket.gethostname() + ("" if number == 1 else f"_{number}")


def check(settings: Settings) -> str:
    """Refuse what cannot have a standby; returns the URL of the store."""
    from swell.control.postgres import is_postgres
    from swell.policies import make_policy

    if settings.store is None or not is_postgres(settings.store):
        raise InputError(
            "store: --ha needs a store that several control planes can reach, postgresql://..., got"
            f" {'none' if settings.store is None else repr(settings.store)} (SQLite has one writer);"
            " set SWELL_STORE, or leave --ha out",
            field="store",
        )
    if settings.policy is not None:
        make_policy(settings.policy)
    make_engine(settings)
    return settings.store


def serve(settings: Settings, ready: Ready, standby: Callable[[str, str], None]) -> None:
    """Run a control plane until SIGTERM or SIGINT: as a standby, and as the leader when it is its turn.

    `ready` is called whenever it begins to lead, `standby` with its URL and name once it answers.
    """
    from swell.api.front import Front
    from swell.api.listener import Listener
    from swell.control.lease import Candidate, Holder
    from swell.control.postgres import PostgresLease
    from swell.control.succession import Succession
    from swell.policies import DEFAULT

    url, host = check(settings), socket.gethostname()
    folder, locks = enter(settings.home)
    for lock in locks:
        os.dup(lock.fileno())  # never closed, so that the lock is free only once the process has ended
    table = PostgresLease(url)
    leader = table.leader()
    if settings.engine == "local" and leader is not None and leader.holder.host not in ("", host):
        raise InputError(
            f"engine: with the local engine jobs run on the machine of the control plane, and the one that"
            f" leads is on {leader.holder.host}; start this one there, or use --engine ray",
            field="engine",
        )
    warm_up((settings.policy if leader is None else _policy_in_force(url)) or DEFAULT)
    candidate = Candidate(table, Holder(folder.name, "", host))
    ca = None if settings.cert is None else str(settings.cert)
    front = Front(candidate, lambda: _tokens(url), tls=settings.cert is not None, ca=ca)
    listener = listen(partial(Listener, front), settings, home=folder, closing=front.closing)
    candidate.holder = Holder(folder.name, listener.url, host)
    # A policy that is given counts if no other control plane led at the start; else the one in force goes on.
    policy = settings.policy if leader is None else None
    prepared = [_prepared(settings)]

    def lead(tenure: Tenure) -> Callable[[], None]:
        nonlocal policy
        front.ready.wait(30.0)
        engine = prepared.pop() if prepared else make_engine(settings)
        step_down = _lead(settings, url, policy, tenure, engine, front, listener, ready)
        policy = None

        def prepare_again() -> None:
            step_down()
            if not succession.part.stopping.is_set():
                prepared.append(_prepared(settings))

        return prepare_again

    succession = Succession(candidate, lead, front.turned)
    standby(listener.url, folder.name)
    succession.start()
    try:
        listener.run()
    finally:
        succession.stop()
        for engine in prepared:
            engine.close()
        listener.file.remove(settings.home, os.getpid())


def _prepared(settings: Settings) -> SupervisedEngine:
    """An engine for the time when this control plane leads; what takes long has begun."""
    engine = make_engine(settings)
    try:
        engine.prepare()
    except SwellError as error:
        log.warning("the engine is not ready to lead: %s", error)  # tried again when it is needed
    return engine


def _lead(
    settings: Settings,
    url: str,
    policy: str | None,
    tenure: Tenure,
    engine: SupervisedEngine,
    front: Front,
    listener: Listener,
    ready: Ready,
) -> Callable[[], None]:
    """Bring a control plane up under a tenure; returns how to bring it down. `policy`: decide by this one."""
    from swell.api.audit import FILE, AuditLog
    from swell.api.auth import TokenBook, ensure_tokens
    from swell.api.server import create_app
    from swell.control.postgres import PostgresDatabase
    from swell.control.store import Store

    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        store = Store(PostgresDatabase(url, tenure))
        stack.callback(store.close)
        check_store(settings.home, store)
        if policy is not None:
            store.set_setting("policy", policy)
        plane = make_plane(settings, store, engine)
        book = TokenBook(store)
        new_tokens = ensure_tokens(book, settings.home)
        audit, tls = AuditLog(settings.home / FILE), settings.cert is not None
        app = create_app(plane, store, book=book, replay=replayer(plane), tls=tls, audit=audit)
        stack.callback(plane.stop)
        plane.start()
        front.lead(app, tenure)
        stack.callback(front.leave)
        listener.file.write(settings.home)
        log.warning("%s leads from now on, with the number %d", listener.url, tenure.number)
        ready(listener.url, plane, new_tokens)
        return stack.pop_all().close


def _reader(url: str) -> Store:
    """The store, for reading only."""
    from swell.control.postgres import PostgresDatabase
    from swell.control.store import Store

    return Store(PostgresDatabase(url, None), migrate=False)


def _tokens(url: str) -> Any:
    from swell.api.auth import TokenBook

    store = _reader(url)
    try:
        return TokenBook(store)
    finally:
        store.close()


def _policy_in_force(url: str) -> str | None:
    store = _reader(url)
    try:
        return store.setting("policy")
    except SwellError:
        return None  # the other one is just making the store
    finally:
        store.close()


def folders(home: Path) -> list[Path]:
    """The folders of the control planes with --ha that run on this machine, that of the leader first."""
    from swell.api.home import ServerFile

    leader, found = ServerFile.read(home), sorted((home / "planes").glob("*"))
    # The lock of one on another machine may be seen here too, with a process id that means nothing here.
    mine = [folder for folder in found if folder.name.split("_")[0] == _name(1)]
    alive = [folder for folder in mine if running_pid(folder) is not None]
    return sorted(alive, key=lambda folder: leader is None or running_pid(folder) != leader.pid)


def stop_planes(home: Path, name: str | None) -> list[str]:
    """Stop the control planes with --ha on this machine, or only that of a name; returns their names."""
    running = folders(home)
    chosen = [folder for folder in running if name is None or folder.name == name]
    if name is not None and not chosen:
        known = ", ".join(folder.name for folder in running) or "none"
        raise InputError(f"plane: no control plane '{name}' runs here; there are: {known}", field="plane")
    for folder in reversed(chosen):  # the standbys first, so that the lead does not go round
        stop(folder)
    return [folder.name for folder in chosen]


def others_run(home: Path) -> bool:
    """Whether a control plane of this home runs, on this machine or, on a shared file system, on another."""
    try:
        with only_one(home):
            return False
    except SwellError:
        return True
