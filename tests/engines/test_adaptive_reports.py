"""What the reports of real adaptive jobs say, and what a scheduler makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swell.control.knowledge import Knowledge
from swell.engines import Launch, RunState
from swell.perf.efficiency import noise_scale
from swell.perf.goodput import BatchLimits, best_goodput
from swell.train.reporting import FEWEST_LOSSES

SCRIPT = Path(__file__).with_name("adaptive_toy.py")
LIMITS = {"init_batch": 32, "max_batch": 512, "min_local": 1, "max_local": 512}


def _reports(bench: Any, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [dict(r.data) for r in bench.reports if r.job_id == job_id and r.kind == kind]


def _knowledge(bench: Any, job_id: str) -> Knowledge:
    """What a scheduler makes of the reports so far."""
    knowledge = Knowledge(job_id)
    for report in bench.reports:
        if report.job_id == job_id:
            knowledge.take(report.kind, report.time_s, report.data)
    return knowledge


def _launch(bench: Any, job_id: str, *arguments: object) -> Launch:
    """A job that runs the adaptive toy."""
    launch: Launch = bench.launch(job_id)
    request = replace(launch.request, script=str(SCRIPT), args=tuple(map(str, arguments)))
    return replace(launch, request=request)


def _run(bench: Any, jobs: dict[str, tuple[object, ...]], enough: Callable[[str], bool]) -> None:
    """Run each job on two workers until there are enough reports of all."""
    engine = bench.engine(slots=2 * len(jobs))
    for i, (job_id, arguments) in enumerate(jobs.items()):
        engine.apply(_launch(bench, job_id, *arguments), (2 * i, 2 * i + 1))
    for job_id in jobs:
        bench.wait(engine, job_id, lambda _, job_id=job_id: enough(job_id), timeout_s=120)


def test_reports_say_what_goodput_depends_on_and_noise_is_what_the_data_says(bench: Any) -> None:
    def enough(job_id: str) -> bool:
        done = [r["done"] for r in _reports(bench, job_id, "progress")]
        several = max(done, default=0.0) >= 120 and len(_reports(bench, job_id, "noise")) >= 8
        # Step times are believed once they are steady, which on a busy machine takes a while.
        return several and _knowledge(bench, job_id).known

    _run(bench, {"clean": ("--epochs", 50), "noisy": ("--epochs", 50, "--label-noise", 20)}, enough)
    scales, shares = {}, {}
    for job_id in ("clean", "noisy"):
        timing, progress = _reports(bench, job_id, "timing"), _reports(bench, job_id, "progress")
        assert {t["mode"] for t in timing} == {"adaptive"}
        assert all(t["limits"] == LIMITS for t in timing)
        assert all(p["of"] == 50 * 8192 / 32 for p in progress)
        assert all(p["loss"] > 0 and p["target_loss"] is None for p in progress)
        noise = _reports(bench, job_id, "noise")[-1]
        scales[job_id] = noise_scale(noise["sqr"], noise["var"], 32)

        knowledge = _knowledge(bench, job_id)
        assert knowledge.known and knowledge.mode == "adaptive" and knowledge.batch_size == 32
        assert knowledge.speed.belief is not None and knowledge.speed.belief.params is not None
        limits, gpus = BatchLimits(**LIMITS), np.arange(5)
        expected = best_goodput(knowledge.speed.belief.params, noise["sqr"], noise["var"], limits, 1, gpus)[0]
        curve = knowledge.speed.curve(4, 4)
        assert curve == pytest.approx(expected)
        shares[job_id] = curve[4] / curve[1]
    assert scales["clean"] < 32 < 160 < scales["noisy"], scales
    assert shares["noisy"] > 1.15 * shares["clean"], shares


def test_jobs_that_keep_their_batch_say_so(bench: Any) -> None:
    pieces = {"fixed": 32, "consistent": 8}
    jobs = {mode: ("--mode", mode, "--step-ms", 5) for mode in pieces}
    _run(bench, jobs, lambda job_id: bool(_reports(bench, job_id, "timing")))
    for mode, piece in pieces.items():
        timing = _reports(bench, mode, "timing")[-1]
        assert timing["mode"] == mode
        assert timing["limits"] == {"init_batch": 32, "max_batch": 32, "min_local": 1, "max_local": piece}
        assert _reports(bench, mode, "progress")[-1]["of"] == 4 * 256
        assert not _reports(bench, mode, "noise")


def test_the_length_of_a_job_with_a_target_is_predicted_from_its_reports(bench: Any) -> None:
    engine = bench.engine(slots=2)
    target = ("--mode", "fixed", "--epochs", 100, "--until-loss", 1.8, "--label-noise", 1, "--lr", 0.003)
    engine.apply(_launch(bench, "a", *target, "--step-ms", 10), (0, 1))
    bench.wait(engine, "a", lambda seen: seen is not None and seen.state is RunState.FINISHED, timeout_s=120)
    knowledge, predicted = Knowledge("a"), []
    for report in bench.reports:
        knowledge.take(report.kind, report.time_s, report.data)
        if report.kind == "progress" and knowledge.length.of is not None:
            predicted.append((report.data["done"], knowledge.length.of))
    knowledge.finished(bench.reports[-1].time_s)
    assert knowledge.length.is_predicted and knowledge.known
    took = knowledge.length.of
    assert took is not None and FEWEST_LOSSES < took < 100 * 256, "it ended by its loss"
    # This loss falls faster than the model's, which therefore expects a longer job until late.
    late = [of for done, of in predicted if 0.8 * took <= done < took]
    assert late and all(0.5 * took <= of <= 3 * took for of in late), (took, predicted)
    assert knowledge.to_json()["of"] == took
