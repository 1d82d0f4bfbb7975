"""`swell doctor`: what is wrong with a home, its store, this machine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from swell.cli._common import home_option, json_option, new_table, print_json, print_rich

OK, ODD, BAD = "ok", "odd", "bad"
LEAST_DESCRIPTORS = 4096
LEAST_FREE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    about: str
    state: str
    """'ok', 'odd' (it works, but look at it) or 'bad'."""
    note: str


@click.command(epilog="\b\nExample:\n  swell doctor\n")
@click.option("--store", metavar="URL", envvar="SWELL_STORE", help="The store that `swell up` is given.")
@json_option
@home_option
def doctor(store: str | None, as_json: bool, home: str | None) -> None:
    """Check home, store, tokens, ports, disk, descriptors, GPUs and Ray. Changes nothing.

    The exit code is 1 if something is bad.
    """
    from swell.api.home import home_dir
    from swell.cli._common import add_row

    found = list(examine(home_dir(home), store))
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        table = new_table(["about", "state", "what was found"])
        for one in found:
            add_row(table, one.about, one.state, one.note)
        print_rich(table)
    if any(one.state == BAD for one in found):
        click.get_current_context().exit(1)


def examine(home: Path, store: str | None) -> Iterator[Finding]:
    """All checks, one after the other."""
    if trouble := _unusable(home):
        yield Finding("home", BAD, trouble)
        return
    yield _home(home)
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "server": lambda: _server(home),
        "store": lambda: _store(home, store),
        "tokens": lambda: _tokens(home),
        "jobs": lambda: _jobs(home),
    }
    for about, check in checks.items():
        try:
            yield from check()
        except OSError as error:
            note = f"{error.filename or home}: {error.strerror} for this account (uid {os.geteuid()})"
            yield Finding(about, BAD, note)
    yield _disk(home)
    yield _descriptors()
    yield _gpus()
    yield _wall(home)
    yield _groups()
    yield _ray(home)


def _unusable(home: Path) -> str:
    """Why nothing in a home can be looked at; empty if it can."""
    try:
        facts = home.stat()
    except FileNotFoundError:
        return f"{home} does not exist: 'swell up' makes it"
    except OSError as error:
        return f"{home}: {error.strerror} for this account (uid {os.geteuid()})"
    if not stat.S_ISDIR(facts.st_mode):
        return f"{home} is no directory: name another --home"
    if not os.access(home, os.R_OK | os.X_OK):
        return (
            f"{home} cannot be read by this account (uid {os.geteuid()}): run swell as the account that owns"
            f" it (uid {facts.st_uid})"
        )
    return ""


def _home(home: Path) -> Finding:
    facts = home.stat()
    if facts.st_uid != os.getuid():
        return Finding("home", BAD, f"{home} belongs to another account (uid {facts.st_uid})")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        return Finding("home", ODD, f"{home} is open to others: chmod 700 {home}")
    if not os.access(home, os.W_OK):
        return Finding("home", BAD, f"{home} cannot be written")
    return Finding("home", OK, f"{home}, for this account only")


def _server(home: Path) -> Iterator[Finding]:
    from swell.api.home import ServerFile
    from swell.cli._platform import healthy, running_pid

    pid = running_pid(home)
    if pid is None:
        yield Finding("server", ODD, "no control plane runs here: 'swell up -d' starts one")
        return
    found = ServerFile.read(home)
    if found is None:
        yield Finding("server", BAD, f"process {pid} runs, but does not serve yet; see server.log")
    elif (health := healthy(found.nearest, found.ca)) is not None:
        yield Finding("server", OK, f"process {pid} answers at {found.url}")
        for note in health.get("notes", []):
            yield Finding(
                "policy", ODD, f"{note}; 'swell watch' and server.log say why, 'swell policy' sets one"
            )
    else:
        yield Finding("server", BAD, f"process {pid} at {found.url} is not well: see /healthz and server.log")


def _store(home: Path, url: str | None) -> Iterator[Finding]:
    from swell.cli._platform import STORE_ID

    if url is not None and "://" in url and not url.startswith("sqlite://"):
        yield _postgres(home, url)
        return
    path = Path((url or str(home / "store.db")).removeprefix("sqlite://"))
    if not path.exists():
        yield Finding("store", BAD, f"{path} does not exist: another --store, or 'swell restore'?")
        return
    if not os.access(path, os.R_OK):
        yield Finding("store", BAD, f"{path} cannot be read by this account (uid {os.geteuid()})")
        return
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0) as database:
            (state,) = database.execute("PRAGMA quick_check").fetchone()
            (jobs,) = database.execute("SELECT COUNT(*) FROM jobs").fetchone()
            identity = database.execute("SELECT value FROM settings WHERE name = 'store_id'").fetchone()
    except sqlite3.Error as error:
        yield Finding("store", BAD, f"{path} cannot be read ({error}): 'swell restore' brings a backup back")
        return
    known = (home / STORE_ID).read_text().strip() if (home / STORE_ID).exists() else ""
    if state != "ok":
        yield Finding("store", BAD, f"{path} is damaged ({state}): 'swell restore' brings a backup back")
    elif known and identity and identity[0] != known:
        yield Finding("store", BAD, f"{path} is not this home's store (id {identity[0]} instead of {known})")
    elif stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield Finding("store", ODD, f"{path} can be read by others: chmod 600 {path}")
    else:
        yield Finding("store", OK, f"{path}, {jobs} jobs")
    yield from _records(path, home)


def _postgres(home: Path, url: str) -> Finding:
    from swell.cli._platform import STORE_ID
    from swell.control.postgres import PostgresDatabase, PostgresLease
    from swell.domain import SwellError

    try:
        database, lease = PostgresDatabase(url, None), PostgresLease(url, make=False)
        ((jobs,),) = database.query("SELECT COUNT(*) FROM jobs")
        rows = database.query("SELECT value FROM settings WHERE name = 'store_id'")
        leader = lease.leader()
        database.close()
        lease.close()
    except SwellError as error:
        return Finding("store", BAD, str(error))
    known = (home / STORE_ID).read_text().strip() if (home / STORE_ID).exists() else ""
    if known and rows and rows[0][0] != known:
        return Finding("store", BAD, f"it is not this home's store (id {rows[0][0]} instead of {known})")
    where = "" if leader is None else f" at {leader.holder.url}" if leader.holder.url else ""
    leads = "no control plane leads" if leader is None else f"a control plane leads{where}"
    return Finding("store", OK if leader is not None else ODD, f"Postgres, {jobs} jobs; {leads}")


def _records(path: Path, home: Path) -> Iterator[Finding]:
    """Records that cannot be read, and jobs that run without a record."""
    from swell.cli._platform import jobs_alive
    from swell.control.store import OVER, record_from_json

    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0) as database:
        rows = database.execute("SELECT job_id, phase, record FROM jobs").fetchall()
    damaged = []
    for job_id, _, text in rows:
        try:
            record_from_json(text)
        except Exception:
            damaged.append(job_id)
    if damaged:
        yield Finding("records", BAD, f"cannot be read: {', '.join(damaged[:10])}")
    phases = {job_id: phase for job_id, phase, _ in rows}
    alive = [folder.name for folder in jobs_alive(home)]
    if strays := [name for name in alive if name not in phases]:
        what = f"run here and are not in the store: {', '.join(strays[:10])}"
        yield Finding("jobs", BAD, f"{what}; the wrong --store? 'swell up --end-unknown' ends them")
    if ending := [name for name in alive if phases.get(name) in OVER]:
        what = f"are over and have processes still: {', '.join(ending[:10])}"
        yield Finding("jobs", ODD, f"{what}; the control plane ends them within seconds")


def _tokens(home: Path) -> Iterator[Finding]:
    from swell.api.home import token_file

    path = token_file(home, "admin")
    if not path.exists():
        yield Finding("tokens", ODD, f"{path} is not there: 'swell token reset' makes it, with swell down")
    elif stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield Finding("tokens", BAD, f"{path} can be read by others: chmod 600 {path}")
    else:
        yield Finding("tokens", OK, f"{path}, for this account only")


def _jobs(home: Path) -> Iterator[Finding]:
    from swell.cli._platform import jobs_alive

    yield Finding("running", OK, f"{len(jobs_alive(home))} jobs have processes on this machine")


def _disk(home: Path) -> Finding:
    usage = shutil.disk_usage(home)
    text = f"{usage.free / 2**30:.1f} GiB of {usage.total / 2**30:.1f} GiB are free"
    if usage.free < LEAST_FREE_BYTES:
        return Finding("disk", BAD, f"{text}: 'swell gc --keep 1d' may help")
    return Finding("disk", OK, text)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_DESCRIPTORS:
        return Finding(
            "descriptors", ODD, f"ulimit -n is {soft} (at most {hard}): 4096 or more serve more people"
        )
    return Finding("descriptors", OK, f"ulimit -n is {soft}")


def _gpus() -> Finding:
    from swell.engines.local import detect_gpus

    count = detect_gpus()
    if not count:
        return Finding("GPUs", OK, "none: jobs run on CPU slots")
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return Finding("GPUs", BAD, f"{count}, but PyTorch is not installed: pip install 'swell[torch]'")
    return Finding("GPUs", OK, f"{count}")


def _wall(home: Path) -> Finding:
    from swell.cli._platform import running_pid
    from swell.engines.local import try_wall, wall_trouble
    from swell.engines.wall import WallSetting

    setting = WallSetting.read(home)
    trouble = wall_trouble(try_wall(setting.account), home)
    if not trouble and not setting.walled and running_pid(home) is not None:
        trouble = f"the control plane that runs walls no jobs off: {setting.why_not}"
    if trouble:
        note = f"jobs could read this account's files and tokens ({trouble}): see docs/guides/security.md"
        return Finding("wall", ODD, note)
    return Finding("wall", OK, "jobs see neither this home nor other jobs")


def _groups() -> Finding:
    from swell.engines import groups

    if groups.where() is None:
        note = (
            "no cgroup v2 that this account may use: a process that sheds its environment may outlive its job"
        )
        return Finding("groups", OK, note)
    return Finding("groups", OK, "every process of a job ends with it (cgroup v2)")


def _ray(home: Path) -> Finding:
    from importlib.util import find_spec

    there = find_spec("ray") is not None
    if trouble := ray_in_clear(home):
        return Finding("Ray", ODD, trouble)
    return Finding("Ray", OK, "installed" if there else "not installed; needed only for --engine ray")


def ray_in_clear(home: Path) -> str:
    """What to do about a Ray cluster of several hosts without TLS; empty if there is none."""
    from swell.cli._platform import running_pid
    from swell.engines.ray import places, tls

    try:  # the control plane reaches its cluster, so it has the cluster's settings
        entries = Path(f"/proc/{running_pid(home)}/environ").read_text(errors="replace").split("\0")
        environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        kept = json.loads((home / places.PLACES).read_text())["places"]
        addresses = [str(place["address"]) for place in kept if place["up"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # no control plane runs, or not on Ray
    return tls.ADVICE if tls.in_clear(addresses, environment) else ""
