"""What is kept of jobs that are over: so long, so much; and nothing that runs is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.conftest import make_record

from swell.control.model import Phase
from swell.control.retention import DAY_S, Ended, Keep, Retention, needless, plan
from swell.control.store import Store, connect
from swell.domain import Event, EventKind
from swell.engines.order import make_folder
from swell.report.lanes import lanes
from swell.train.agent.regular import folder, walk

NOW_S = 100 * DAY_S
Nest = Callable[[Path, int], None]


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


def test_what_a_job_left_costs_no_other_job_its_turn(tmp_path: Path, nest: Nest) -> None:
    store = home(
        tmp_path, ("deep", Phase.FINISHED, 40), ("odd", Phase.FINISHED, 40), ("old", Phase.FAILED, 40)
    )
    nest(tmp_path / "jobs" / "deep", 1100)
    locked = tmp_path / "jobs" / "odd" / "checkpoints" / "step-000000000000"
    locked.chmod(0)
    with (tmp_path / "jobs" / "odd" / "holes").open("wb") as holes:
        holes.truncate(1 << 40)
    for i in range(20):
        os.link(tmp_path / "jobs" / "odd" / "holes", tmp_path / "jobs" / "odd" / f"name-{i}")
    os.mkfifo(tmp_path / "jobs" / "odd" / "pipe")
    tidy = Retention(store, tmp_path, Keep())
    done = tidy.run(NOW_S)
    assert sorted(done.forgotten) == ["deep", "odd", "old"]
    assert done.freed_bytes == 9 * 8192, "holes and further names of a file use no space"
    assert left(tmp_path) == {}
    store.close()


@pytest.mark.parametrize("name", ["checkpoints", "job", "step"])
def test_nothing_behind_a_link_is_deleted(tmp_path: Path, name: str) -> None:
    store = home(tmp_path, ("bad", Phase.FINISHED, 5), ("run", Phase.RUNNING, 0))
    bad, run = tmp_path / "jobs" / "bad", tmp_path / "jobs" / "run"
    match name:
        case "checkpoints":
            shutil.rmtree(bad / "checkpoints")
            (bad / "checkpoints").symlink_to(run / "checkpoints")
        case "job":
            shutil.rmtree(bad)
            bad.symlink_to(run)
        case "step":
            shutil.rmtree(bad / "checkpoints" / "step-000000000000")
            (bad / "checkpoints" / "step-000000000000").symlink_to(run / "checkpoints" / "step-000000000001")
    tidy = Retention(store, tmp_path, Keep())
    tidy.run(NOW_S)
    assert left(tmp_path)["run"] == 3
    assert tidy.run(NOW_S + 40 * DAY_S).forgotten == ["bad"]
    assert left(tmp_path) == {"run": 3} and not bad.is_symlink()
    store.close()


def test_a_folder_that_is_moved_away_is_left_where_it_goes(tmp_path: Path) -> None:
    """Whoever still changes the folders that are removed leads nobody out of them."""
    store = home(tmp_path, ("bad", Phase.FINISHED, 40), ("run", Phase.RUNNING, 0))
    inside = tmp_path / "jobs" / "bad" / "a" / "b"
    inside.mkdir(parents=True)
    (inside / "data").touch()

    with folder(tmp_path / "jobs", "bad") as top:
        met = walk(top)
        while next(met).path != "a/b/data":
            pass
        inside.rename(tmp_path / "jobs" / "run" / "b")
        with pytest.raises(OSError, match="moved"):
            list(met)
    store.close()


def test_events_of_no_job_and_kinds_that_never_run_again_are_not_kept_for_ever(tmp_path: Path) -> None:
    store = home(tmp_path, ("new", Phase.FINISHED, 0.1))
    for day in range(60):
        for name in ("node-0", "node-1"):
            store.save([], [node_event(day, name, EventKind.NODE_JOINED), node_event(day + 0.5, name)])
        store.save([], [Event(day * DAY_S, EventKind.SCALED, data={"nodes": 2, "before": 1})])
        held = {"reservation": "api", "gpus": [0, 1], "before": []}
        store.save([], [Event(day * DAY_S, EventKind.HELD, data=held)])
        back = {"reservation": "api", "gpus": [], "before": [0, 1]}
        store.save([], [Event((day + 0.5) * DAY_S, EventKind.HELD, data=back)])
        store.remember(f"kind-{day}", day * DAY_S, {"n": day})
    now_s = 60 * DAY_S
    before = lanes(event for _, event in store.events(limit=10_000))
    Retention(store, tmp_path, Keep(history_s=40 * DAY_S, most_kinds=10)).run(now_s, dry=True)
    assert len(store.events(limit=10_000)) == 1 + 60 * 7, "a dry run deletes nothing"
    Retention(store, tmp_path, Keep(history_s=40 * DAY_S, most_kinds=10)).run(now_s)
    kept = [event for _, event in store.events(limit=10_000)]
    old = [event for event in kept if event.time_s < 30 * DAY_S and event.job_id is None]
    assert [(event.kind, event.node) for event in old] == [
        (EventKind.NODE_JOINED, "node-0"),
        (EventKind.NODE_JOINED, "node-1"),
        (EventKind.NODE_LOST, "node-0"),
        (EventKind.NODE_LOST, "node-1"),
    ]
    assert len(kept) == 1 + 4 + 30 * 7
    recent = [step for step in before.capacity if step[0] >= 30 * DAY_S]
    assert [step for step in lanes(kept).capacity if step[0] >= 30 * DAY_S] == recent
    known = [day for day in range(60) if store.recall(f"kind-{day}") is not None]
    assert known == list(range(50, 60))
    Retention(store, tmp_path, Keep(history_s=5 * DAY_S)).run(now_s)
    assert store.recall("kind-54") is None and store.recall("kind-55") is not None
    store.close()


def node_event(day: float, name: str, kind: EventKind = EventKind.NODE_LOST) -> Event:
    return Event(day * DAY_S, kind, node=name, data={"gpus": 2, "per_gpu": 1})


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.frozensets(st.integers(0, 3))), max_size=30),
    st.integers(0, 30),
)
def test_what_is_left_of_old_events_says_the_same_of_slots_that_are_held(
    steps: list[tuple[str, frozenset[int]]], old: int
) -> None:
    events, held = list[tuple[int, Event]](), dict[str, list[int]]()
    for seq, (name, gpus) in enumerate(steps):
        data = {"reservation": name, "gpus": sorted(gpus), "before": held.get(name, [])}
        held[name] = sorted(gpus)
        events.append((seq, Event(float(seq), EventKind.HELD, data=data)))
    dropped = set(needless(events[:old]))
    kept = [event for seq, event in events if seq not in dropped]
    taken = sum(len(event.data["gpus"]) - len(event.data["before"]) for event in kept)
    assert taken == sum(map(len, held.values()))


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
