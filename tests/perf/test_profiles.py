"""Profiles: the model kind, the set that ships, and what is refused."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.domain import InputError, packed_shape
from swell.perf.efficiency import gain_at
from swell.perf.goodput import BatchLimits, fixed_plan
from swell.perf.profiles import (
    Epochs,
    Linear3D,
    MeasuredCounts,
    MeasuredPlacements,
    ModelProfile,
    ProfileSet,
    Training,
    smallest_rotation,
)
from swell.perf.throughput import ThroughputParams, iteration_s, step_times

# Interpolation of scattered measurements.


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_scattered_points_are_interpolated_as_scipy_does(seed: int) -> None:
    from scipy.interpolate import LinearNDInterpolator

    rng = np.random.default_rng(seed)
    points, values = rng.random((60, 3)) * [16, 64, 500], rng.random((60, 2))
    ours, theirs = Linear3D(points, values), LinearNDInterpolator(points, values)
    for point in rng.random((40, 3)) * [18, 70, 550]:
        expected, found = theirs(point[None])[0], ours(*point)
        if found is None:
            assert np.isnan(expected).all()
        else:
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_grid_is_exact_at_its_points_and_bounded_between() -> None:
    grid = np.array([(x, y, z) for x in (1, 2, 4) for y in (1, 4, 8) for z in (10, 20)], dtype=np.float64)
    values = np.array([[p[0] * 2 + p[1], p[2] ** 2] for p in grid])
    table = Linear3D(grid, values)
    for point, value in zip(grid, values):
        assert table(*point) == pytest.approx(value)
    between = table(3.0, 6.0, 15.0)
    assert between is not None
    assert between[0] == pytest.approx(12.0)  # linear data stay linear
    assert 100 < between[1] < 400
    assert table(5.0, 1.0, 10.0) is None
    assert table(1.0, 1.0, 9.0) is None


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


# Measured tables: exact where measured, sensible between, refused by file and line where broken.


PLACEMENTS = "placement,local_bsz,step_time,sync_time\n"
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
VALIDATION = "progress,iteration,metric,grad_sqr,grad_var\n"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A small model in Pollux's format."""
    folder = tmp_path / "apps" / "toy"
    folder.mkdir(parents=True)
    rows = [
        (p, m, 0.1 + 0.01 * m + s, s) for p, s in (("1", 0.0), ("2", 0.02), ("12", 0.2)) for m in (4, 8, 16)
    ]
    (folder / "placements.csv").write_text(
        PLACEMENTS + "".join(f"{p},{m},{t!r},{s}\n" for p, m, t, s in rows)
    )
    far = [(n, k, m, 0.4 + 0.01 * m, 0.3) for n, k in ((6, 6), (6, 12)) for m in (4, 16)]
    (folder / "scalability.csv").write_text(
        SCALABILITY + "".join(",".join(map(str, row)) + "\n" for row in far)
    )
    (folder / "validation-16.csv").write_text(VALIDATION + "100,100,0.5,1.0,4.0\n200,200,0.6,0.5,8.0\n")
    (folder / "validation-64.csv").write_text(VALIDATION + "101,30,0.5,2.0,8.0\n198,55,0.6,1.0,16.0\n")
    return folder


def test_a_placement_format_app(app: Path) -> None:
    profile = ProfileSet.load(app.parent).get("toy")
    assert isinstance(profile, MeasuredPlacements)
    limits = profile.limits
    assert (limits.init_batch, limits.max_batch, limits.min_local, limits.max_local) == (16, 64, 4, 16)
    assert profile.epochs is not None and profile.epochs.progress.tolist() == [100, 198]
    assert profile.iterations(40, 1) == pytest.approx(127.5)
    assert profile.grad_stats(40, 0) == (1.5, 6.0)
    assert profile.step_time((1,), 8) == pytest.approx((0.18, 0.0))
    assert profile.step_time((2, 1), 12) == pytest.approx((0.42, 0.2))  # rotated, and between 8 and 16
    assert ProfileSet.load(app).names == ["toy"]


def test_a_placement_beyond_all_measurements_is_modelled(app: Path) -> None:
    profile = ProfileSet.load(app).get("toy")
    step_s, sync_s = profile.step_time((8,), 8)
    assert 0.18 < step_s < 1.0 and 0 <= sync_s < step_s


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("placements.csv", "placement,local_bsz,step_time\n1,4,0.1\n", "column 'sync_time' is missing"),
        ("placements.csv", PLACEMENTS + "1,4,0.1,0.0\n10,4,0.1,0.0\n", r"placements\.csv:3: placement"),
        ("placements.csv", PLACEMENTS + "1,four,0.1,0.0\n", r"placements\.csv:2: local_bsz must be a number"),
        ("placements.csv", PLACEMENTS + "1,4,-0.1,0.0\n", r"placements\.csv:2: step_time"),
        ("placements.csv", PLACEMENTS + "1,4,0.1\n", r"placements\.csv:2: 3 fields"),
        ("placements.csv", "", "is empty"),
        ("scalability.csv", SCALABILITY, "no rows"),
        ("validation-x.csv", VALIDATION, "validation-<batch size>"),
    ],
)
def test_broken_tables_are_refused(app: Path, name: str, text: str, message: str) -> None:
    (app / name).write_text(text)
    with pytest.raises(InputError, match=message):
        ProfileSet.load(app)


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    """Two types, one model with gaps."""
    for kind, factor in (("A100", 3.0), ("T4", 1.0)):
        folder = tmp_path / f"throughputs_{kind}"
        folder.mkdir()
        (folder / "toy.csv").write_text(
            f"global_batch_size,1,2,4,8\n64,{factor},{2 * factor},{3 * factor},{2.5 * factor}\n"
            f"128,,{factor},nan,{factor}\n256,{factor},{factor},0\n"
        )
    (tmp_path / "throughputs_T4" / "only.csv").write_text("global_batch_size,1,2\n8,1,2\n")
    return tmp_path


def test_counts_are_exact_where_measured_and_linear_between(counts: Path) -> None:
    profiles = ProfileSet.load(counts)
    assert profiles.names == ["only", "toy"]
    toy = profiles.get("toy")
    assert isinstance(toy, MeasuredCounts) and not toy.trains and toy.epochs is None
    assert toy.gpu_types == ("A100", "T4")
    assert toy.curve(64, 10, 4, "T4").tolist() == [0, 1, 2, 2.5, 3, 2.875, 2.75, 2.625, 2.5, 2.5, 2.5]
    assert toy.rate((4, 4), 64, "A100") == 7.5
    assert toy.rate((1,), 64) == 3.0
    # Empty, nan and 0 cannot run, nor can what lies beside them.
    assert toy.curve(128, 9, 4, "T4").tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 1, 1]
    assert toy.curve(256, 9, 4, "T4").tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert not toy.curve(65, 8, 4).any()  # a batch size that was not measured
    with pytest.raises(InputError, match="no step times"):
        toy.step_time((1,), 64)
    with pytest.raises(InputError, match="not for how many epochs"):
        toy.iterations(64, -1)


def test_one_type_alone_can_be_loaded(counts: Path) -> None:
    assert ProfileSet.load(counts / "throughputs_T4").get("toy").gpu_types == ("T4",)
    assert ProfileSet.load(counts / "throughputs_T4" / "toy.csv").get("toy").rate((1,), 64) == 1.0
    (counts / "throughputs_T4" / "toy.csv").write_text("global_batch_size,4,2\n64,1,1\n")
    with pytest.raises(InputError, match="must ascend"):
        ProfileSet.load(counts)


@pytest.mark.data
def test_published_placements_are_exact_where_measured(data: Path) -> None:
    profiles = ProfileSet.load(data / "pollux" / "profiles")
    assert profiles.names == ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"]
    for profile in profiles:
        with (data / "pollux" / "profiles" / profile.name / "placements.csv").open() as file:
            for row in list(csv.DictReader(file))[::7]:
                shape = tuple(map(int, row["placement"]))
                step_s, sync_s = profile.step_time(shape, int(row["local_bsz"]))
                assert (step_s, sync_s) == (float(row["step_time"]), float(row["sync_time"]))
        with (data / "pollux" / "profiles" / profile.name / "scalability.csv").open() as file:
            for row in list(csv.DictReader(file))[::7]:
                nodes, gpus = int(row["num_nodes"]), int(row["num_replicas"])
                shape = tuple(gpus // nodes + (i < gpus % nodes) for i in range(nodes))
                step_s, sync_s = profile.step_time(shape, int(row["local_bsz"]))
                assert step_s == pytest.approx(float(row["step_time"]), rel=1e-6)
                assert sync_s == pytest.approx(float(row["sync_time"]), rel=1e-6)


@pytest.mark.data
def test_conventions_of_the_published_simulations(data: Path) -> None:
    profiles = ProfileSet.load(data / "pollux" / "profiles")
    expected = {
        "bert": (12, 384, 4, 12, 2),
        "cifar10": (128, 4096, 32, 1024, 100),
        "deepspeech2": (20, 640, 10, 80, 80),
        "imagenet": (200, 12800, 20, 200, 90),
        "ncf": (256, 32768, 32, 32768, 10),
        "yolov3": (8, 512, 4, 8, 50),
    }
    for profile in profiles:
        lim, epochs = profile.limits, profile.epochs
        assert epochs is not None
        found = (lim.init_batch, lim.max_batch, lim.min_local, lim.max_local, len(epochs))
        assert found == expected[profile.name]
    assert (profiles.get("ncf").max_gpus, profiles.get("ncf").pinned_batch) == (1, 32768)


@pytest.mark.data
def test_two_published_formats_agree_on_the_same_measurements(data: Path) -> None:
    # ElasticFlow's T4 tables were made from Pollux's placements: two readers, one truth.
    placements = ProfileSet.load(data / "pollux" / "profiles")
    counts = ProfileSet.load(data / "elasticflow")
    for name, batch in (("bert", 384), ("cifar10", 2048), ("imagenet", 3200), ("deepspeech2", 640)):
        theirs = counts.get(name).curve(batch, 64, 4, "T4")
        ours = placements.get(name).curve(batch, 64, 4)
        for k in (2, 4, 8, 16, 32, 64):
            assert ours[k] == pytest.approx(theirs[k], rel=1e-6)


@pytest.mark.data
def test_the_throughput_model_explains_the_published_times(data: Path) -> None:
    from swell.perf.throughput import fit_throughput

    for profile in ProfileSet.load(data / "pollux" / "profiles"):
        assert isinstance(profile, MeasuredPlacements)
        nodes, gpus, local, step_s, sync_s = profile.table.T
        model = fit_throughput(nodes, gpus, local, step_s - sync_s, step_s)
        errors = np.log(step_times(model, nodes, gpus, local)[1] / step_s)
        assert np.sqrt(np.mean(errors**2)) < 0.25


@pytest.mark.data
def test_loading_takes_a_fraction_of_a_second(data: Path) -> None:
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        ProfileSet.load(data / "pollux" / "profiles")
        best = min(best, time.process_time() - start)
    assert best < 0.3


@pytest.mark.data
def test_shipped_profiles_stay_close_to_what_they_were_fitted_to(data: Path) -> None:
    shipped = ProfileSet.load()
    for measured in ProfileSet.load(data / "pollux" / "profiles"):
        model = shipped.get(measured.name)
        batch = min(16 * measured.limits.init_batch, measured.limits.max_batch)
        ratio = (
            model.curve(batch, 32, 4, "T4")[[1, 2, 4, 8, 16]] / measured.curve(batch, 32, 4)[[1, 2, 4, 8, 16]]
        )
        assert np.all((ratio > 0.6) & (ratio < 1.6)), (measured.name, ratio)
        assert model.iterations(batch, -1) == pytest.approx(measured.iterations(batch, -1), rel=0.3)
