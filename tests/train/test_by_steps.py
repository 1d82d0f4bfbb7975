"""`job.loop`, `job.sample` and several models and optimizers in one job."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import swell
from swell.train.agent.errors import UsageError

BY_STEPS = """
    import json, sys, time
    import torch
    import swell

    steps, pace = int(sys.argv[1]), float(sys.argv[2])
    torch.manual_seed(0)
    data = torch.arange(1000, dtype=torch.float32) / 1000
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    job = swell.elastic(model, optimizer)
    for step in job.loop(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.5 / (1 + step / 50)
        x = data[job.sample(len(data), 12)].unsqueeze(1)
        time.sleep(pace)
        job.step(torch.nn.functional.mse_loss(model(x), 3 * x + 1))
    if job.is_leader:
        print(json.dumps({"weight": model.weight.item(), "bias": model.bias.item(), "steps": job.steps}))
"""


def _result(job: Any) -> dict[str, Any]:
    assert job.wait() == 0, job.output()
    line = next(line for line in job.output().splitlines() if "{" in line)
    result: dict[str, Any] = json.loads(line[line.index("{") :])
    return result


def test_a_loop_by_steps_draws_the_same_batches_on_any_workers(stage: Any) -> None:
    alone = _result(stage.run(BY_STEPS, "1200", "0", workers=1))
    job = stage.run(BY_STEPS, "1200", "0.005", workers=1)
    job.members(1)
    for count in (3, 1, 2):
        job.resize(count)
        job.members(count)
    result = _result(job)
    assert result["steps"] == alone["steps"] == 1200
    assert result["weight"] == pytest.approx(alone["weight"], abs=1e-4)
    assert result["bias"] == pytest.approx(alone["bias"], abs=1e-4)


def _job(*models: nn.Module) -> Any:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    return swell.elastic(list(models), optimizers)


def test_samples_of_a_data_set_come_once_in_every_pass() -> None:
    job = _job(nn.Linear(1, 1))
    data = [torch.tensor([float(i)]) for i in range(10)]
    seen: list[float] = []
    for _ in job.loop(6):
        batch = job.sample(data, 4)
        seen += batch.flatten().tolist()
        job.step([job.model[0](batch).mean()])
    assert sorted(seen[:10]) == sorted(seen[10:20]) == [float(i) for i in range(10)]
    assert seen[:10] != seen[10:20]


def test_several_losses_change_only_the_parameters_of_their_optimizer() -> None:
    torch.manual_seed(0)
    maker, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    job = _job(maker, critic)
    expected = {}
    for _ in job.loop(1):
        x = torch.randn(len(job.sample(100, 8)), 2)
        made = maker(x)
        loss_m, loss_c = -critic(made).mean(), critic(made.detach()).mean()
        gradients = torch.autograd.grad(loss_c, list(critic.parameters()), retain_graph=True)
        expected = {n: p - 0.1 * g for (n, p), g in zip(critic.named_parameters(), gradients)}
        job.step([loss_m, loss_c])
    for name, parameter in critic.named_parameters():
        assert torch.allclose(parameter, expected[name]), "the maker's loss does not reach the critic"
    state = job.capture()
    assert len(state["optimizer"]["parts"]) == 2
    job.restore(state)


def test_wrong_uses_are_refused_with_what_to_do() -> None:
    job = _job(nn.Linear(1, 1), nn.Linear(1, 1))
    with pytest.raises(UsageError, match="steps: got -1"):
        next(job.loop(-1))
    with pytest.raises(UsageError, match="got 1 losses, but the job has 2 optimizers"):
        for _ in job.loop(1):
            job.sample(10, 2)
            job.step([job.model[0](torch.ones(1, 1)).mean()])
    with pytest.raises(UsageError, match="nothing to draw from below 0"):
        _job(nn.Linear(1, 1)).sample(0, 2)


def test_a_second_call_of_elastic_is_refused_at_once_in_a_job(stage: Any) -> None:
    twice = """
    import torch, swell
    for name in "ab":
        model = torch.nn.Linear(1, 1)
        swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1))
    """
    job = stage.run(twice, workers=2)
    assert job.wait() == 1
    assert "swell.elastic([maker, critic], [optimizer_m, optimizer_c])" in job.output()
