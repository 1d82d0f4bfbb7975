"""Streams in a job of one, and the loader's replicated queue with several workers played in one process."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import swell
from swell.train.agent.errors import UsageError
from swell.train.data.loader import Share
from swell.train.data.stream import StreamLoader
from swell.train.job import Job

SHARDS = [range(0, 7), range(7, 7), range(7, 30), range(30, 31), range(31, 50)]


def _read(shard: range) -> Iterator[torch.Tensor]:
    for value in shard:
        yield torch.tensor([float(value)])


class Count(nn.Module):
    """The gradient of `weight[i]` counts the weight of sample i in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[x.long().flatten()]


def _job(**options: Any) -> tuple[Job, Count, StreamLoader]:
    model = Count()
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    return job, model, job.stream(SHARDS, _read, batch_size=8)


@pytest.mark.parametrize("prefetch", [0, 2, 100])
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_every_sample_is_used_once_in_each_epoch_with_its_weight(
    micro_batch: int | None, prefetch: int
) -> None:
    model = Count()
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loader = job.stream(SHARDS, _read, batch_size=8, micro_batch=micro_batch, prefetch=prefetch)
    for _ in job.epochs(3):
        seen: Counter[float] = Counter()
        before = model.weight.detach().clone()
        for x in loader:
            seen.update(x.flatten().tolist())
            job.step(model(x).mean())
        used = before - model.weight.detach()
        assert seen == Counter({float(i): 1 for i in range(50)})
        assert bool((used > 0).all())
        # Each step spreads a weight of 1 evenly over its samples.
        steps = 7
        assert float(used.sum()) == pytest.approx(steps, abs=1e-4)
    assert job.steps == 3 * 7


def test_epochs_visit_shards_in_another_order() -> None:
    job, model, loader = _job()
    orders = []
    for _ in job.epochs(2):
        order = []
        for x in loader:
            order += x.flatten().tolist()
            job.step(model(x).mean())
        orders.append(order)
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_a_stream_says_that_it_has_no_length() -> None:
    with pytest.raises(TypeError, match="does not know its length"):
        len(_job()[2])


@pytest.mark.parametrize("mode", ["adaptive", "consistent"])
def test_modes_that_need_to_know_the_samples_refuse_streams(mode: str) -> None:
    with pytest.raises(UsageError, match=r"job\.loader"):
        _job(mode=mode)


def test_a_stream_that_changed_is_noticed() -> None:
    job, _, loader = _job()
    state = loader.state()
    state["queue"]["pending"] = [[0, 99], *([s, 0] for s in range(1, 5))]
    loader.load(state)
    with pytest.raises(UsageError, match="99 of its samples are in the model"):
        for _ in job.epochs(1):
            for _ in loader:
                pass


def test_checkpoint_in_mid_epoch_goes_on_with_the_unused_samples(tmp_path: Any) -> None:
    seen: Counter[float] = Counter()
    job, model, loader = _job(checkpoint_dir=tmp_path, checkpoint_every_steps=1)
    for _ in job.epochs(1):
        for i, x in enumerate(loader):
            job.step(model(x).mean())
            seen.update(x.flatten().tolist())
            if i == 3:
                job.save(wait=True)
                break
        break
    job2, model2, loader2 = _job(checkpoint_dir=tmp_path)
    for _ in job2.epochs(1):
        for x in loader2:
            job2.step(model2(x).mean())
            seen.update(x.flatten().tolist())
    assert seen == Counter({float(i): 1 for i in range(50)})
    assert job2.steps == 7


def test_a_position_at_the_very_end_of_a_pass_is_taken_over_as_that() -> None:
    """A newcomer that joins after the last step of an epoch must not begin the next one on its own."""
    job, model, loader = _job()
    for _ in job.epochs(1):
        for x in loader:
            job.step(model(x).mean())
            if loader.committed == 50:
                at_end = loader.state()
    newcomer = _job()[2]
    newcomer.load(at_end)
    newcomer.begin()
    assert newcomer.passes == 0
    assert newcomer.window() == 0, "the pass is over, and its end is still to be seen by the script"


class Crowd:
    """Stream loaders of several workers, driven as a job drives them, with deaths and joins."""

    def __init__(self, lengths: list[int], batch: int, seed: int, prefetch: int) -> None:
        self.lengths = lengths
        self.prefetch = prefetch
        self.batch = batch
        self.seed = seed
        self.born = 0
        self.workers: dict[str, StreamLoader] = {}
        self.used: Counter[tuple[int, int]] = Counter()
        self.join()

    def join(self) -> None:
        name = f"w{self.born}"
        self.born += 1
        job: Any = type("FakeJob", (), {"mode": "fixed"})()
        made = StreamLoader(
            job,
            "s",
            list(range(len(self.lengths))),
            lambda shard: iter([(shard, i) for i in range(self.lengths[shard])]),
            worker=name,
            batch_size=self.batch,
            micro_batch=None,
            shuffle=True,
            collate_fn=lambda samples: samples,
            seed=self.seed,
            prefetch=self.prefetch,
        )
        if self.workers:
            made.load(next(iter(self.workers.values())).state())
        self.workers[name] = made

    def step(self, dies: str | None = None, drops: bool = False) -> None:
        """One step; `dies` reads but never commits; with `drops` the others begin the step again."""
        taken: list[tuple[int, int]] = []
        for attempt in range(2 if drops else 1):
            taken = []
            for name, loader in self.workers.items():
                assert loader.window() == self.batch
                share = Share(self.batch, [], current=(-1, (0, 1 + self.batch // len(self.workers))))
                batch = loader.batch(share)
                if name != dies:
                    taken += batch or []
            if attempt == 0 and dies is not None:
                del self.workers[dies]
                dies = None
        headers = [loader.header() for loader in self.workers.values()]
        for loader in self.workers.values():
            loader.committed_by(headers)
            loader.advance(0)
        states = [loader.state() for loader in self.workers.values()]
        assert all(state == states[0] for state in states)
        self.used.update(taken)


@settings(max_examples=120)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=7),
    batch=st.integers(1, 12),
    seed=st.integers(0, 5),
    prefetch=st.sampled_from([0, 0, 3]),
    events=st.lists(st.sampled_from(["step", "step", "join", "die", "die and redo", "redo"]), max_size=25),
)
def test_whoever_comes_or_dies_each_sample_is_committed_once(
    lengths: list[int], batch: int, seed: int, prefetch: int, events: list[str]
) -> None:
    crowd = Crowd(lengths, batch, seed, prefetch)
    whole = Counter({(s, i): 1 for s, n in enumerate(lengths) for i in range(n)})

    def over() -> bool:
        return next(iter(crowd.workers.values())).window() == 0

    for event in events:
        if over():
            break
        if event == "join" and len(crowd.workers) < 4:
            crowd.join()
        elif event.startswith("die") and len(crowd.workers) > 1:
            crowd.step(dies=sorted(crowd.workers)[0], drops=event.endswith("redo"))
        else:
            crowd.step(drops=event == "redo")
    for _ in range(400):
        if over():
            break
        crowd.step()
    assert over()
    assert crowd.used == whole
    _turn_all(crowd.workers.values())


def _turn_all(loaders: Any) -> None:
    for loader in loaders:
        loader.turn()
        assert loader.passes == 1
        assert loader.committed == 0
