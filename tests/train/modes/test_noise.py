"""The online noise scale against gradients whose signal and noise are known."""

import math
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.train.modes.noise import (
    AdamPreconditioner,
    GradientMemory,
    NoiseScale,
    direct_noise_scale,
    gain,
    squared_norm,
)

DIM = 2000
SIGNAL = 4.0  # |G|^2
NOISE = 512.0  # summed variance of one sample's gradient


def _gradient(batch: int, rng: torch.Generator) -> torch.Tensor:
    true = torch.full((DIM,), math.sqrt(SIGNAL / DIM))
    return true + torch.randn(DIM, generator=rng) * math.sqrt(NOISE / batch / DIM)


def _simulate(sizes: list[list[int]], initial: int, steps: int, seed: int = 0) -> NoiseScale:
    """Steps whose workers see micro-batches of the given sizes."""
    rng = torch.Generator().manual_seed(seed)
    noise = NoiseScale()
    total = sum(sum(worker) for worker in sizes)
    firsts = sum(worker[0] for worker in sizes)
    for _ in range(steps):
        whole = torch.zeros(DIM)
        parts_sqr = 0.0
        for worker in sizes:
            for i, size in enumerate(worker):
                g = _gradient(size, rng)
                whole += g * (size / total)
                if i == 0:
                    parts_sqr += float(squared_norm(g)) * size / firsts
        noise.update(parts_sqr, float(squared_norm(whole)), total * len(sizes) / firsts, total / initial)
    return noise


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([[32], [32]], id="two workers"),
        pytest.param([[32]] * 4, id="four workers"),
        pytest.param([[32, 32]], id="one worker accumulating"),
        pytest.param([[16, 16, 16]] * 2, id="two workers accumulating"),
        pytest.param([[48], [16], [7]], id="uneven workers"),
        pytest.param([[40, 8], [24, 24]], id="uneven accumulation"),
    ],
)
@pytest.mark.parametrize("initial", [32, 128])
def test_estimate_finds_signal_noise_and_scale(sizes: list[list[int]], initial: int) -> None:
    noise = _simulate(sizes, initial, steps=600)
    assert noise.sqr == pytest.approx(SIGNAL, rel=0.1)
    assert noise.var == pytest.approx(NOISE / initial, rel=0.1)
    assert noise.noise_scale(initial) == pytest.approx(NOISE / SIGNAL, rel=0.15)
    assert not noise.biased


def test_disjoint_parts_of_a_small_data_set_are_corrected_for() -> None:
    """Per-sample gradients of 200 samples, used in disjoint batches: the noise scale is that of the 200."""
    rng = torch.Generator().manual_seed(2)
    samples = torch.stack([_gradient(1, rng) for _ in range(200)])
    mean = samples.mean(0)
    truth = float((samples - mean).square().sum() / 199) / float(mean.square().sum())
    corrected, plain = NoiseScale(epoch_scale=200 / 20), NoiseScale()
    for _ in range(600):
        batch = samples[torch.randperm(200, generator=rng)[:40]]
        parts = [batch[:20].mean(0), batch[20:].mean(0)]
        parts_sqr = sum(float(squared_norm(p)) for p in parts) / 2
        for noise in (corrected, plain):
            noise.update(parts_sqr, float(squared_norm(batch.mean(0))), 2, 2)
    assert corrected.noise_scale(20) == pytest.approx(truth, rel=0.1)
    assert plain.noise_scale(20) > 1.3 * truth


def test_one_worker_measures_by_consecutive_gradients_and_says_it_is_biased() -> None:
    rng = torch.Generator().manual_seed(1)
    noise, pairs = NoiseScale(), GradientMemory()
    assert pairs.pair([_gradient(32, rng)]) is None, "the first gradient has no partner"
    for _ in range(600):
        pair = pairs.pair([_gradient(32, rng)])
        assert pair is not None
        noise.update(pair.parts_sqr, pair.total_sqr, 2, 2 * 32 / 32, biased=True)
    assert noise.biased
    assert noise.noise_scale(32) == pytest.approx(NOISE / SIGNAL, rel=0.15)


def test_unbiased_estimates_replace_biased_ones_at_once() -> None:
    noise = NoiseScale()
    for _ in range(100):
        noise.update(1000.0, 1.0, 2, 2, biased=True)
    noise.update(6.0, 5.0, 2, 1)
    assert not noise.biased
    assert noise.updates == 1
    assert (noise.sqr, noise.var) == pytest.approx((4.0, 1.0))


def test_biased_estimates_carry_on_from_unbiased_ones() -> None:
    noise = NoiseScale()
    for _ in range(1000):
        noise.update(6.0, 5.0, 2, 1)
    noise.update(600.0, 5.0, 2, 2, biased=True)
    assert noise.biased
    assert noise.updates == 1001


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_steps_that_are_not_finite_leave_no_trace(bad: float) -> None:
    noise = NoiseScale()
    noise.update(6.0, 5.0, 2, 1)
    assert not noise.update(bad, 5.0, 2, 1)
    assert not noise.update(6.0, bad, 2, 1)
    assert (noise.sqr, noise.var, noise.skipped, noise.updates) == (4.0, 1.0, 2, 1)


def test_nan_gradient_breaks_neither_its_pair_nor_the_next() -> None:
    pairs = GradientMemory()
    good = torch.ones(8)
    pairs.pair([good])
    assert pairs.pair([torch.full((8,), math.nan)]) is None
    assert pairs.pair([good]) is None
    pair = pairs.pair([good])
    assert pair is not None
    assert (pair.parts_sqr, pair.total_sqr) == (8.0, 8.0)


def test_pair_norms_equal_those_of_the_two_gradients_and_their_mean() -> None:
    a, b = torch.randn(999), torch.randn(999)
    pairs = GradientMemory()
    pairs.pair([a])
    pair = pairs.pair([b])
    assert pair is not None
    assert pair.parts_sqr == pytest.approx(float((a.dot(a) + b.dot(b)) / 2), rel=1e-5)
    assert pair.total_sqr == pytest.approx(float(((a + b) / 2).square().sum()), rel=1e-4)


def test_splitting_a_step_in_two_gives_the_norms_of_its_parts() -> None:
    first, rest = torch.randn(777), torch.randn(777)
    share = 0.25
    memory = GradientMemory()
    assert memory.split([first], share) is None, "nothing kept"
    memory.keep([share * first])
    norms = memory.split([share * first + (1 - share) * rest], share)
    assert norms is not None
    want = share * float(first.square().sum()) + (1 - share) * float(rest.square().sum())
    assert norms.parts_sqr == pytest.approx(want, rel=1e-4)
    assert norms.total_sqr == pytest.approx(
        float((share * first + (1 - share) * rest).square().sum()), rel=1e-4
    )
    assert memory.split([rest], share) is None, "used once"


@given(
    observations=st.lists(
        st.tuples(
            st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1.01, 64), st.floats(0.1, 500), st.booleans()
        ),
        max_size=30,
    ),
    scale=st.floats(1.0, 1e4),
)
def test_gain_always_lies_between_one_and_scale(
    observations: list[tuple[float, float, float, float, bool]], scale: float
) -> None:
    noise = NoiseScale()
    for parts, total, count, at, biased in observations:
        noise.update(parts, total, count, at, biased=biased)
    assert 1.0 - 1e-9 <= noise.gain(scale) <= scale * (1 + 1e-9)
    assert noise.gain(1.0) == pytest.approx(1.0)
    assert noise.noise_scale(64) >= 0.0


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 100), st.floats(1, 100))
def test_gain_grows_with_the_batch_but_efficiency_falls(sqr: float, var: float, a: float, b: float) -> None:
    small, large = sorted((a, b))
    assert gain(sqr, var, small) <= gain(sqr, var, large) * (1 + 1e-9)
    assert gain(sqr, var, small) / small >= gain(sqr, var, large) / large * (1 - 1e-9) or sqr + var == 0.0


def test_averages_forget_by_samples_seen_not_by_steps() -> None:
    """One step at scale 8 must weigh as much as eight steps at scale 1."""
    one, eight = NoiseScale(), NoiseScale()
    for noise in (one, eight):
        noise.update(6.0, 5.0, 2, 1)
    one.update(60.0, 50.0, 2, 8)
    for _ in range(8):
        eight.update(60.0, 50.0, 2, 1)
    assert one.sqr == pytest.approx(eight.sqr)


def test_first_average_is_the_first_observation() -> None:
    noise = NoiseScale()
    assert (noise.ready, noise.gain(16.0)) == (False, 1.0)
    noise.update(6.0, 5.0, 2, 1)
    assert (noise.sqr, noise.var) == pytest.approx((4.0, 1.0))


@settings(max_examples=30)
@given(split=st.integers(0, 20))
def test_state_round_trip_goes_on_exactly(split: int) -> None:
    rng = torch.Generator().manual_seed(split)
    values = torch.rand(20, 2, generator=rng, dtype=torch.float64).tolist()
    whole, first = NoiseScale(), NoiseScale()
    for parts, total in values:
        whole.update(parts, total, 3, 2)
    for parts, total in values[:split]:
        first.update(parts, total, 3, 2)
    second = NoiseScale()
    second.load_state_dict(first.state_dict())
    for parts, total in values[split:]:
        second.update(parts, total, 3, 2)
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 1),
        ("count", math.nan),
        ("scale", 0),
        ("scale", math.inf),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    arguments = {"parts_sqr": 1.0, "total_sqr": 1.0, "count": 2, "scale": 1.0, field: value}
    with pytest.raises(ValueError, match=field):
        NoiseScale().update(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 32768, 70001])
def test_squared_norm_matches_double_precision(dtype: torch.dtype, size: int) -> None:
    flat, factor = torch.randn(size).to(dtype), torch.rand(size)
    want = float(flat.double().square().sum())
    assert float(squared_norm(flat)) == pytest.approx(want, rel=1e-4)
    want = float((flat.double() * factor.double()).square().sum())
    assert float(squared_norm(flat, factor)) == pytest.approx(want, rel=1e-4)


def test_preconditioner_is_adams_own() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 10)
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=0.0, eps=1e-3)
    value = torch.full((300,), -1.0)  # with room between the two, as aligned buffers have
    pre = AdamPreconditioner(optimizer, [(params[0], value[:200].view(10, 20)), (params[1], value[256:266])])
    assert not pre.refresh(), "no second moment before the first step"
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(64, 20)).square().sum().backward()
        optimizer.step()
    assert pre.refresh()
    weight = optimizer.state[params[0]]
    want = 1 / ((weight["exp_avg_sq"] / (1 - 0.999**5)).sqrt() + 1e-3)
    torch.testing.assert_close(value[:200], want.reshape(-1))
    assert bool((value[200:256] == -1.0).all())


def test_preconditioner_leaves_untouched_tensors_out_and_bounds_rare_rows() -> None:
    used, unused = torch.nn.Parameter(torch.ones(100)), torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([used, unused], weight_decay=0.0)
    used.grad, unused.grad = torch.ones(100), torch.zeros(5)
    used.grad[0] = 0.0  # a row not met so far
    optimizer.step()
    value = torch.empty(105)
    assert AdamPreconditioner(optimizer, [(used, value[:100]), (unused, value[100:])]).refresh()
    assert torch.count_nonzero(value[100:]) == 0
    assert 1.0 < float(value[0] / value[1]) < 40.0


def test_adam_is_recognised_and_sgd_is_not() -> None:
    p = [torch.nn.Parameter(torch.ones(1))]
    assert AdamPreconditioner.applies_to(torch.optim.AdamW(p))
    assert not AdamPreconditioner.applies_to(torch.optim.SGD(p, lr=0.1))


def test_preconditioned_noise_scale_sees_through_badly_scaled_coordinates() -> None:
    """A coordinate with huge raw gradients hides all others from SGD's norm, not from Adam's."""
    rng = torch.Generator().manual_seed(3)
    stretch = torch.ones(DIM)
    stretch[0] = 1e4
    noise = NoiseScale()
    for _ in range(400):
        parts = [_gradient(32, rng) * stretch for _ in range(2)]
        whole = (parts[0] + parts[1]) / 2
        parts_sqr = sum(float(squared_norm(p, 1 / stretch)) for p in parts) / 2
        noise.update(parts_sqr, float(squared_norm(whole, 1 / stretch)), 2, 1)
    assert noise.noise_scale(64) == pytest.approx(NOISE / SIGNAL, rel=0.15)


def test_direct_measurement_finds_the_truth_and_needs_two_gradients() -> None:
    rng = torch.Generator().manual_seed(5)
    measured = direct_noise_scale((_gradient(16, rng) for _ in range(400)), 16)
    assert measured == pytest.approx(NOISE / SIGNAL, rel=0.1)
    with pytest.raises(ValueError, match="at least 2"):
        direct_noise_scale([torch.ones(3)], 16)


def test_a_norm_costs_no_more_than_a_copy() -> None:
    """It reads the buffer once and writes nothing. By processor time, which others do not take part in."""
    flat, other = torch.randn(10_000_000), torch.empty(10_000_000)

    def took(call: Callable[[], object]) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    norm, copy = lambda: float(squared_norm(flat)), lambda: other.copy_(flat)
    times = [(took(norm), took(copy)) for _ in range(20)]  # in turns, so that neighbours disturb both alike
    assert min(ours for ours, _ in times) < 3.0 * min(theirs for _, theirs in times)
