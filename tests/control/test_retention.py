"""What is kept of jobs that are over: so long, so much; and nothing that runs is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.control.conftest import make_record

from swell.control.database import connect
from swell.control.model import Phase
from swell.control.retention import DAY_S, Ended, Keep, Retention, plan
from swell.control.store import Store
from swell.domain import Event, EventKind
from swell.engines.order import make_folder

NOW_S = 100 * DAY_S


def home(tmp_path: Path, *phases: tuple[str, Phase, float]) -> Store:
    """A home with jobs that ended so many days ago, each with 3 checkpoints of 8 KiB and an event."""
    store = Store(connect(str(tmp_path / "store.db")))
    for job_id, phase, days in phases:
        ended_s = NOW_S - days * DAY_S if phase.over else None
        event = Event(1.0, EventKind.SUBMITTED, job_id=job_id)
        store.accept(make_record(job_id, phase, ended_s=ended_s), None, [event])
        for step in range(3):
            folder = tmp_path / "jobs" / job_id / "checkpoints" / f"step-{step:012d}"
            folder.mkdir(parents=True)
            (folder / "data").write_bytes(b"x" * 8192)
    return store


def left(tmp_path: Path) -> dict[str, int]:
    folders = (tmp_path / "jobs").iterdir()
    return {path.name: len(list((path / "checkpoints").iterdir())) for path in folders}


def test_old_jobs_are_forgotten_middle_aged_ones_thinned_and_active_ones_kept(tmp_path: Path) -> None:
    store = home(
        tmp_path,
        ("old", Phase.FINISHED, 40),
        ("thin", Phase.FAILED, 5),
        ("new", Phase.CANCELLED, 0.1),
        ("run", Phase.RUNNING, 0),
        ("wait", Phase.PAUSED, 0),
    )
    tidy = Retention(store, tmp_path, Keep())
    would = tidy.run(NOW_S, dry=True)
    assert len(left(tmp_path)) == 5, "a dry run deletes nothing"
    done = tidy.run(NOW_S)
    assert (done.forgotten, done.thinned) == (would.forgotten, would.thinned) == (["old"], ["thin"])
    assert done.freed_bytes == would.freed_bytes == 5 * 8192
    assert left(tmp_path) == {"thin": 1, "new": 3, "run": 3, "wait": 3}
    assert (tmp_path / "jobs" / "thin" / "checkpoints" / "step-000000000002").exists(), "the newest is kept"
    assert store.job("old") is None and store.events(job_id="old") == []
    assert len(store.events()) == 4
    assert tidy.run(NOW_S).forgotten == []
    store.close()


HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_job_whose_processes_still_end_is_left_for_the_next_time(tmp_path: Path) -> None:
    store = home(tmp_path, ("old", Phase.CANCELLED, 40))
    tidy = Retention(store, tmp_path, Keep())
    lock = make_folder(tmp_path / "jobs" / "old") / "lock"
    words = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None and holder.stdout.readline()
        assert tidy.run(NOW_S).forgotten == [] and store.job("old") is not None
        holder.stdin.close()
    assert tidy.run(NOW_S).forgotten == ["old"]
    assert not lock.parent.exists()
    store.close()


def test_the_store_forgets_no_job_that_is_not_over(tmp_path: Path) -> None:
    store = home(tmp_path, ("run", Phase.RUNNING, 0))
    store.forget("run")
    assert store.job("run") is not None and len(store.events(job_id="run")) == 1
    store.close()


JOBS = st.lists(
    st.tuples(st.floats(0, 100 * DAY_S), st.integers(0, 1000), st.integers(0, 4)), max_size=20
).map(lambda rows: [Ended(str(i), *row) for i, row in enumerate(rows)])


@given(JOBS, st.floats(0, 100 * DAY_S), st.integers(0, 5000))
def test_what_is_kept_is_young_and_small_enough(jobs: list[Ended], for_s: float, most: int) -> None:
    todo = plan(jobs, Keep(for_s=for_s, most_bytes=most), NOW_S)
    kept = [job for job in jobs if job.job_id not in todo.forget]
    assert all(NOW_S - job.ended_s <= for_s for job in kept)
    assert sum(job.bytes for job in kept) <= most
    assert not set(todo.thin) & set(todo.forget)
    assert plan(jobs, Keep(for_s=None, thin_after_s=None), NOW_S) == plan([], Keep(), NOW_S)
