"""Measured tables: exact where measured, sensible between, refused by file and line where broken."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import numpy as np
import pytest

from swell.domain import InputError
from swell.perf.profiles import MeasuredCounts, MeasuredPlacements, ProfileSet
from swell.perf.throughput import step_times

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
