"""Notes by which the workers of a process group find each other, kept by a real coordinator that may die."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.train.agent.test_strangers import Running
from tests.waiting import wait_until
from torch.distributed import DistStoreError

from swell.train.agent.jobdir import JobDirectory
from swell.train.sync.reducer import NoteStore, gloo_group

SOON = timedelta(seconds=30)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path / "job")
    yield made
    made.stop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


@contextlib.contextmanager
def coordinator(path: Path) -> Iterator[None]:
    """A coordinator in a process of its own, which is killed at the end."""
    process = subprocess.Popen([sys.executable, "-m", "swell.train.agent.coordinator", str(path)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_two_workers_find_each_other_although_the_coordinator_dies_meanwhile(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    settings = {"name": "a", "launch": "x", "secret": "s", "minimum": 1, "maximum": 2, "target": 1}
    path = JobDirectory.create(tmp_path / "job", settings).path
    one, two = (NoteStore(path, "r0") for _ in range(2))
    with coordinator(path):
        one.set("where", bytes(range(256)))
        waiting = pool.submit(one.get, "two")
    with coordinator(path):
        _meet(one, two, waiting, pool)


def _meet(one: NoteStore, two: NoteStore, waiting: Future[bytes], pool: ThreadPoolExecutor) -> None:
    assert two.get("where") == bytes(range(256)), "the first one said it again"
    two.set("two", "here")
    assert waiting.result(30) == b"here"
    groups = [pool.submit(gloo_group, s, i, 2, SOON, "127.0.0.1") for i, s in enumerate((one, two))]
    numbers = [torch.tensor([1]), torch.tensor([2])]
    for work in [g.result(30).allreduce([n]) for g, n in zip(groups, numbers, strict=True)]:
        work.wait()
    assert numbers == [torch.tensor([3])] * 2


def test_groups_have_notes_of_their_own_which_end_with_their_last_worker(running: Running) -> None:
    one, other, another = (NoteStore(running.job.path, name) for name in ("r0", "r0", "r1"))
    one.set("a", b"1")
    assert other.check(["a"]) and not another.check(["a"])
    one.close()
    assert other.check(["a"])
    other.close()
    wait_until(lambda: list(running.coordinator.notes._values) == ["x/r1"], 30, "the notes to be thrown away")


def test_a_note_that_nobody_writes_is_not_waited_for_for_ever(
    running: Running, pool: ThreadPoolExecutor
) -> None:
    store = NoteStore(running.job.path, "r0")
    with pytest.raises(DistStoreError, match="no worker of the group has written a"):
        store.wait(["a"], timedelta(seconds=0.05))
    waiting = pool.submit(store.get, "a")
    store.close()
    with pytest.raises(DistStoreError, match="closed"):
        waiting.result(30)
