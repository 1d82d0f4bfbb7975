"""Backward, update and schedule of one worker, without a job around them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swell.train.agent.errors import UsageError
from swell.train.learner import Several, Updater


def weight(value: float) -> Tensor:
    return torch.tensor([value], requires_grad=True)


def test_several_losses_change_the_parameters_of_their_own_optimizer_only() -> None:
    maker, critic = weight(1.0), weight(2.0)
    updater = Updater(Several([torch.optim.SGD([maker], lr=1.0), torch.optim.SGD([critic], lr=1.0)]))
    losses = [(maker * critic).sum(), (3 * maker * critic).sum()]
    updater.descend(updater.weighted(losses, 0.5))
    updater.update([maker, critic])
    assert maker.item() == 1.0 - 0.5 * 2.0 and critic.item() == 2.0 - 0.5 * 3.0
    with pytest.raises(UsageError, match="got 1 losses, but the job has 2 optimizers"):
        updater.weighted(losses[:1], 1.0)


def test_gradients_are_clipped_after_their_scale_was_taken_out() -> None:
    value = weight(0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    updater = Updater(torch.optim.SGD([value], lr=1.0), scaler=scaler, clip_norm=1.0)
    updater.descend(updater.weighted(lambda: (4 * value).sum(), 1.0))
    assert value.grad is not None and value.grad.item() == 32.0 and updater.scale == 8.0
    updater.update([value])
    assert value.item() == pytest.approx(-1.0, abs=1e-4)


def test_the_scheduler_makes_the_steps_that_are_due_and_goes_on_where_a_state_was() -> None:
    def made() -> tuple[Updater, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([weight(0.0)], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.step()
        return Updater(optimizer, scheduler, step_scheduler="step"), scheduler

    updater, scheduler = made()
    updater.tick(2.9)
    assert scheduler.last_epoch == 2
    again, other = made()
    again.load(updater.state())
    again.tick(3.0)
    assert other.last_epoch == 3 and updater.state()["scaler"] is None
    with pytest.raises(UsageError, match="step_scheduler: got 'hour'"):
        Updater(updater.optimizer, step_scheduler="hour")
