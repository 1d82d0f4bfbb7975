"""`--auto` on data that can only be read in order: iterable data sets, and loaders with `batch_size=None`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.train.conftest import PlainRun
from torch.utils.data import DataLoader, IterableDataset

from swell.train.auto.fingerprint import LateSums, contents
from swell.train.auto.passes import Readings, Stream, StreamPass
from swell.train.auto.position import Position

HEAD = """
import json, os, random, sys, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
random.seed(3)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
seen = []

def learn(a, b):
    time.sleep(0.01)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    seen.append(round(a.sum().item(), 6))

class Numbers(IterableDataset):
    g = None

    def __init__(self, count, start=0):
        self.count, self.start = count, start

    def __iter__(self):
        for _ in range(self.count):
            a = torch.tensor([(self.start * k % 17) / 17.0 for k in (3, 5, 7, 11)])
            yield a, a.sum(0, keepdim=True)
            self.start += 1

class Shuffled(IterableDataset):
    "A buffer that is shuffled by Python's own generator, as streaming libraries do."

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        buffer = []
        for item in self.source:
            if len(buffer) < 30:
                buffer.append(item)
                continue
            at = random.randrange(30)
            yield buffer[at]
            buffer[at] = item
        random.shuffle(buffer)
        yield from buffer
"""

SCRIPTS = {
    # Every pass goes on where the last one ended, in an order that is drawn while it is read.
    "shuffled": """
loader = DataLoader(Shuffled(Numbers(300)), batch_size=20)
for epoch in range(30):
    for a, b in loader:
        learn(a, b)
    seen.append(random.random())
""",
    # The loader's processes share the stream; the pass is left before its end, which it does not have.
    "endless": """
class Shards(Numbers):
    def __iter__(self):
        info = get_worker_info()
        for i, (a, b) in enumerate(super().__iter__()):
            if i % info.num_workers == info.id:
                yield torch.stack([a, a + torch.rand(4), a, a]), torch.stack([b] * 4)

loader = DataLoader(Shards(10**9), batch_size=None, num_workers=2)
for epoch in range(12):
    for step, (a, b) in enumerate(loader):
        if step == 25:
            break
        learn(a, b)
""",
}
TAIL = """
result = {"seen": seen, "weights": model[0].weight.flatten().tolist(), "next": torch.rand(2).tolist()}
print(json.dumps(result))
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("shuffled", marks=pytest.mark.gallery), "endless"])
def test_a_stream_is_read_by_all_workers_as_in_a_plain_run(stage: Any, tmp_path: Path, kind: str) -> None:
    text = HEAD + SCRIPTS[kind] + TAIL
    plain = PlainRun(stage, text, tmp_path)
    job = stage.run(text, settings={"auto": True, "checkpoint_s": 0.2}, workers=1, maximum=3)
    job.wait_for(lambda s: s["step"] >= 30)  # in another pass than the first one
    job.grow_and_lose_the_leader_then_all()
    result, expected = job.printed(), plain.printed()
    assert result["seen"] == expected["seen"]
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-9)
    assert result["next"] == expected["next"]


def test_workers_whose_streams_differ_leave_and_say_so(stage: Any) -> None:
    differs = """
class Unseeded(Numbers):
    def __iter__(self):
        for a, b in super().__iter__():
            yield a, b + int.from_bytes(os.urandom(1), "big")  # what the model is given is the same

for a, b in DataLoader(Unseeded(6000), batch_size=20):
    learn(a, b)
"""
    job = stage.run(HEAD + differs + TAIL, settings={"auto": True}, workers=2, maximum=2, minimum=1)
    job.wait_for(lambda s: s["step"] and job.events("confined"))
    assert job.wait(120.0) == 0, job.output()
    assert "other numbers than the leader's" in job.output()
    assert "the job goes on with 1 worker" in job.output()


# ---------------------------------------------------------------------- reading


class _Random(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.rand(1)


def _pass(position: Position) -> StreamPass:
    loader = DataLoader(_Random(), batch_size=2)
    here = position.open_stream(loader, Mock(), Stream(iter(loader), lambda: True))
    assert isinstance(here, StreamPass)
    return here


def test_a_newcomer_skips_with_the_streams_own_random_numbers() -> None:
    torch.manual_seed(1)
    job, theirs = _pass(Position()), []
    for _ in range(6):
        drawn = job.take()
        assert drawn is not None
        theirs.append(drawn.window.hand_out())  # type: ignore[attr-defined]
    torch.manual_seed(1)
    newcomer = _pass(Position())
    newcomer.order.peek(0)
    torch.manual_seed(99)  # the script has drawn other numbers meanwhile
    random.seed(7)
    before = random.getstate(), torch.get_rng_state()
    newcomer.idle()
    newcomer.go_to(job.position() | {"batch": 4})
    assert not newcomer.astray and newcomer.index == 4
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    torch.manual_seed(1)
    assert newcomer.stream.read == 4
    newcomer.go_to(job.position() | {"batch": 2})
    assert "it has read 4 batches" in newcomer.astray


def test_a_newcomer_reads_as_much_of_earlier_passes_as_is_noted(tmp_path: Path) -> None:
    readings, here = Readings(), _pass(Position())
    assert "nobody knows" in readings.go_through(here)
    readings.home = tmp_path / "streams"
    assert "nobody knows" in readings.go_through(here)
    here.index = 5
    readings.leave(here, ended=False)
    other = _pass(Position())
    assert readings.go_through(other) == "" and other.stream.read == 5
    other.stream.skip(6)
    assert "6 batches in training pass 0, and not 5" in readings.go_through(other)


def test_batches_are_told_apart_by_all_that_is_in_them() -> None:
    one = {"text": ["a", "b"], "x": torch.ones(2), "more": (1, None)}
    assert contents(one) == contents({"text": ["a", "b"], "x": torch.ones(2), "more": (1, None)})
    for other in (one | {"text": ["a", "c"]}, one | {"x": torch.zeros(2)}, one | {"more": (2, None)}):
        assert contents(other) != contents(one)


def test_sums_from_a_device_are_told_with_the_next_batch_of_the_same_members() -> None:
    late = LateSums()
    late.add([torch.ones(3)])  # not on a device: compared at once
    late.batch_computed(4)
    assert late.read(4) == []
    late._sums = [torch.tensor(2.0), torch.tensor(3.0)]
    assert late.read(4) == []
    late.batch_computed(4)
    assert late.read(4) == [[2.0, 3.0, 1]] and late.read(5) == []
    late.batch_computed(4)
    assert late.read(4) == []
