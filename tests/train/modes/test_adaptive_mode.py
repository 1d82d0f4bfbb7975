"""Adaptive mode on a real model, with several workers played in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from swell.perf.goodput import BatchLimits
from swell.perf.throughput import ThroughputParams, step_times
from swell.train.modes.adaptive import AdaptiveMode, AgreedBatch, OutOfMemory
from swell.train.modes.noise import AdamPreconditioner, NoiseMeter, StepGradient, direct_noise_scale

MACHINE = ThroughputParams(
    alpha_c=0.01, beta_c=1e-4, alpha_n=0.2, beta_n=0.01, alpha_r=0.004, beta_r=0.001, gamma=1.0
)


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    x, y = torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Tensors are tiny here: a second thread would only spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Fleet:
    """Workers that share one model object but each keep their own `AdaptiveMode`."""

    def __init__(
        self, make_optimizer: Callable[[Any], torch.optim.Optimizer], limits: BatchLimits, seed: int = 0
    ):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.params = list(self.model.parameters())
        self.size = sum(p.numel() for p in self.params)
        self.optimizer = make_optimizer(self.params)
        self.limits = limits
        self.modes: list[AdaptiveMode] = []
        self.x, self.y, self.test_x, self.test_y = _digits()
        self.steps = self.seen = 0
        self.epoch_size = len(self.x)
        self.rng = torch.Generator().manual_seed(seed)

    def worker(self) -> AdaptiveMode:
        weights = torch.zeros(self.size)
        places, at = [], 0
        for p in self.params:
            places.append((p, weights[at : at + p.numel()]))
            at += p.numel()
        adam = (
            AdamPreconditioner(self.optimizer, places)
            if AdamPreconditioner.applies_to(self.optimizer)
            else None
        )
        meter = NoiseMeter(adam=adam, weights=[weights])
        return AdaptiveMode(self.optimizer, meter, AgreedBatch(self.limits))

    def resize(self, count: int) -> None:
        state = self.modes[0].state_dict() if self.modes else None
        self.modes = self.modes[:count]
        while len(self.modes) < count:
            joiner = self.worker()
            if state is not None:
                joiner.load_state_dict(state)
            self.modes.append(joiner)
        for mode in self.modes:
            mode.membership_changed()

    def gradient(self, indices: Tensor, weight: float = 1.0) -> Tensor:
        self.model.zero_grad()
        (nn.functional.cross_entropy(self.model(self.x[indices]), self.y[indices]) * weight).backward()
        return torch.cat([p.grad.reshape(-1) for p in self.params if p.grad is not None])

    def step(self, window: Tensor, update: bool = True) -> None:
        count = len(self.modes)
        limit = self.modes[0].agreed.micro_batch
        parts = torch.tensor_split(window, count)
        squares, shares = [], []
        pieces = -(-len(parts[0]) // limit)
        for part in parts:
            share = torch.zeros(self.size)
            for i, micro in enumerate(torch.tensor_split(part, pieces)):
                if len(micro):
                    share += self.gradient(micro, len(micro) / len(window))
                    if i == 0 and count == 1 and pieces > 1:
                        self.modes[0].keep_first([share], len(micro))
            weights = self.modes[0].meter.weights
            weighted = share if weights is None else share * weights[0]
            squares.append(float(weighted.dot(weighted)))
            shares.append(share)
        whole = sum(shares, torch.zeros(self.size))
        weights = self.modes[0].meter.weights
        weighted = whole if weights is None else whole * weights[0]
        headers = [mode.agreed.header() for mode in self.modes]
        grad_s, step_s = step_times(MACHINE, 1, count, -(-len(parts[0]) // pieces))
        for mode, part in zip(self.modes, parts):
            mode.commit(
                headers,
                StepGradient(
                    part_samples=[len(p) for p in parts],
                    part_squares=squares,
                    total_square=float(weighted.dot(weighted)),
                    whole=lambda: [whole],
                ),
                nodes=1,
                epochs_done=self.seen / self.epoch_size,
            )
            mode.agreed.observe(
                float(grad_s) * (pieces - 1) + float(step_s), float(step_s - grad_s), len(part), pieces
            )
        assert len({mode.factor for mode in self.modes}) == 1
        self.steps += 1
        self.seen += len(window)
        if update:
            at = 0
            for p in self.params:
                p.grad = whole[at : at + p.numel()].view_as(p)
                at += p.numel()
            with self.modes[0].scaled_learning_rate():
                self.optimizer.step()

    def epoch(self) -> None:
        order = torch.randperm(self.epoch_size, generator=self.rng)
        cursor = 0
        while cursor < self.epoch_size:
            batch = self.modes[0].agreed.batch
            self.step(order[cursor : cursor + batch])
            cursor += batch

    def accuracy(self) -> float:
        with torch.no_grad():
            return float((self.model(self.test_x).argmax(1) == self.test_y).float().mean())


LIMITS = BatchLimits(init_batch=32, max_batch=512, min_local=4, max_local=256)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3)


def _direct(fleet: Fleet, draws: int = 500) -> float:
    """Noise scale from many gradients at fixed weights, preconditioned as the mode does it."""
    weights = fleet.modes[0].meter.weights
    rng = torch.Generator().manual_seed(99)

    def gradients() -> Any:
        for _ in range(draws):
            g = fleet.gradient(torch.randint(fleet.epoch_size, (32,), generator=rng))
            yield g if weights is None else g * weights[0]

    return direct_noise_scale(gradients(), 32)


@pytest.mark.parametrize("optimizer", [_sgd, _adam])
@pytest.mark.parametrize(
    ("workers", "limit"),
    [
        pytest.param(4, 8, id="4 workers"),
        pytest.param(2, 8, id="2 workers accumulating"),
        pytest.param(1, 16, id="1 worker accumulating"),
        pytest.param(1, 32, id="1 worker"),
    ],
)
def test_noise_scale_agrees_with_a_direct_measurement(
    optimizer: Callable[[Any], torch.optim.Optimizer], workers: int, limit: int
) -> None:
    fleet = Fleet(optimizer, LIMITS)
    fleet.resize(workers)
    for _ in range(2):
        fleet.epoch()
    for mode in fleet.modes:
        mode.meter.noise.restart()
    rng = torch.Generator().manual_seed(5)
    for _ in range(600):
        for mode in fleet.modes:
            mode.agreed.micro_batch = limit
        fleet.step(torch.randint(fleet.epoch_size, (32,), generator=rng), update=False)
    measured = fleet.modes[0].meter.noise.noise_scale(32)
    assert measured == pytest.approx(_direct(fleet), rel=0.2)
    assert fleet.modes[0].meter.noise.biased == (workers == 1 and limit == 32)


@pytest.mark.parametrize(("limit", "biased", "updates"), [(16, False, 100), (32, True, 100)])
def test_a_single_worker_may_measure_one_step_of_four(limit: int, biased: bool, updates: int) -> None:
    fleet = Fleet(_sgd, LIMITS)
    agreed = AgreedBatch(LIMITS, decide_every=10_000)
    mode = AdaptiveMode(fleet.optimizer, NoiseMeter(alone_every=4), agreed)
    fleet.modes = [mode]
    rng = torch.Generator().manual_seed(5)
    for _ in range(400):
        mode.agreed.micro_batch = limit
        fleet.step(torch.randint(fleet.epoch_size, (32,), generator=rng), update=False)
    assert mode.meter.noise.updates == updates
    assert mode.meter.noise.biased == biased
    assert mode.meter.noise.noise_scale(32) == pytest.approx(_direct(fleet), rel=0.35)


@pytest.mark.parametrize("optimizer", [_sgd, _adam])
def test_more_workers_take_fewer_steps_to_the_same_score(
    optimizer: Callable[[Any], torch.optim.Optimizer],
) -> None:
    steps, scores = {}, {}
    for workers in (1, 4):
        fleet = Fleet(optimizer, LIMITS)
        fleet.resize(workers)
        while fleet.modes[0].progress < 12 * fleet.epoch_size / LIMITS.init_batch:
            fleet.epoch()
        steps[workers], scores[workers] = fleet.steps, fleet.accuracy()
    assert steps[4] < 0.6 * steps[1]
    assert scores[4] > scores[1] - 0.025
    assert scores[1] > 0.95


def test_all_workers_keep_equal_statistics_through_resizes() -> None:
    fleet = Fleet(_adam, LIMITS)
    for count in (2, 4, 3, 1, 2):
        fleet.resize(count)
        fleet.epoch()
        states = [mode.state_dict() for mode in fleet.modes]
        assert all(state == states[0] for state in states)
    assert fleet.modes[0].meter.noise.ready
    assert fleet.modes[0].progress > 0


def test_a_saved_state_has_the_form_that_checkpoints_have() -> None:
    fleet = Fleet(_sgd, LIMITS)
    fleet.resize(1)
    keys = {"noise", "tuner", "batch", "micro_batch", "progress", "step", "measured"}
    assert set(fleet.modes[0].state_dict()) == keys


def test_the_learning_rate_is_scaled_for_the_step_only() -> None:
    fleet = Fleet(_sgd, LIMITS)
    fleet.resize(2)
    mode = fleet.modes[0]
    mode.factor = 3.0
    with pytest.raises(RuntimeError, match="boom"), mode.scaled_learning_rate():
        assert fleet.optimizer.param_groups[0]["lr"] == pytest.approx(0.15)
        raise RuntimeError("boom")
    assert fleet.optimizer.param_groups[0]["lr"] == 0.05


def test_adams_averages_forget_as_much_as_in_the_steps_this_one_stands_for() -> None:
    fleet = Fleet(_adam, LIMITS)
    fleet.resize(2)
    mode = fleet.modes[0]
    mode.factor, mode.worth = 2.0, 4.0
    group = fleet.optimizer.param_groups[0]
    with mode.scaled_learning_rate():
        assert group["betas"] == pytest.approx((0.9**4, 0.999**4))
        assert group["lr"] == pytest.approx(4e-3)
    assert group["betas"] == (0.9, 0.999)
    assert group["lr"] == 2e-3


def test_a_plan_from_rank_0_is_adopted_by_everybody_at_once() -> None:
    fleet = Fleet(_sgd, LIMITS)
    fleet.resize(3)
    headers = [{"plan": [17, 2]}, {}, {"plan": [1, 1]}]
    for mode in fleet.modes:
        _commit(mode, headers)
    assert {(mode.agreed.batch, mode.agreed.micro_batch) for mode in fleet.modes} == {(17 * 3 * 3, 17)}


def _commit(mode: AdaptiveMode, headers: list[dict[str, Any]]) -> None:
    count = len(headers)
    gradient = StepGradient(part_samples=[9] * count, part_squares=[1.0] * count, total_square=0.1)
    mode.commit(headers, gradient, nodes=1, epochs_done=0.0)


def test_a_resize_leaves_the_batch_alone_until_everybody_has_agreed_on_a_new_one() -> None:
    fleet = Fleet(_sgd, LIMITS)
    fleet.resize(4)
    for _ in range(4):
        fleet.epoch()
    batch = fleet.modes[0].agreed.batch
    assert batch > LIMITS.init_batch
    fleet.resize(2)
    assert {mode.agreed.batch for mode in fleet.modes} == {batch}


def test_the_short_last_batch_keeps_the_tuned_learning_rate() -> None:
    fleet = Fleet(_sgd, LIMITS)
    fleet.resize(2)
    fleet.step(torch.arange(32))
    fleet.step(torch.arange(3))
    assert fleet.modes[0].factor == 1.0


def test_what_does_not_fit_on_one_worker_is_avoided_by_all() -> None:
    fleet = Fleet(_sgd, LIMITS)
    fleet.resize(2)
    fleet.step(torch.arange(32))
    assert fleet.modes[1].agreed.out_of_memory(16) == 8
    fleet.step(torch.arange(32))
    assert len({mode.agreed.micro_batch for mode in fleet.modes}) == 1
    assert LIMITS.min_local <= fleet.modes[0].agreed.micro_batch < 16
    assert fleet.modes[1].agreed.header().get("failed") is None
    for _ in range(3):
        fleet.epoch()
    assert all(mode.agreed.micro_batch < 16 for mode in fleet.modes)
    assert fleet.modes[0].agreed.batch >= LIMITS.init_batch


def test_when_the_smallest_batch_does_not_fit_the_message_says_so() -> None:
    fleet = Fleet(_sgd, LIMITS)
    fleet.resize(1)
    with pytest.raises(OutOfMemory, match="smallest allowed"):
        fleet.modes[0].agreed.out_of_memory(4)


def test_a_scaled_loss_does_not_change_the_statistics() -> None:
    plain, scaled = Fleet(_sgd, LIMITS), Fleet(_sgd, LIMITS)
    for fleet, factor in ((plain, 1.0), (scaled, 2.0**16)):
        fleet.resize(2)
        for mode in fleet.modes:
            gradient = StepGradient(
                part_samples=[16, 16],
                part_squares=[2.0 * factor**2, 3.0 * factor**2],
                total_square=4.0 * factor**2,
                unscale=factor**-2,
            )
            mode.commit([{}, {}], gradient, nodes=1, epochs_done=0.0)
    assert scaled.modes[0].meter.noise.sqr == pytest.approx(plain.modes[0].meter.noise.sqr)
    assert scaled.modes[0].meter.noise.var == pytest.approx(plain.modes[0].meter.noise.var)


def test_reports_are_plain_numbers() -> None:
    fleet = Fleet(_sgd, LIMITS)
    fleet.resize(2)
    fleet.epoch()
    report = fleet.modes[0].report()
    assert report["noise_scale"] is None or report["noise_scale"] > 0
    assert report["batch"] >= LIMITS.init_batch
    assert all(isinstance(v, (int, float, bool, type(None))) for v in report.values())


@pytest.mark.parametrize("field", ["every", "alone_every"])
def test_bad_settings_of_the_meter_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        NoiseMeter(**{field: 0})


def test_a_bad_interval_of_decisions_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="decide_every"):
        AgreedBatch(LIMITS, decide_every=0)
