"""A job that has a target instead of a length: it ends when its loss, not one worker's, is low enough."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import swell
from swell.train.agent.errors import UsageError
from swell.train.job import Job
from swell.train.reporting import FEWEST_LOSSES, SmoothedLoss, step_loss


def _job(samples: int = 200, **options: Any) -> tuple[Job, Any]:
    torch.manual_seed(0)
    x = torch.randn(samples, 4)
    model = nn.Linear(4, 1)
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.02), **options)
    return job, job.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=20)


def _train(job: Job, loader: Any, epochs: int, **options: Any) -> list[float]:
    losses = []
    for _ in job.epochs(epochs, **options):
        for x, y in loader:
            loss = nn.functional.mse_loss(job.model(x), y)
            losses.append(float(loss.detach()))
            job.step(loss)
    return losses


@pytest.mark.parametrize("mode", ["fixed", "adaptive", "consistent"])
def test_training_ends_at_the_first_step_whose_smoothed_loss_is_low_enough(mode: str) -> None:
    job, loader = _job(mode=mode, **({"max_batch": 20} if mode == "adaptive" else {}))
    losses = _train(job, loader, 1000, until_loss=0.05)
    if mode == "consistent":  # a step's batch is computed in four parts
        losses = [sum(losses[i : i + 4]) / 4 for i in range(0, len(losses), 4)]
    smoothed, reached = SmoothedLoss(), []
    for loss in losses:
        smoothed.add(loss)
        reached.append(smoothed.reached(0.05))
    assert reached[-1] and not any(reached[:-1])
    assert job.steps == len(losses) < 1000 * 10


def test_a_target_that_is_not_reached_leaves_the_number_of_epochs() -> None:
    job, loader = _job()
    assert len(_train(job, loader, 2, until_loss=1e-9)) == 20


def test_the_first_few_losses_do_not_end_training() -> None:
    job, loader = _job()
    assert len(_train(job, loader, 5, until_loss=1e9)) == FEWEST_LOSSES


def test_what_was_averaged_travels_with_the_state() -> None:
    first, loader = _job()
    _train(first, loader, 2)
    second, _ = _job()
    state = first.capture()
    second.restore(state)
    assert second.capture()["loss"] == state["loss"] == {"value": pytest.approx(first.loss), "steps": 20}
    del state["loss"]
    second.restore(state)  # a checkpoint of an earlier version


def test_a_target_must_be_a_number() -> None:
    job, _ = _job()
    with pytest.raises(UsageError, match="until_loss"):
        next(iter(job.epochs(3, until_loss=math.nan)))


def test_the_loss_of_a_step_is_the_mean_over_all_its_samples() -> None:
    # Workers tell their samples' share of the mean: 3 samples of loss 1, and 1 sample of loss 5.
    assert step_loss([{"n": 3, "loss": 0.75}, {"n": 1, "loss": 1.25}, {"n": 0}], 4) == 2.0
    # A stream may have fewer samples than the step has places for.
    assert step_loss([{"n": 1, "loss": 0.75}, {"n": 1, "loss": 1.25}], 4) == 4.0
    assert step_loss([{"n": 3, "loss": 0.75}, {"n": 1}], 4) is None, "one did not read its loss"


CONSTANT = """
    import time, torch, swell
    from torch import nn
    from torch.utils.data import TensorDataset

    class Identity(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return x + 0.0 * self.unused

    model = Identity()
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.0))
    values = torch.arange(31.0).reshape(31, 1)
    loader = job.loader(TensorDataset(values), batch_size=31)
    for _ in job.epochs(2000, until_loss=-1.0):
        for (x,) in loader:
            time.sleep(0.01)
            job.step(model(x).mean())
"""


def test_every_worker_reports_the_loss_of_the_whole_batch_and_the_target(stage: Any) -> None:
    job = stage.run(CONSTANT, workers=3)
    status = job.wait_for(
        lambda s: sum(r.get("world") == 3 and r.get("loss") is not None for r in s["reports"].values()) == 3
    )
    for report in status["reports"].values():
        assert report["loss"] == pytest.approx(15.0), "31 samples from 0 to 30, in whatever parts"
        assert report["target_loss"] == -1.0 and report["at_most"] == 2000 and report["of"] is None


TRAINING = """
    import json, time, torch, swell
    from torch import nn
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    x = torch.randn(600, 8)
    y = x @ torch.randn(8, 1) + 0.3 * torch.randn(600, 1)
    model = nn.Linear(8, 1)
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.002), checkpoint_every_s=None)
    loader = job.loader(TensorDataset(x, y), batch_size=30)
    for _ in job.epochs(10_000, until_loss=0.12):
        for a, b in loader:
            time.sleep(0.003)
            job.step(nn.functional.mse_loss(model(a), b))
    print("END", json.dumps({"steps": job.steps, "loss": job.loss}), flush=True)
"""


def test_all_workers_end_at_the_same_step_after_joins_leaves_and_deaths(stage: Any) -> None:
    job = stage.run(TRAINING, workers=1)
    job.members(1)
    job.resize(3)
    job.members(3)
    dead = job.kill(0)
    job.wait_for(lambda s: len(s["members"]) >= 2 and dead not in s["members"])
    assert job.wait(120) == 0
    ends = [json.loads(line.split("END", 1)[1]) for line in job.output().splitlines() if "END" in line]
    assert len(ends) >= 2 and all(end == ends[0] for end in ends), ends
    assert ends[0]["loss"] <= 0.12
    assert ends[0]["steps"] < 10_000
