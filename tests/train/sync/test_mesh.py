"""Mesh and reducer between threads with real sockets and real shared memory: sums, deaths, far members."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.waiting import wait_until
from torch import nn

from swell.train.agent.errors import OutOfStep, PeerLost, UsageError
from swell.train.data.plan import balanced
from swell.train.sync.memory import FlatModel
from swell.train.sync.mesh import READY, VOTE, Mesh, Peer
from swell.train.sync.reducer import Norms, Reducer


def meshes(size: int, abouts: list[dict[str, Any]] | None = None) -> list[Mesh]:
    abouts = abouts or [{} for _ in range(size)]
    names = tuple(f"w{i}" for i in range(size))
    peers: list[dict[int, Peer]] = [{} for _ in range(size)]
    for a in range(size):
        for b in range(a + 1, size):
            left, right = socket.socketpair()
            peers[a][b] = Peer(names[b], left, abouts[b])
            peers[b][a] = Peer(names[a], right, abouts[a])
    return [Mesh(1, names, names[i], peers[i]) for i in range(size)]


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Run actions at the same time; exceptions are results too."""
    results: list[Any] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            results[index] = actions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "somebody waits for ever"
    return results


def test_everybody_hears_everybody_in_rank_order() -> None:
    crowd = meshes(4)
    heard = together(*[lambda m=m: m.exchange(7, READY, {"rank": m.rank}) for m in crowd])
    assert all([h["rank"] for h in headers] == [0, 1, 2, 3] for headers in heard)


@pytest.mark.parametrize("size", [3, 12], ids=["star", "tree"])
def test_along_a_tree_everybody_hears_everybody_and_sees_a_death(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swell.train.sync.mesh.TREE_FROM", 3)
    crowd = meshes(size)
    for operation in range(3):
        heard = together(
            *[lambda m=m, o=operation: m.exchange(o, READY, {"rank": m.rank}) for m in crowd],
        )
        assert all([h["rank"] for h in headers] == list(range(size)) for headers in heard)
    crowd[1].close()

    def act(mesh: Mesh) -> None:
        try:
            mesh.exchange(3, READY, {})
        finally:
            mesh.close()  # as whoever recovers does

    results = together(*[lambda m=m: act(m) for m in crowd if m.rank != 1])
    assert all(isinstance(r, PeerLost) for r in results)


def test_along_a_tree_whoever_has_all_votes_may_be_gone_before_others_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swell.train.sync.mesh.TREE_FROM", 3)
    crowd = meshes(3)
    leaver = subprocess.Popen(["true"])
    leaver.wait()
    crowd[1].processes[2] = leaver.pid
    threading.Timer(0.1, lambda: crowd[0].exchange(1, VOTE, {})).start()
    results = together(lambda: crowd[1].exchange(1, VOTE, {}), lambda: crowd[2].exchange(1, VOTE, {}))
    assert results == [[{}, {}, {}], [{}, {}, {}]]


def test_bulk_of_any_size_arrives_whole_and_blocks_nobody() -> None:
    crowd = meshes(3)
    size = 3_000_000

    def act(mesh: Mesh) -> list[bytearray]:
        sinks = {r: bytearray(size) for r in mesh.peers}
        payloads = {r: [memoryview(bytes([mesh.rank + 1]) * size)] for r in mesh.peers}
        mesh.exchange(1, READY, {}, payloads, {r: [memoryview(s)] for r, s in sinks.items()})
        mesh.exchange(1, VOTE, {})
        return [sinks.get(r, bytearray()) for r in range(3)]

    results = together(*[lambda m=m: act(m) for m in crowd])
    for rank, sinks in enumerate(results):
        for other in {0, 1, 2} - {rank}:
            assert sinks[other] == bytes([other + 1]) * size


def exchanged(crowd: list[Mesh], operation: int, *sizes: int) -> bool:
    """Whether headers of these sizes arrive at everybody."""
    texts = ["x" * size for size in sizes]
    heard = together(*[lambda m=m: m.exchange(operation, READY, {"text": texts[m.rank]}) for m in crowd])
    return all([header["text"] for header in headers] == texts for headers in heard)


def test_headers_of_any_size_arrive_and_one_that_is_too_long_is_refused_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = meshes(3)
    assert exchanged(crowd, 0, 16 << 20, 16 << 20, 16 << 20)
    assert exchanged(crowd, 1, 8 << 20, 0, 40_000)
    assert exchanged(crowd, 2, 3000, 3000, 0)
    monkeypatch.setattr("swell.train.sync.mesh.TREE_FROM", 3)
    monkeypatch.setattr("swell.train.sync.mesh.MOST_HEADER_BYTES", 3 << 20)
    assert exchanged(crowd, 3, *[2 << 20] * 3), "on its way a message has the headers of several members"
    with pytest.raises(UsageError, match="over the limit"):
        crowd[0].exchange(4, READY, {"text": "z" * (4 << 20)})


def test_a_dead_member_is_noticed_by_all_at_once() -> None:
    crowd = meshes(3)
    crowd[2].close()
    results = together(*[lambda m=m: m.exchange(1, READY, {}) for m in crowd[:2]])
    assert all(isinstance(r, PeerLost) for r in results)


def test_a_dying_process_is_noticed_before_its_sockets_close() -> None:
    crowd = meshes(2)
    sleeper = subprocess.Popen(["sleep", "60"])
    crowd[0].processes[1] = sleeper.pid
    threading.Timer(0.2, sleeper.kill).start()
    (result,) = together(lambda: crowd[0].exchange(1, READY, {}))  # its sockets are still open
    assert isinstance(result, PeerLost)
    assert crowd[0].lost == "w1" and crowd[0].certain
    sleeper.wait()


def test_whoever_voted_may_be_gone_before_the_others_have_voted() -> None:
    crowd = meshes(3)
    leaver = subprocess.Popen(["true"])
    leaver.wait()
    crowd[0].processes[2] = leaver.pid

    def after_the_leaver(mesh: Mesh) -> list[dict[str, Any]]:
        wait_until(lambda: crowd[0]._has_word(2), 20.0, "the vote of the leaver")
        return mesh.exchange(1, VOTE, {})

    threading.Timer(0.1, lambda: after_the_leaver(crowd[1])).start()
    results = together(lambda: after_the_leaver(crowd[0]), lambda: crowd[2].exchange(1, VOTE, {}))
    assert results == [[{}, {}, {}], [{}, {}, {}]]
    assert isinstance(together(lambda: crowd[0].exchange(2, READY, {}))[0], PeerLost)


def test_abandoning_wakes_a_member_that_waits_for_a_silent_one() -> None:
    crowd = meshes(2)
    timer = threading.Timer(0.2, crowd[0].abandon)
    timer.start()
    (result,) = together(lambda: crowd[0].exchange(1, READY, {}))
    assert isinstance(result, PeerLost)


def test_members_at_different_points_are_told_what_to_do() -> None:
    crowd = meshes(2)
    results = together(
        lambda: crowd[0].exchange(1, READY, {"what": "step"}),
        lambda: crowd[1].exchange(1, READY, {"what": "agree"}),
    )
    told = [r for r in results if isinstance(r, OutOfStep)]
    assert told and "same calls" in str(told[0])


def wide(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Linear(width, width)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("width", [8, 1200], ids=["direct", "slices"])
@pytest.mark.parametrize("far", [False, True], ids=["shared-memory", "sockets"])
def test_all_members_have_the_same_sum_bit_for_bit(width: int, far: bool) -> None:
    size = 3
    models = [wide(seed, width) for seed in range(size)]
    flats = [FlatModel(model) for model in models]
    abouts = [{} if far else {"segment": f.describe()} for f in flats]
    reducers = [Reducer(f) for f in flats]
    for reducer, mesh in zip(reducers, meshes(size, abouts)):
        for peer in mesh.peers.values():
            reducer.memory.meet(peer.about)
        reducer.connect(mesh, set(reducer.memory.readable(mesh)))
        assert [r in reducer.memory.far for r in mesh.peers] == [far] * (size - 1)
        reducer.flat.gather(1.0)
    tree = balanced([0, 1, 2])
    results = together(
        *[lambda r=r: r.all_reduce(5, {"n": 1}, lambda _: tree, norms=Norms()) for r in reducers]
    )
    grads = [m.weight.grad for m in models]
    assert all(g is not None for g in grads)
    expected = (grads[0] + grads[1]) + grads[2]  # type: ignore[operator]
    for flat, model, result, reducer in zip(flats, models, results, reducers):
        assert not isinstance(result, Exception), result
        flat.adopt(set())
        assert model.weight.grad is not None and torch.equal(model.weight.grad, expected)
        assert reducer.held == 5
    squares = results[0].part_squares
    assert squares == results[1].part_squares == results[2].part_squares
    for rank in range(size):
        both = [wide(rank, width).weight.grad, wide(rank, width).bias.grad]
        assert squares[rank] == pytest.approx(
            sum(float((g**2).sum()) for g in both if g is not None), rel=1e-4
        )


def test_a_member_without_samples_takes_part_but_adds_nothing() -> None:
    models = [wide(seed, 8) for seed in range(2)]
    flats = [FlatModel(model) for model in models]
    reducers = [Reducer(f) for f in flats]
    for reducer, mesh in zip(reducers, meshes(2, [{"segment": f.describe()} for f in flats])):
        for peer in mesh.peers.values():
            reducer.memory.meet(peer.about)
        reducer.connect(mesh, set(reducer.memory.readable(mesh)))
    flats[1].gather(1.0)
    together(*[lambda r=r: r.all_reduce(1, {}, lambda _: 1) for r in reducers])
    flats[0].adopt(set())
    assert models[0].weight.grad is not None and models[1].weight.grad is not None
    assert torch.equal(models[0].weight.grad, models[1].weight.grad)


def test_the_only_member_left_has_its_own_input_as_the_sum() -> None:
    flat = FlatModel(wide(0, 8))
    reducer = Reducer(flat)
    reducer.connect(meshes(1)[0], set())
    flat.gather(1.0)
    result = reducer.all_reduce(1, {"n": 1}, lambda _: 0, norms=Norms())
    assert torch.equal(flat.outputs[0], flat.inputs[0])
    assert result.total_square == result.part_squares[0] > 0


def test_memory_mapped_beforehand_is_what_a_switch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    flats = [FlatModel(wide(seed, 8)) for seed in range(2)]
    mesh = meshes(2, [{"segment": f.describe()} for f in flats])[0]
    reducer = Reducer(flats[0])
    reducer.memory.meet(mesh.peers[1].about)

    def opened_in_the_pause(_: object) -> None:
        raise AssertionError("mapped while everybody waits")

    monkeypatch.setattr("swell.train.sync.reducer.Segment.open", opened_in_the_pause)
    reducer.connect(mesh, set(reducer.memory.readable(mesh)))
    assert 1 not in reducer.memory.far
    flats[1].inputs[0].fill_(7.0)
    assert torch.equal(reducer.memory.inputs_of[1][0], flats[1].inputs[0])
