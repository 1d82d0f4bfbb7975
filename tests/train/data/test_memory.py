"""A batch that does not fit the memory: cut, computed again, and remembered."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import swell
from swell.train.data import room
from swell.train.modes.adaptive import OutOfMemory


class Small(nn.Module):
    """A model with room for `fits` samples at once, in the forward pass or in the backward pass."""

    def __init__(self, fits: int, where: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(48))
        self.fits = fits
        self.where = where
        self.failures = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.fits:
            if self.where == "forward":
                self._fail()
            x = x.clone().requires_grad_()
            x.register_hook(lambda _: self._fail())
            return self.weight[x.detach().long().flatten()] + 0.0 * x.flatten()
        return self.weight[x.long().flatten()]

    def _fail(self) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError("this model has little room")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_the_step_is_the_same_as_with_enough_memory(mode: str, where: str) -> None:
    model = Small(5, where)
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0), mode=mode, max_batch=16)
    data = TensorDataset(torch.arange(48.0))
    loader = job.loader(data, batch_size=16)
    seen: Counter[float] = Counter()
    for _ in job.epochs(2, by="data"):
        for (x,) in loader:
            if len(x) <= model.fits:
                seen.update(x.tolist())
            job.step(lambda x=x: model(x).mean())  # type: ignore[misc]
    assert job.steps == 6
    assert torch.allclose(model.weight, torch.full((48,), -2 / 16), atol=1e-6), (
        "each sample once in each epoch"
    )
    assert 1 <= model.failures <= 4, "what did not fit is remembered"


def test_a_stream_reads_again_what_did_not_fit() -> None:
    model = Small(3, "forward")
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def read(shard: range) -> Iterator[torch.Tensor]:
        for value in shard:
            yield torch.tensor(float(value))

    loader = job.stream([range(0, 20), range(20, 48)], read, batch_size=12)
    for _ in job.epochs(1):
        for x in loader:
            job.step(lambda x=x: model(x).mean())  # type: ignore[misc]
    assert job.steps == 4
    assert torch.allclose(model.weight, torch.full((48,), -1 / 12), atol=1e-6)


def test_consistent_mode_does_not_change_its_batches_behind_your_back() -> None:
    model = Small(2, "forward")
    job = swell.elastic(
        model, torch.optim.SGD(model.parameters(), lr=1.0), mode="consistent", logical_ranks=4
    )
    loader = job.loader(TensorDataset(torch.arange(48.0)), batch_size=16)
    with pytest.raises(torch.OutOfMemoryError):
        _train(job, model, loader)


PLAIN = """
    import sys
    import torch, swell
    from torch import nn
    from torch.utils.data import TensorDataset

    fits, mode = int(sys.argv[1]), sys.argv[2]

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(48))

        def forward(self, x):
            if len(x) > fits:
                raise torch.OutOfMemoryError("this model has little room")
            return self.weight[x.long()]

    model = Small()
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=1.0), mode=mode, max_batch=16)
    loader = job.loader(TensorDataset(torch.arange(48.0)), batch_size=16)
    for epoch in job.epochs(2, by="data"):
        for (x,) in loader:
            job.step(model(x).mean())
    if job.is_leader:
        print("weights", sorted({round(-16 * w, 3) for w in model.weight.tolist()}), "steps", job.steps)
"""


@pytest.mark.parametrize("mode", ["fixed", "adaptive"])
def test_a_worker_whose_own_forward_pass_does_not_fit_begins_again_with_less(stage: Any, mode: str) -> None:
    job = stage.run(PLAIN, "5", mode, workers=1)
    assert job.wait() == 0, job.output()
    assert "weights [2.0] steps 6" in job.output()
    assert len(job.events("spawn")) == 3, "16 and 8 do not fit, 4 does"


def test_a_batch_that_did_not_fit_is_remembered_for_this_run_of_the_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWELL_LAUNCH", "first")
    room.Room(tmp_path, "w0").trying(16)
    assert room.give_up(tmp_path, "w0") == 16
    assert room.failed(tmp_path) == 16
    monkeypatch.setenv("SWELL_LAUNCH", "second")
    assert room.failed(tmp_path) is None


def test_a_sample_that_does_not_fit_is_the_scripts_own_error(stage: Any) -> None:
    job = stage.run(PLAIN, "0", "fixed", workers=1)
    assert job.wait() == 1
    assert "this model has little room" in job.output()


def test_when_nothing_fits_it_says_so() -> None:
    model = Small(0, "forward")
    job = swell.elastic(
        model, torch.optim.SGD(model.parameters(), lr=1.0), mode="adaptive", min_local=4, max_batch=16
    )
    loader = job.loader(TensorDataset(torch.arange(48.0)), batch_size=16)
    with pytest.raises(OutOfMemory, match="smallest allowed"):
        _train(job, model, loader)


def _train(job: Any, model: nn.Module, loader: Any) -> None:
    for _ in job.epochs(1):
        for (x,) in loader:
            job.step(lambda x=x: model(x).mean())
