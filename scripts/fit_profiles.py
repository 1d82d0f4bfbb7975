"""Make the profiles that ship with swell: fit our models to the public measurements.

    python scripts/fit_profiles.py [--data DIR] [--out FILE]

Nothing measured is copied: what is kept of a model is seven parameters per GPU type, a handful of knots of
its gradient noise scale, and where they come from. Speed on a GPU type that a model was not measured on is
projected with the ratios of the models that were measured on both, as Sia does.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from swell.domain import FloatArray
from swell.perf.goodput import BatchLimits
from swell.perf.profiles import (
    SHIPPED,
    MeasuredCounts,
    MeasuredPlacements,
    ModelProfile,
    ProfileSet,
    Training,
    model_bytes,
)
from swell.perf.throughput import ThroughputParams, fit_throughput, step_times

KNOTS = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
A100_NODE = 8
"""GPUs per node of the A100 measurements; those on T4 had 4."""

MIN_LOCAL = {"bert": 2, "cifar10": 8, "deepspeech2": 2, "imagenet": 4, "ncf": 32, "yolov3": 2}
"""Smaller local batches than were measured: they run, if badly, and a curve should fall rather than end."""

FROM_T4 = "Pollux artifact (OSDI'21), T4, placements and scalability tables"
FROM_A100 = "ElasticFlow artifact (ASPLOS'23), A100, rates by global batch and GPU count"


@dataclass(frozen=True)
class Fit:
    """A fitted throughput model and how well it explains the measurements."""

    params: ThroughputParams
    error: float
    """Root mean squared relative error of the step times."""


def fit_t4(profile: MeasuredPlacements) -> Fit:
    """Fit the table of one of Pollux's models, within the batch sizes it may use."""
    nodes, gpus, local, step_s, sync_s = profile.table.T
    fits = local <= profile.limits.max_local
    nodes, gpus, local, step_s, sync_s = (c[fits] for c in (nodes, gpus, local, step_s, sync_s))
    params = fit_throughput(nodes, gpus, local, step_s - sync_s, step_s)
    return Fit(params, _error(params, nodes, gpus, local, step_s))


def fit_a100(profile: MeasuredCounts) -> Fit:
    """Fit the rates of one of ElasticFlow's models; only on one GPU is the gradient's own time known."""
    rows = [
        (-(-k // A100_NODE), k, batch / k, 1.0 / rate)
        for batch in profile.batches
        for k in (1, 2, 4, 8, 16, 32, 64)
        if (rate := profile.rate((k,), batch, "A100")) > 0
    ]
    nodes, gpus, local, step_s = np.array(rows).T
    params = fit_throughput(nodes, gpus, local, np.where(gpus == 1, step_s, np.nan), step_s)
    return Fit(params, _error(params, nodes, gpus, local, step_s))


def _error(
    params: ThroughputParams, nodes: FloatArray, gpus: FloatArray, local: FloatArray, step_s: FloatArray
) -> float:
    residual = np.log(step_times(params, nodes, gpus, local)[1] / step_s)
    return float(np.sqrt(np.mean(residual**2)))


def fit_noise(profile: MeasuredPlacements) -> Training:
    """Knots of the noise scale over the training, and how it grows with the batch, by least squares."""
    epochs, limits = profile.epochs, profile.limits
    assert epochs is not None
    rows, targets = [], []
    for batch in epochs.batches:
        for epoch in range(len(epochs)):
            sqr, var = epochs.grad_stats(batch, epoch)
            if sqr > 0 and var > 0:
                hat = [np.interp((epoch + 0.5) / len(epochs), KNOTS, unit) for unit in np.eye(len(KNOTS))]
                rows.append([*hat, np.log(batch / limits.init_batch)])
                targets.append(np.log(var / sqr * limits.init_batch))
    # A little ridge on the second difference: two epochs alone do not say much about six knots.
    bend = np.zeros((len(KNOTS) - 2, len(KNOTS) + 1))
    for i in range(len(bend)):
        bend[i, i : i + 3] = 0.3, -0.6, 0.3
    found = np.linalg.lstsq(
        np.vstack([rows, bend]), np.concatenate([targets, np.zeros(len(bend))]), rcond=None
    )[0]
    knots = tuple((float(share), _round(np.exp(value))) for share, value in zip(KNOTS, found))
    return Training(
        len(epochs),
        _round(epochs.progress[-1] / len(epochs)),
        knots,
        round(float(np.clip(found[-1], 0, 1)), 3),
    )


def project(params: ThroughputParams, ratios: ThroughputParams, forward: bool) -> ThroughputParams:
    """The model on the other GPU type, from the ratios of models measured on both."""
    sign = 1.0 if forward else -1.0
    changed = {
        name: value * asdict(ratios)[name] ** sign
        for name, value in asdict(params).items()
        if name != "gamma"
    }
    return replace(params, **changed)


def ratios_of(pairs: list[tuple[ThroughputParams, ThroughputParams]]) -> ThroughputParams:
    """A100 over T4, geometric mean over models: one ratio for computing, one per kind of link."""

    def mean(of: tuple[str, ...]) -> float:
        logs = [np.log(getattr(a100, f) / getattr(t4, f)) for t4, a100 in pairs for f in of]
        return float(np.exp(np.mean(logs)))

    # The constant of computing is launch and input overhead of the host as much as of the GPU.
    compute, node, local = mean(("beta_c",)), mean(("alpha_n",)), mean(("alpha_r",))
    return ThroughputParams(compute, compute, node, node, local, local, 1.0)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(params: ThroughputParams) -> ThroughputParams:
    return ThroughputParams(*(_round(v) for v in asdict(params).values()))


def build(data: Path) -> ProfileSet:
    """All shipped profiles."""
    t4_set, a100_set = ProfileSet.load(data / "pollux" / "profiles"), ProfileSet.load(data / "elasticflow")
    t4: dict[str, Fit] = {}
    training: dict[str, Training] = {}
    limits: dict[str, BatchLimits] = {}
    for profile in t4_set:
        assert isinstance(profile, MeasuredPlacements)
        t4[profile.name], training[profile.name] = fit_t4(profile), fit_noise(profile)
        limits[profile.name] = replace(profile.limits, min_local=MIN_LOCAL[profile.name])
    a100 = {
        profile.name: fit_a100(profile)
        for profile in a100_set
        if isinstance(profile, MeasuredCounts) and "A100" in profile.gpu_types
    }
    ratios = ratios_of(
        [
            (t4["imagenet"].params, a100["resnet50"].params),
            (t4["deepspeech2"].params, a100["deepspeech2"].params),
        ]
    )
    print("A100 over T4, in time:", {k: round(v, 3) for k, v in asdict(ratios).items()})

    profiles: list[ModelProfile] = []

    def ship(
        name: str,
        *,
        on_t4: Fit | None,
        on_a100: Fit | None,
        limits: BatchLimits,
        training: Training,
        like: str,
        aliases: tuple[str, ...] = (),
        note: str = "",
    ) -> None:
        parts = []
        for kind, fitted, source in (("T4", on_t4, FROM_T4), ("A100", on_a100, FROM_A100)):
            parts.append(f"{source}, fitted to {fitted.error:.1%}" if fitted else f"{kind} projected")
        here = on_t4 or on_a100
        assert here is not None
        throughput = {
            "A100": _rounded(on_a100.params if on_a100 else project(here.params, ratios, forward=True)),
            "T4": _rounded(on_t4.params if on_t4 else project(here.params, ratios, forward=False)),
        }
        source = "; ".join([*parts, note] if note else parts)
        print(f"{name:18s} {source}")
        profiles.append(
            ModelProfile(
                name, throughput, limits, model_bytes(like), training, aliases=aliases, source=source
            )
        )

    for name in ("bert", "cifar10", "ncf", "yolov3"):
        ship(name, on_t4=t4[name], on_a100=None, limits=limits[name], training=training[name], like=name)
    ship(
        "deepspeech2",
        on_t4=t4["deepspeech2"],
        on_a100=a100["deepspeech2"],
        limits=limits["deepspeech2"],
        training=training["deepspeech2"],
        like="deepspeech2",
    )
    resnet = training["imagenet"]
    ship(
        "resnet50",
        on_t4=t4["imagenet"],
        on_a100=a100["resnet50"],
        limits=limits["imagenet"],
        training=resnet,
        like="resnet50",
        aliases=("imagenet",),
    )
    # Of the others only speed was measured. The length of a run and its noise are borrowed and said to be.
    imagenet_images = 1_281_167
    for name in ("inception3", "vgg16"):
        ship(
            name,
            on_t4=None,
            on_a100=a100[name],
            limits=BatchLimits(64, 4096, 2, 128 if name == "inception3" else 256),
            training=replace(resnet, iterations_per_epoch=_round(imagenet_images / 64)),
            like=name,
            note="epochs and noise of resnet50",
        )
    ship(
        "resnet50_cifar10",
        on_t4=None,
        on_a100=a100["resnet50_cifar10"],
        limits=BatchLimits(64, 2048, 4, 256),
        training=replace(training["cifar10"], iterations_per_epoch=_round(50_000 / 64)),
        like="resnet50_cifar10",
        note="epochs and noise of cifar10",
    )
    ship(
        "bert_short",
        on_t4=None,
        on_a100=a100["bert"],
        limits=BatchLimits(64, 2048, 2, 128),
        training=replace(training["bert"], epochs=3, iterations_per_epoch=_round(393_000 / 64)),
        like="bert",
        note="short sequences; three epochs over 393 thousand pairs, noise of bert",
    )
    ship(
        "gpt2",
        on_t4=None,
        on_a100=a100["gpt2"],
        limits=BatchLimits(128, 4096, 2, 256),
        training=Training(20, 900.0, ((0.0, 200.0), (0.1, 600.0), (0.5, 2000.0), (1.0, 4000.0)), 0.2),
        like="gpt2",
        note="epochs and noise assumed",
    )
    return ProfileSet(sorted(profiles, key=lambda p: p.name), "fitted")


def main() -> None:
    """Fit and write."""
    default = os.environ.get("SWELL_DATA", str(Path(__file__).parents[2] / "shared" / "data"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=Path(default), help="directory with pollux/ and elasticflow/"
    )
    parser.add_argument("--out", type=Path, default=SHIPPED, help="file to write")
    options = parser.parse_args()
    build(options.data).save(options.out)


if __name__ == "__main__":
    main()
