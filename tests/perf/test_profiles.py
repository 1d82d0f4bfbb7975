"""Profiles: the model kind, the set that ships, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.domain import InputError, packed_shape
from swell.perf.efficiency import gain_at
from swell.perf.goodput import BatchLimits, fixed_plan
from swell.perf.profiles import Epochs, ModelProfile, ProfileSet, Training, smallest_rotation
from swell.perf.throughput import ThroughputParams, iteration_s

FAST = ThroughputParams(0.02, 0.001, 0.05, 0.002, 0.01, 0.0005, 2.0)
SLOW = ThroughputParams(0.06, 0.003, 0.2, 0.01, 0.03, 0.002, 1.5)
LIMITS = BatchLimits(64, 2048, 4, 256)
TRAINING = Training(10, 500.0, ((0.0, 100.0), (0.5, 1000.0), (1.0, 4000.0)), 0.2)
PROFILE = ModelProfile("net", {"A100": FAST, "T4": SLOW}, LIMITS, 1e8, TRAINING, aliases=("other",))


def test_the_model_profile_is_its_model() -> None:
    step_s, sync_s = PROFILE.step_time((4, 2), 64, "T4")
    assert step_s == pytest.approx(float(iteration_s(SLOW, 2, 6, 64, 0)))
    assert step_s - sync_s == pytest.approx(SLOW.alpha_c + 64 * SLOW.beta_c)
    plan = fixed_plan(LIMITS, 2000, 3)
    expected = 1 / float(iteration_s(FAST, 1, 3, plan.local_batch, plan.accumulation))
    assert PROFILE.rate((3,), 2000, "A100") == pytest.approx(expected)
    assert PROFILE.rate((3,), 2000) == PROFILE.rate((3,), 2000, "a100") == PROFILE.rate((3,), 2000, "A100")


@pytest.mark.parametrize("batch_size", [64, 200, 2048])
@pytest.mark.parametrize("kind", ["A100", "T4"])
def test_a_curve_is_the_rates_on_packed_placements(batch_size: int, kind: str) -> None:
    curve = PROFILE.curve(batch_size, 80, 4, kind)
    assert len(curve) == 81 and curve[0] == 0 and not curve.flags.writeable
    rates = [PROFILE.rate(packed_shape(k, 4), batch_size, kind) for k in range(1, 81)]
    assert curve[1:] == pytest.approx(rates)
    assert PROFILE.curve(batch_size, 80, 4, kind) is curve


def test_what_cannot_run_has_rate_zero() -> None:
    assert PROFILE.rate((), 64) == 0
    assert PROFILE.rate((4,) * 5, 64) == 0  # 4 samples are the least for a GPU
    assert PROFILE.rate((1,), 4096) == 0  # above the largest batch
    assert not PROFILE.curve(4096, 8, 4).any()


def test_a_course_from_noise_counts_iterations_by_gain() -> None:
    epochs = PROFILE.epochs
    assert epochs is not None and len(epochs) == 10
    assert epochs.progress[-1] == 5000
    assert PROFILE.iterations(64, 9) == PROFILE.iterations(64, -1) == pytest.approx(5000)
    for batch in (128, 2048):
        done = 0.0
        for epoch in range(10):
            sqr, var = PROFILE.grad_stats(batch, epoch)
            done += 500 / gain_at(sqr, var, batch / 64)
            assert PROFILE.iterations(batch, epoch) == pytest.approx(done)
    assert PROFILE.iterations(2048, -1) < PROFILE.iterations(128, -1) < 5000
    sqr, var = PROFILE.grad_stats(64, 9)
    assert 1000 < var / sqr * 64 < 4000


def test_statistics_are_linear_between_batches_and_constant_outside() -> None:
    table = np.array([[1.0, 2.0], [3.0, 6.0]])
    epochs = Epochs(np.array([10.0, 20.0]), [100, 200], table * 10, table, table * 100)
    assert epochs.grad_stats(150, 1) == (4.0, 400.0)
    assert epochs.grad_stats(100, 0) == (1.0, 100.0)
    assert epochs.grad_stats(50, 0) == (1.0, 100.0)
    assert epochs.grad_stats(999, 1) == (6.0, 600.0)
    assert epochs.iterations(175, 0) == pytest.approx(25.0)
    with pytest.raises(InputError, match="progress must grow"):
        Epochs(np.array([10.0, 5.0]), [100, 200], table, table, table)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(0, 7))
def test_rotations_have_one_form(shape: list[int], by: int) -> None:
    by %= len(shape)
    turned = tuple(shape[by:] + shape[:by])
    assert smallest_rotation(turned) == smallest_rotation(tuple(shape))
    assert sorted(smallest_rotation(turned)) == sorted(shape)
    assert smallest_rotation(turned) <= turned


def test_saved_profiles_come_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    ProfileSet([PROFILE]).save(path)
    loaded = ProfileSet.load(path)
    assert loaded.names == ["net"] and loaded.gpu_types == ("A100", "T4")
    again = loaded.get("other")  # by its alias
    assert isinstance(again, ModelProfile)
    assert again.to_json() == PROFILE.to_json()
    assert again.rate((2,), 256, "T4") == PROFILE.rate((2,), 256, "T4")


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no performance profile for model 'nett'.*Did you mean 'net'\?"):
        ProfileSet([PROFILE]).get("nett")
    with pytest.raises(InputError, match="not measured on GPU type 'H100'; it has: A100, T4"):
        PROFILE.rate((1,), 64, "H100")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": {"init_batch": 64}}, "missing 3 required"),
        ({"throughput": {}}, "at least one GPU type"),
        (
            {"training": {"epochs": 0, "iterations_per_epoch": 1, "noise_scale": [[0, 1]]}},
            "at least one epoch",
        ),
        ({"training": {"epochs": 1, "iterations_per_epoch": 1, "noise_scale": [[0, -1]]}}, "positive values"),
        ({"limits": {"init_batch": 9, "max_batch": 8, "min_local": 1, "max_local": 2}}, "init_batch"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"version": 1, "profiles": [PROFILE.to_json() | change]}))
    with pytest.raises(InputError, match=message) as caught:
        ProfileSet.load(path)
    assert "bad.json" in str(caught.value)


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not exist"):
        ProfileSet.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no directories with placements\.csv"):
        ProfileSet.load(tmp_path)
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(InputError, match="is not a file of profiles"):
        ProfileSet.load(tmp_path / "text.json")
    (tmp_path / "new.json").write_text('{"version": 9, "profiles": []}')
    with pytest.raises(InputError, match="version 9"):
        ProfileSet.load(tmp_path / "new.json")


class TestShipped:
    """The profiles in the package."""

    profiles = ProfileSet.load()

    def test_there_are_small_and_large_models_on_both_types(self) -> None:
        assert len(self.profiles) >= 10
        assert {
            "bert",
            "cifar10",
            "deepspeech2",
            "gpt2",
            "imagenet",
            "ncf",
            "resnet50",
            "vgg16",
            "yolov3",
        } <= {name for name in ("imagenet", *self.profiles.names) if name in self.profiles}
        sizes = [profile.model_bytes for profile in self.profiles]
        assert max(sizes) > 20 * min(sizes)
        for profile in self.profiles:
            assert profile.gpu_types == ("A100", "T4")
            assert profile.trains and profile.epochs is not None
            assert isinstance(profile, ModelProfile) and profile.source

    def test_an_a100_is_faster_than_a_t4(self) -> None:
        for profile in self.profiles:
            batch = profile.limits.init_batch
            assert profile.rate((1,), batch, "A100") > 1.5 * profile.rate((1,), batch, "T4")

    def test_curves_rise_with_falling_gains_then_fall(self) -> None:
        fall = 0
        for profile in self.profiles:
            for kind, per_node in (("A100", 8), ("T4", 4)):
                batch = 4 * profile.limits.init_batch
                curve = profile.curve(batch, 64, per_node, kind)
                assert curve[1] > 0
                speedup = curve / curve[1]
                gpus = np.arange(65)
                assert np.all(speedup <= gpus * 1.1)  # nothing for nothing
                best = int(np.argmax(curve))
                assert speedup[2] > 1.2  # a second GPU is worth something
                running = curve[: np.max(np.flatnonzero(curve)) + 1]
                assert np.all(running[1:] > 0)
                fall += best < len(running) - 1
        assert fall > len(self.profiles)  # most have a best count within reach

    def test_a_whole_run_takes_minutes_to_weeks_on_one_gpu(self) -> None:
        hours = []
        for profile in self.profiles:
            batch = profile.limits.init_batch
            hours.append(profile.iterations(batch, -1) / profile.rate((1,), batch, "A100") / 3600)
        assert min(hours) < 1 and max(hours) > 50
        assert all(0.05 < h < 24 * 30 for h in hours)
