"""Adaptive mode in a job of one: how long it trains, what it refuses, what travels."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import swell
from swell.train.agent.errors import UsageError
from swell.train.job import Job


def _job(
    scheduler: bool = False, step_scheduler: str = "epoch", samples: int = 320, **options: Any
) -> tuple[Job, Any]:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = torch.optim.lr_scheduler.StepLR(optimizer, 10_000) if scheduler else None
    job = swell.elastic(
        model, optimizer, scheduler=made, step_scheduler=step_scheduler, **{"mode": "adaptive", **options}
    )
    x = torch.randn(samples, 8)
    return job, job.loader(TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(samples, 1)), batch_size=16)


def _train(job: Job, loader: Any, epochs: int, batch: int | None = None, **options: Any) -> int:
    passes = 0
    for _ in job.epochs(epochs, **options):
        for x, y in loader:
            job.step(nn.functional.mse_loss(job.model(x), y))
            if batch is not None:  # what a plan from rank 0 would do
                loader.batch_size = batch
        passes += 1
    return passes


def test_at_the_tuned_batch_epochs_are_epochs() -> None:
    job, loader = _job(max_batch=16, scheduler=True, samples=330)
    assert _train(job, loader, 7) == 7
    assert job.steps == 7 * 21
    assert job.scheduler.last_epoch == 7


def test_larger_batches_need_more_passes_and_fewer_steps_for_the_same_worth() -> None:
    job, loader = _job(max_batch=160)
    passes = _train(job, loader, 10, batch=160)
    assert passes > 10
    assert job.steps < 10 * 20
    assert job.adaptive.epochs_worth == pytest.approx(10, abs=0.2)


def test_passes_over_the_data_can_be_counted_instead() -> None:
    job, loader = _job(max_batch=160, scheduler=True)
    assert _train(job, loader, 10, batch=160, by="data") == 10
    assert job.scheduler.last_epoch == 10


def test_a_schedule_by_steps_follows_their_worth() -> None:
    job, loader = _job(max_batch=160, scheduler=True, step_scheduler="step")
    _train(job, loader, 6, batch=160)
    assert job.scheduler.last_epoch == int(job.adaptive.steps_worth + 1e-6)
    assert job.scheduler.last_epoch > job.steps


def test_statistics_and_progress_travel_with_the_state() -> None:
    job, loader = _job(max_batch=64)
    _train(job, loader, 2, batch=48)
    other, loader2 = _job(max_batch=64)
    other.restore(job.capture())
    assert other.adaptive.state_dict() == job.adaptive.state_dict()
    assert other.adaptive.noise_scale == job.adaptive.noise_scale
    assert loader2.micro_batch == loader.micro_batch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 8}, "max_batch: got 8, must be at least the tuned batch size 16"),
        ({"min_local": 0}, "min_local: got 0"),
        ({"min_local": 8, "max_local": 4}, "max_local: got 4"),
        ({"learning_rate_rule": "cubic"}, "rule: got 'cubic', must be one of adascale"),
    ],
)
def test_nonsense_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _job(**options)


def test_a_second_training_loader_is_refused() -> None:
    job, loader = _job()
    with pytest.raises(UsageError, match="this is the second"):
        job.loader(loader.dataset, batch_size=4)
    job.loader(loader.dataset, batch_size=4, train=False)


def test_progress_needs_adaptive_mode() -> None:
    job, loader = _job(mode="fixed")
    with pytest.raises(UsageError, match="needs mode='adaptive'"):
        _train(job, loader, 1, by="progress")
    with pytest.raises(UsageError, match="needs mode='adaptive'"):
        _ = job.adaptive


def test_progress_is_told_in_steps_at_the_tuned_batch() -> None:
    job, loader = _job(max_batch=160)
    _train(job, loader, 10, batch=160)
    told = job.adaptive.progress(10)
    assert told["of"] == 10 * 20
    assert told["done"] == pytest.approx(200, rel=0.05) and told["done"] > 1.5 * job.steps


def test_passes_that_remain_are_told_by_what_they_are_worth() -> None:
    job, loader = _job(max_batch=160)
    _train(job, loader, 10, batch=160, by="data")
    done = job.adaptive.steps_worth
    assert done < 10 * 20, "a sample of a large batch is worth less"
    at_end, at_half = job.adaptive.progress(10, 10.0), job.adaptive.progress(20, 10.0)
    assert at_end == {"done": done, "of": pytest.approx(done, rel=0.03)}
    worth = job.adaptive.noise.efficiency(job.adaptive._mode.agreed.batch / 16)
    assert at_half["of"] == pytest.approx(done + 10 * 20 * worth, rel=0.03)


def test_the_limits_told_are_those_applied() -> None:
    job, _ = _job(max_batch=160, min_local=2, max_local=64)
    assert job.adaptive.beat()["limits"] == {
        "init_batch": 16,
        "max_batch": 160,
        "min_local": 2,
        "max_local": 64,
    }
    job.adaptive._mode.agreed.tuner.out_of_memory(32)
    assert job.adaptive.beat()["limits"]["max_local"] < 32, "what did not fit is not planned with"


def test_a_micro_batch_bounds_what_is_computed_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01), mode="adaptive", max_batch=160)
    x = torch.randn(320, 8)
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, micro_batch=8)
    sizes = set()
    for _ in job.epochs(5):
        for a, b in loader:
            sizes.add(len(a))
            job.step(nn.functional.mse_loss(model(a), b))
    assert max(sizes) <= 8
    assert job.adaptive.beat()["limits"]["max_local"] == 8
