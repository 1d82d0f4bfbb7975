"""Sums that begin while backward runs: their bits, their order, what is late, and deaths in the middle."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.train.sync.test_mesh import meshes, together
from torch import nn

from swell.train.agent.errors import PeerLost
from swell.train.data import plan
from swell.train.modes.ranks import PartialSums
from swell.train.sync import pieces
from swell.train.sync.memory import FlatModel, Layout
from swell.train.sync.mesh import PIECE
from swell.train.sync.pieces import Norms
from swell.train.sync.reducer import Reducer

SIZES = [(7, 16), (16,), (40, 3), (5,), (64, 9)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models count as large, and their pieces are tiny too."""
    real = pieces.cut
    monkeypatch.setattr("swell.train.sync.reducer._DIRECT_BYTES", 0)
    monkeypatch.setattr("swell.train.sync.reducer._DIRECT_PAIR_BYTES", 0)
    monkeypatch.setattr("swell.train.sync.reducer._DIRECT_FAR_BYTES", 0)

    def cut(layout: Layout, most: int, smallest_bytes: int = 64) -> list[pieces.Piece]:
        return real(layout, max(most, 4), smallest_bytes)

    monkeypatch.setattr("swell.train.sync.reducer.cut", cut)


class Toy(nn.Module):
    """A model of several parameters, two of them not used, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.idle = nn.Linear(3, 3)
        self.first, self.second, self.last = nn.Linear(6, 30), nn.Linear(30, 30), nn.Linear(30, 2)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.second(torch.relu(self.first(x)))))
        return out


class Worker:
    """One member: model, vectors, reducer, and a backward that tells the sum what is ready."""

    def __init__(self, rank: int) -> None:
        self.model = Toy()
        self.x = torch.randn(4 + rank, 6, generator=torch.Generator().manual_seed(rank))
        self.flat = FlatModel(self.model)
        self.reducer = Reducer(self.flat)
        self.reduction: Any = None
        self.flat.watch(self._on_gradient)

    def _on_gradient(self, index: int) -> None:
        if self.flat.keep(index) and self.reduction is not None:
            self.reduction.ready(index)

    def backward(self) -> None:
        self.model(self.x).square().sum().backward()

    def step(self, early: bool, operation: int = 3, again: bool = False) -> Any:
        header = {"what": "step", "n": 1}
        norms = Norms()
        if not early:
            self.backward()
            header["unused"] = self.flat.gather(0.5)  # type: ignore[assignment]
            return self.reducer.all_reduce(operation, header, tree, norms=norms)
        self.reduction = self.reducer.begin(operation, header, tree, norms=norms)
        self.backward()
        if again:  # as layers that are computed a second time do
            self.model.last(torch.ones(1, 30)).sum().backward()
        self.reduction.complete({"unused": self.flat.gather(0.5)})
        return self.reduction.result()


def tree(headers: list[Any]) -> plan.Tree | None:
    return plan.balanced([rank for rank, header in enumerate(headers) if header["n"]])


def crowd(size: int, far: bool) -> list[Worker]:
    workers = [Worker(rank) for rank in range(size)]
    abouts = [{} if far else {"segment": w.flat.describe()} for w in workers]
    for worker, mesh in zip(workers, meshes(size, abouts)):
        for peer in mesh.peers.values():
            worker.reducer.memory.meet(peer.about)
        worker.reducer.connect(mesh, set(worker.reducer.memory.readable(mesh)))
        assert worker.reducer.early_now and worker.reducer.in_pieces is not None
        assert len(worker.reducer.in_pieces.pieces) > 3
    return workers


def sums(workers: list[Worker]) -> list[list[torch.Tensor]]:
    return [[out.clone() for out in w.flat.outputs] for w in workers]


@pytest.mark.parametrize("far", [False, True], ids=["shared-memory", "sockets"])
@pytest.mark.parametrize("size", [2, 3])
def test_early_sums_have_the_bits_and_norms_of_late_ones(size: int, far: bool) -> None:
    late, early = crowd(size, far), crowd(size, far)
    expected = together(*[lambda w=w: w.step(early=False) for w in late])
    found = together(*[lambda w=w: w.step(early=True) for w in early])
    for a, b in zip(expected, found):
        assert not isinstance(b, Exception), b
        assert a.part_squares == b.part_squares and a.total_square == b.total_square
        assert [h["unused"] for h in b.headers] == [[0, 1]] * size
    reference = sums(late)
    assert all(torch.equal(x, y) for one in sums(early) for x, y in zip(one, reference[0]))
    plain = [FlatModel(w.model).parameters["first.weight"].grad for w in late]
    total = plan.balanced(range(size))

    def add(node: Any) -> torch.Tensor:
        found = plain[node] if isinstance(node, int) else add(node[0]) + add(node[1])
        assert found is not None
        return found

    early[0].flat.adopt({0, 1})
    assert torch.equal(early[0].model.first.weight.grad, add(total))  # type: ignore[arg-type]


def test_the_last_layers_are_summed_before_backward_has_the_first() -> None:
    workers = crowd(2, True)
    summed = threading.Event()

    def first_layers_wait(_: torch.Tensor) -> None:
        assert summed.wait(20), "no piece was summed while backward ran"

    real = workers[0].reducer.adder.add

    def add(*arguments: Any) -> Any:
        out = real(*arguments)
        summed.set()
        return out

    workers[0].reducer.adder.add = add  # type: ignore[method-assign]
    for worker in workers:
        worker.model.first.weight.register_hook(first_layers_wait)
    results = together(*[lambda w=w: w.step(early=True) for w in workers])
    assert not any(isinstance(r, Exception) for r in results), results
    first = next(begin for kind, begin, _ in results[0].spans if kind == "add")
    assert first < results[0].complete_s


def test_two_hosts_send_the_next_piece_while_the_last_one_is_added() -> None:
    workers = crowd(2, True)
    mesh: Any = workers[0].reducer._mesh
    exchange, add = mesh.exchange, workers[0].reducer.adder.add
    exchanged = [threading.Event() for _ in workers[0].reducer.in_pieces.pieces]  # type: ignore[union-attr]
    count = iter(exchanged)

    def counted(operation: int, phase: int, *arguments: Any) -> Any:
        out = exchange(operation, phase, *arguments)
        if phase == PIECE:
            next(count).set()
        return out

    def slow(*arguments: Any) -> Any:
        assert exchanged[-1].wait(20), "the network waited for an addition"
        return add(*arguments)

    mesh.exchange = counted
    workers[0].reducer.adder.add = slow  # type: ignore[method-assign]
    results = together(*[lambda w=w: w.step(early=False) for w in workers])
    assert not any(isinstance(r, Exception) for r in results), results
    first, second = sums(workers)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_gradient_that_changes_after_it_was_sent_is_summed_again_by_all() -> None:
    late, early = crowd(2, False), crowd(2, False)
    for worker in late:
        worker.model.last(torch.ones(1, 30)).sum().backward()
    together(*[lambda w=w: w.step(early=False) for w in late])
    results = together(*[lambda w=w: w.step(early=True, again=True) for w in early])
    assert not any(isinstance(r, Exception) for r in results), results
    for one, other in zip(sums(early), sums(late)):
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(one, other))
    assert not any(w.reducer.early_now for w in early), "sums that were too early once are not early again"


def test_a_member_that_dies_during_backward_leaves_the_others_with_their_whole_input() -> None:
    workers = crowd(3, True)
    workers[2].reducer._mesh.close()  # type: ignore[union-attr]
    results = together(*[lambda w=w: w.step(early=True) for w in workers[:2]])
    assert all(isinstance(r, PeerLost) for r in results)
    alone = Worker(0)
    alone.backward()
    alone.flat.gather(0.5)
    assert all(torch.equal(a, b) for a, b in zip(alone.flat.inputs, workers[0].flat.inputs))


def test_gradients_become_views_of_the_input_and_later_micro_batches_add_to_it() -> None:
    worker, plain = Worker(1), Worker(1)
    plain.flat.watch(None)
    for _ in range(3):
        worker.backward()
        plain.backward()
    weight = worker.model.first.weight
    assert weight.grad is worker.flat.grad_in[2]
    assert torch.equal(weight.grad, plain.model.first.weight.grad)  # type: ignore[arg-type]
    worker.flat.watch(None)
    worker.flat.clear()
    worker.backward()
    assert weight.grad is not worker.flat.grad_in[2]


def test_pieces_cover_everything_once_from_the_end_and_parts_cover_pieces() -> None:
    tensors = {f"p{i}": torch.zeros(shape) for i, shape in enumerate(SIZES)}
    tensors["double"] = torch.zeros(50, dtype=torch.float64)
    layout = Layout(tensors, {"buffer": torch.zeros(9)})
    cut = pieces.cut(layout, 4, 64)
    gradients = [s for piece in cut for s in piece if s.low < layout.buckets[s.bucket].gradients]
    assert gradients == sorted(gradients, reverse=True) and len(cut) > 4
    for size in (1, 2, 3, 5):
        found = [[0] * b.numel for b in layout.buckets]
        for piece in cut:
            for rank in range(size):
                for bucket, low, high in pieces.part(piece, rank, size):
                    for i in range(low, high):
                        found[bucket][i] += 1
        assert all(count == 1 for bucket in found for count in bucket)


def test_a_piece_is_released_only_with_all_gradients_in_it_and_before_it() -> None:
    tensors = {f"p{i}": torch.zeros(64) for i in range(4)}
    layout = Layout(tensors, {})
    cut = pieces.cut(layout, 4, 256)  # one piece for each parameter
    release = pieces.Release(layout, cut, list(tensors))
    release.begin()
    for parameter, released in ((2, 0), (3, 2), (0, 2), (1, 3)):
        release.ready(parameter)
        assert release._released == released
    release.all()  # the last piece also waits for what is known only at the end
    assert release._released == 4 and not release.late


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (0, 3), (0, 4), (2, 4), (0, 7)])
def test_finishing_parameter_by_parameter_has_the_bits_of_finishing_all_at_once(
    ranks: tuple[int, int],
) -> None:
    def run(one_by_one: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        parameters = [torch.zeros(33, requires_grad=True) for _ in range(3)]
        bottom = [torch.full_like(p, 9.0).detach() for p in parameters]
        sums = PartialSums(parameters, bottom)
        program = plan.program(*ranks, 64, 8)
        sums.start(program)
        order = [step for step in program if step != plan.FOLD]
        for rank in order:
            for index, parameter in enumerate(parameters[:2]):  # the third has no gradient
                fresh = torch.randn(33)
                parameter.grad = fresh if parameter.grad is None else parameter.grad + fresh
                if one_by_one and rank == order[-1] and index == 1:
                    sums.finish(index)
            sums.after(rank)
        return bottom

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False)))


COUNTING = """
    import sys, time, torch, swell
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = (nn.Parameter(torch.zeros(350_000)) for _ in range(2))

        def forward(self, x):  # each gradient is the mean of the samples
            return x * (self.first.mul(1.0).sum() + self.last.mul(1.0).sum())

    model = Model()
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0), checkpoint_every_s=None)
    data = torch.utils.data.TensorDataset(torch.arange(100.0, 164.0))
    loader = job.loader(data, batch_size=16, micro_batch=4)
    for _ in job.epochs(10):
        for (x,) in loader:
            time.sleep(0.01)
            job.step(model(x).mean())
    if job.is_leader:
        values = [float(v) for p in model.parameters() for v in (p.detach().min(), p.detach().max())]
        print("values", *values, "steps", job.steps)
"""


@pytest.mark.parametrize("shared", [True, False], ids=["shared-memory", "sockets"])
def test_a_death_during_early_sums_loses_and_repeats_no_sample(stage: Any, shared: bool) -> None:
    job = stage.run(COUNTING, workers=3, settings={"shared_memory": shared})
    before = job.wait_for(lambda s: len(s["members"]) == 3 and s["step"] >= 3)
    dead = job.kill(1)
    job.wait_for(lambda s: dead not in s["members"] and s["step"] > before["step"])
    assert job.wait() == 0, job.output()
    said = next(line for line in job.output().splitlines() if "steps" in line).split()
    at = said.index("values")
    assert said[-1] == "40"
    assert [float(v) for v in said[at + 1 : at + 5]] == pytest.approx([-10 * 64 * 131.5 / 16] * 4, rel=1e-5)
    assert len(job.events("recovery")) == 1
