"""The process that supervisors are forked from: used when it is there, done without when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.waiting import is_gone, wait_until

from swell.engines import RunState, nursery
from swell.engines.local import LocalSite
from swell.engines.nursery import SHARED
from swell.engines.processes import MARK, mark, parent, workers_of
from swell.engines.supervisor import supervisor_of

from .conftest import Bench


def _running(bench: Bench, job_id: str) -> None:
    bench.wait(bench.engines[-1], job_id, lambda seen: seen and seen.state is RunState.RUNNING)


def _supervisor(bench: Bench, job_id: str) -> int:
    return supervisor_of(bench.home / "jobs" / job_id) or -1


def test_the_first_job_waits_for_the_nursery_and_is_forked_from_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED)
    engine = bench.engine()
    engine.apply(bench.launch("a", "--epochs", 1000, "--sample-ms", 3), (0, 1))
    _running(bench, "a")
    supervisor = _supervisor(bench, "a")
    assert Path(f"/proc/{supervisor}/comm").read_text() == "swell-superviso\n"
    assert f"{MARK}={mark(bench.home / 'jobs' / 'a')}" in Path(f"/proc/{supervisor}/environ").read_text()
    nursery = parent(supervisor)
    assert nursery is not None and b"swell.engines.nursery" in Path(f"/proc/{nursery}/cmdline").read_bytes()
    workers = set(workers_of(bench.home / "jobs" / "a"))
    assert len(workers) == 2

    engine.close()  # the nursery ends with its engine, the job does not
    wait_until(lambda: is_gone(nursery), 30, lambda: f"process {nursery}")
    steps = len(bench.steps("a"))
    bench.wait_for(lambda: len(bench.steps("a")) > steps)
    assert set(workers_of(bench.home / "jobs" / "a")) == workers


def test_a_job_starts_without_a_nursery_that_was_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED, str(bench.home / "nobody-listens"))
    (bench.home / "nobody-listens").touch()
    bench.engine().apply(bench.launch("a"), (0,))
    _running(bench, "a")
    assert b"swell.engines.supervisor" in Path(f"/proc/{_supervisor(bench, 'a')}/cmdline").read_bytes()


def test_a_nursery_has_no_address_that_a_job_could_reach_or_remove_and_comes_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED)
    monkeypatch.setattr(nursery, "_RENEW_S", 0.0)
    engine = bench.engine()
    assert isinstance(engine.site, LocalSite)
    made = engine.site._nursery
    assert made is not None and made._process is not None
    wait_until(lambda: made.ready, 120, "the nursery")
    first = made._process
    assert _sockets(first.pid) and not _sockets(first.pid) & _sockets_with_names()
    first.kill()
    wait_until(lambda: made._process is not first and made.ready, 120, "the next nursery")
    engine.apply(bench.launch("b", "--epochs", 1), (0,))
    _running(bench, "b")
    assert parent(_supervisor(bench, "b")) == made._process.pid


def _sockets(pid: int) -> set[str]:
    """The inodes of the sockets that a process has."""
    links = (str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
    return {link.removeprefix("socket:[")[:-1] for link in links if link.startswith("socket:[")}


def _sockets_with_names() -> set[str]:
    """The inodes of all sockets of this machine that have a path or an abstract name."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[6] for row in rows if len(row) > 7}
