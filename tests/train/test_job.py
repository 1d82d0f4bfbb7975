"""The API for people, on one worker in this process: the same numbers as a plain loop, and clear refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import swell
from swell.train.agent.errors import UsageError
from swell.train.data.samples import permutation
from swell.train.job import Job


def data(samples: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int = 2, **options: Any) -> Job:
    loader_options = options.pop("loader", {})
    job = swell.elastic(model, optimizer, **options)
    loader = job.loader(data(), batch_size=16, **loader_options)
    for _ in job.epochs(epochs):
        for x, y in loader:
            job.step(nn.functional.mse_loss(model(x), y))
    return job


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int = 2, clip: float | None = None
) -> None:
    samples = data()
    for epoch in range(epochs):
        order = permutation(len(samples), 0, epoch).tolist()
        for at in range(0, len(samples), 16):
            x, y = samples[order[at : at + 16]]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "rmsprop"])
def test_alone_it_is_bit_equal_to_a_plain_loop(kind: str) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        p = model.parameters()
        if kind == "sgd":
            return torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)
        return torch.optim.AdamW(p, lr=0.01) if kind == "adamw" else torch.optim.RMSprop(p, lr=0.01)

    ours, theirs = net(), net()
    job = train(ours, optimizer(ours), clip_norm=0.5)
    plain(theirs, optimizer(theirs), clip=0.5)
    assert equal(ours, theirs)
    assert job.steps == 8 and job.epoch == 2


def test_micro_batches_accumulate_to_the_same_step() -> None:
    whole, parts = nn.Linear(6, 1), nn.Linear(6, 1)
    parts.load_state_dict(copy.deepcopy(whole.state_dict()))
    train(whole, torch.optim.SGD(whole.parameters(), lr=0.1))
    job = train(parts, torch.optim.SGD(parts.parameters(), lr=0.1), loader={"micro_batch": 5})
    assert job.steps == 8
    torch.testing.assert_close(whole.weight, parts.weight)


def test_consistent_mode_trains_and_keeps_buffers_per_logical_rank() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = train(model, optimizer, mode="consistent", logical_ranks=4, loader={"drop_last": True})
    assert job.steps == 6
    means = {tuple(b["1.running_mean"].tolist()) for b in job.capture()["rank_buffers"]}
    assert len(means) == 4
    assert tuple(model.state_dict()["1.running_mean"].tolist()) in means


def test_schedulers_step_by_epoch_or_by_step() -> None:
    for by, expected in (("epoch", 2), ("step", 8), ("never", 0)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        train(model, optimizer, scheduler=scheduler, step_scheduler=by)
        assert scheduler.last_epoch == expected


def test_a_gradient_scaler_is_used_and_unscaled_before_clipping() -> None:
    ours, theirs = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(ours, torch.optim.SGD(ours.parameters(), lr=0.1), scaler=scaler, clip_norm=0.5)
    plain(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), clip=0.5)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b)


def test_bfloat16_autocast_trains() -> None:
    model = net()
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loader = job.loader(data(), batch_size=16)
    for _ in job.epochs(1):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(model(x).float(), y)
            assert job.step(loss)
    assert job.steps == 4


def test_a_compiled_model_trains_to_the_same_weights() -> None:
    ours, theirs = net(), net()
    compiled = torch.compile(ours, backend="eager")
    train(compiled, torch.optim.SGD(ours.parameters(), lr=0.1))
    plain(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    assert equal(ours, theirs)


def test_a_skipped_batch_counts_as_seen_but_adds_nothing() -> None:
    model = nn.Linear(6, 1)
    before = copy.deepcopy(model.state_dict())
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = job.loader(data(), batch_size=16)
    for _ in job.epochs(1):
        for _ in loader:
            continue
    assert job.steps == 4
    assert torch.equal(model.weight, before["weight"])


def test_a_parameter_nobody_used_is_left_alone() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    model = Partly()
    before = model.unused.weight.detach().clone()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    assert torch.equal(model.unused.weight, before)


def test_several_loaders_at_once() -> None:
    model = nn.Linear(6, 1)
    job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
    a, b = job.loader(data(32), batch_size=8), job.loader(data(64), batch_size=16)
    check = job.loader(data(20), batch_size=8, train=False)
    seen = 0
    for _ in job.epochs(2):
        for (x, y), (u, v) in zip(a, b):
            assert len(x) == 8 and len(u) == 16
            job.step(nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(model(u), v))
        seen += sum(len(x) for x, _ in check)
    assert job.steps == 8 and seen == 40


def test_the_state_survives_a_restart_from_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    reference, optimizer = fresh()
    train(reference, optimizer, epochs=3)

    model, optimizer = fresh()
    job = swell.elastic(model, optimizer, checkpoint_dir=tmp_path, checkpoint_every_steps=1000)
    counts = job.register("counts", Counts())
    loader = job.loader(data(), batch_size=16)
    for _ in job.epochs(3):
        for x, y in loader:
            job.step(nn.functional.mse_loss(model(x), y))
            counts.batches += 1
            if job.steps == 6:
                job.save(wait=True)
                break
        if job.steps == 6:
            break

    model, optimizer = fresh()
    job = swell.elastic(model, optimizer, checkpoint_dir=tmp_path)
    counts = job.register("counts", Counts())
    loader = job.loader(data(), batch_size=16)
    epochs = []
    for epoch in job.epochs(3):
        epochs.append(epoch)
        for x, y in loader:
            job.step(nn.functional.mse_loss(model(x), y))
            counts.batches += 1
    assert epochs == [1, 2] and job.steps == 12 and counts.batches == 12
    assert equal(model, reference)


class Counts:
    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


# ---------------------------------------------------------------------- refusals


def make(**options: Any) -> Job:
    model = net()
    return swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "magic"}, "mode: got 'magic', must be one of fixed, adaptive, consistent"),
        ({"logical_ranks": 0}, "logical_ranks: got 0"),
        ({"step_scheduler": "daily"}, "step_scheduler: got 'daily'"),
        ({"device": "meta"}, r"model: 0.weight is on cpu, but the script says device='meta'; call model.to"),
        ({"checkpoint_every_s": -1.0}, "checkpoint_every_s: got -1.0"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_a_batch_smaller_than_the_logical_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size: got 3, but consistent mode has 4 logical ranks"):
        make(mode="consistent").loader(data(), batch_size=3)


def test_two_loaders_or_objects_with_one_name_are_refused() -> None:
    job = make()
    job.loader(data(), batch_size=4, name="train")
    with pytest.raises(UsageError, match="two loaders called 'train'"):
        job.loader(data(), batch_size=4, name="train")
    job.register("ema", Counts())
    with pytest.raises(UsageError, match="two objects called 'ema'"):
        job.register("ema", Counts())


def test_an_object_without_a_state_dict_is_refused() -> None:
    with pytest.raises(UsageError, match="x: a int has no state_dict"):
        make().register("x", 3)


def test_a_data_set_without_a_length_is_sent_to_streams() -> None:
    with pytest.raises(UsageError, match=r"a generator has no length or no index.*job\.stream"):
        make().loader((i for i in range(3)), batch_size=2)  # type: ignore[arg-type]


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="optimizer: 6 of its parameters are not the model's"):
        swell.elastic(net(), torch.optim.SGD(net().parameters(), lr=0.1))


def test_a_model_without_gradients_is_refused() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_step_without_a_batch_is_refused() -> None:
    job = make()
    with pytest.raises(UsageError, match=r"no batch was drawn.*job\.loader"):
        job.step(torch.zeros((), requires_grad=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"batch_size": 4, "micro_batch": 0}, "micro_batch: got 0"),
        ({"batch_size": 4, "num_workers": -1}, "num_workers: got -1"),
        ({"batch_size": 99, "drop_last": True}, "drop_last leaves no step"),
    ],
)
def test_bad_loaders_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make().loader(data(), **options)
