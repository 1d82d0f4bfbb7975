"""What a switch does not wait for: memory of former peers goes later, without the collector, and memory that
the next exchange needs is there before."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.sync.test_crew import enter, job, weight
from tests.train.sync.test_early import _small, crowd
from tests.train.sync.test_mesh import meshes, together, wide
from tests.waiting import wait_until

from swell.train.agent.errors import PeerLost
from swell.train.sync import memory
from swell.train.sync import mesh as meshing
from swell.train.sync.memory import FlatModel
from swell.train.sync.mesh import Mesh
from swell.train.sync.reducer import MemberMemory

__all__ = ["_small"]
"""The fixture by which tiny models count as large."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files of Linux")


@pytest.fixture(autouse=True)
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What only the collector would free stays; what is let go is gone soon."""
    monkeypatch.setattr(memory, "_LET_GO_AFTER_S", 0.05)
    gc.disable()
    yield
    gc.enable()


def mapped(flat: FlatModel) -> int:
    """How often the memory of `flat` is mapped in this process: once by its owner, once by each peer."""
    inode = Path(f"/proc/self/fd/{flat.describe()['descriptor']}").stat().st_ino  # type: ignore[index]
    return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def numbered(number: int, mesh: Mesh) -> Mesh:
    mesh.number = number
    return mesh


def test_the_memory_of_a_former_peer_is_unmapped_after_the_switch_and_not_in_it() -> None:
    first, second = crowd(2, far=False)
    mesh = weakref.ref(first.reducer._mesh)  # type: ignore[arg-type]
    assert mapped(second.flat) == 2
    second.reducer._mesh.abandon()  # type: ignore[union-attr]
    lost = False
    try:
        first.step(early=True)
    except PeerLost:  # anything that keeps the error would keep the sum
        lost = True
    reduction, first.reduction = weakref.ref(first.reduction), None
    first.reducer.connect(meshes(1)[0], set())
    assert lost and mapped(second.flat) == 2, "nobody waits for the end of the mapping"
    assert reduction() is None and mesh() is None, "a failed sum is no cycle"
    wait_until(lambda: mapped(second.flat) == 1, 5, "the end of the mapping")


def test_whoever_was_met_and_never_joined_is_unmapped_later_and_whoever_comes_next_stays_mapped() -> None:
    flats = [FlatModel(wide(seed, 8)) for seed in range(4)]
    abouts = [{"segment": flat.describe()} for flat in flats]
    memory = MemberMemory(flats[0])
    memory.meet(abouts[1], 1)
    memory.connect(numbered(1, meshes(2, abouts[:2])[0]), {1})
    memory.meet(abouts[2], 2)  # replaced by candidate 3, whose members are met while it is entered ...
    memory.meet(abouts[1], 4)
    memory.meet(abouts[3], 4)  # ... and so are those of the next one
    memory.connect(numbered(3, meshes(1)[0]), set())
    assert [mapped(flat) for flat in flats] == [1, 2, 2, 2]
    wait_until(lambda: mapped(flats[2]) == 1, 5, "the end of the mapping")
    last = numbered(4, meshes(3, [abouts[0], abouts[1], abouts[3]])[0])
    assert memory.readable(last) == [1, 2]


def test_a_newcomer_keeps_no_memory_of_the_state_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swell.train.sync.generation._KEEP_STAGING_BYTES", 0)
    old, new = job(2.0), job(5.0)
    old._crew.enter(meshes(1)[0], {})
    abouts = [{"segment": one._learner.flat.describe()} for one in (old, new)]
    pair = meshes(2, abouts)
    for one, mesh in zip((old, new), pair):
        for peer in mesh.peers.values():
            one._crew.reducer.memory.meet(peer.about, 1)
    runs = []
    capture = old._state.capture
    monkeypatch.setattr(old._state, "capture", lambda: runs.append(gc.isenabled()) or capture())
    gc.enable()
    assert all(not isinstance(e, Exception) for e in together(*map(enter, (old, new), pair)))
    assert runs == [False] and gc.isenabled(), "the collector waits until the switch is over"
    gc.disable()
    staging = weakref.ref(old._crew.handover._staging)  # type: ignore[arg-type]
    old._crew.completed()
    assert staging() is not None, "freeing it would take time from the first step"
    wait_until(lambda: staging() is None, 5, "the end of the staging memory")
    before = weakref.ref(new._crew.mesh)
    del pair, mesh, peer
    new._crew.enter(meshes(1)[0], {})
    assert before() is None
    wait_until(lambda: mapped(old._learner.flat) == 1, 5, "the end of the mapping")


def test_places_for_members_on_other_hosts_are_there_before_a_switch_and_used_again() -> None:
    memory = MemberMemory(FlatModel(wide(0, 8)))
    for number in (1, 2):
        for _ in range(number):
            memory.meet({}, number)
    (place, other) = (vectors[0].data_ptr() for vectors in memory._places)
    memory.connect(numbered(2, meshes(3)[0]), set())
    assert {memory.inputs_of[rank][0].data_ptr() for rank in (1, 2)} == {place, other}
    memory.meet({}, 3)
    assert memory._places == [], "there is one already"
    memory.connect(numbered(3, meshes(2)[0]), set())
    assert memory.inputs_of[1][0].data_ptr() in (place, other)


def test_two_hosts_add_in_one_thread_as_long_as_they_live() -> None:
    workers = crowd(2, far=True)
    before = set(threading.enumerate())
    adding: list[Any] = []
    for operation in (3, 4):
        results = together(*[lambda w=w, o=operation: w.step(early=True, operation=o) for w in workers])
        assert not any(isinstance(result, Exception) for result in results), results
        adding.append({t for t in set(threading.enumerate()) - before if t.name.startswith("swell-add")})
    assert adding[0] == adding[1] and len(adding[0]) == 2, "one for each worker"
    assert all(torch.equal(a, b) for a, b in zip(workers[0].flat.outputs, workers[1].flat.outputs))


def test_state_goes_through_sockets_in_a_job_whose_messages_go_along_a_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meshing, "TREE_FROM", 3)
    ones = [job(2.0), job(2.0), job(5.0)]
    assert all(not isinstance(e, Exception) for e in together(*map(enter, ones[:2], meshes(2))))
    results = together(*map(enter, ones, meshes(3)))
    assert [getattr(entered, "joined", entered) for entered in results] == [False, False, True]
    assert weight(ones[2]) == [2.0] * 3
