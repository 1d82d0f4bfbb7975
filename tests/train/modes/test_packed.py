"""Norms of a GPU's gradients, tried on the CPU: the same numbers with few calls, each a launch on a GPU."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import swell
from swell.train.modes import adaptive
from swell.train.modes.adaptive import Packed
from swell.train.sync.memory import FlatModel

LAYERS = 40
STEPS = 36
VIEWS = ("view", "detach", "slice", "expand", "_unsafe_view", "alias", "t.", "unbind", "as_strided", "select")


@pytest.mark.parametrize("step", [1, 4])
def test_packed_gradients_are_at_the_places_of_their_weights(step: int) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3).bfloat16(), nn.Linear(3, 33))
    flat = FlatModel(model)
    for i, parameter in enumerate(flat.parameters.values()):
        parameter.grad = None if i == 2 else torch.randn_like(parameter)
    packed = Packed(flat, step)
    vectors = packed.gradients()
    expected = [torch.zeros_like(v) for v in vectors]
    for slot in flat.layout.slots:
        if not slot.buffer and (grad := flat.parameters[slot.name].grad) is not None:
            values = grad.reshape(-1)[::step]
            begin = slot.offset // step
            expected[slot.bucket][begin : begin + len(values)] = values
    for one, other in zip(vectors, expected, strict=True):
        assert torch.equal(one, other)
    weights = packed.weights([torch.zeros(-(-b.numel // step)) for b in flat.layout.buckets])
    assert [w.shape for w in weights] == [v.shape for v in vectors]


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls that are kernels on a GPU, and those that wait for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.waits = 0
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.startswith("_local_scalar_dense"):
            self.waits += 1
        elif not name.startswith(VIEWS):
            self.kernels += 1
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def _train(mode: str) -> tuple[list[Calls], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    job = swell.elastic(model, optimizer, mode=mode, checkpoint_every_s=None, max_batch=4)
    loader = job.loader(TensorDataset(torch.randn(4 * STEPS, 6)), batch_size=4)
    calls = []
    for _ in job.epochs(1):
        for (x,) in loader:
            loss = model(x).square().mean()
            with Calls() as counted:
                job.step(loss)
            calls.append(counted)
    return calls, job


def test_a_measured_step_makes_few_more_calls_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "_EVERY", ((0, 16),))
    monkeypatch.setattr(adaptive, "packs", lambda device: True)
    fixed, _ = _train("fixed")
    measured, job = _train("adaptive")
    assert job.adaptive.noise.updates >= 2
    for step in range(2, STEPS):
        more = measured[step].kernels - fixed[step].kernels
        waits = measured[step].waits - fixed[step].waits
        if step % 16 < 2:
            assert 0 < more <= 12, measured[step].names - fixed[step].names
            assert waits <= 3
        else:
            assert (more, waits) == (0, 0), measured[step].names - fixed[step].names


def test_packed_norms_are_those_of_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[float, float]] = []
    for packs in (True, False):
        monkeypatch.setattr(adaptive, "packs", lambda device, packs=packs: packs)
        _, job = _train("adaptive")
        found.append((job.adaptive.noise.sqr, job.adaptive.noise.var))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0][1] > 0.0
