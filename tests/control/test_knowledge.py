"""What is believed of a job after its reports, and what the next job of its kind starts with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.virtual import VirtualPlatform, make_trace

from swell.control.book import fingerprints
from swell.control.knowledge import HISTORY_VERSION, RETRY_S, Knowledge
from swell.domain import JobRequest, JobSpec
from swell.perf.goodput import BatchLimits, best_goodput
from swell.perf.throughput import ThroughputParams, iteration_s, step_times
from swell.train.reporting import StepTimes, timing

TRUE = ThroughputParams(0.02, 0.001, 0.1, 0.004, 0.01, 0.001, 1.6)
LIMITS = BatchLimits(64, 2048, 1, 256)
CONFIGURATIONS = [(1, 32, 0), (1, 64, 0), (1, 64, 1), (2, 32, 0), (2, 128, 0), (4, 64, 1)]
"""Workers, local batch and accumulation that a job was seen in."""


def _timing(
    workers: int, local_batch: int, accumulation: int, mode: str = "adaptive", limits: BatchLimits = LIMITS
) -> dict[str, Any]:
    """A timing report of a job that runs as `TRUE` says."""
    grad_s, shared_s = step_times(TRUE, 1, workers, local_batch)
    step_s = iteration_s(TRUE, 1, workers, local_batch, accumulation)
    return {
        "workers": workers,
        "nodes": 1,
        "local_batch": local_batch,
        "accumulation": accumulation,
        "step_s": float(step_s),
        "sync_s": float(shared_s - grad_s),
        "mode": mode,
        "limits": limits.as_dict(),
    }


def _told(knowledge: Knowledge, reports: Iterable[Mapping[str, Any]]) -> Knowledge:
    for report in reports:
        for _ in range(3):
            knowledge.take("timing", 0.0, report)
    return knowledge


def _adaptive(sqr: float = 1.0, var: float = 6.0) -> Knowledge:
    knowledge = _told(Knowledge("kind"), [_timing(*one) for one in CONFIGURATIONS])
    knowledge.take("noise", 0.0, {"sqr": sqr, "var": var})
    return knowledge


def test_what_a_model_was_fitted_on_is_told_as_the_goodput_it_makes() -> None:
    limits = BatchLimits(64, 64, 1, 64)
    seen = [(1, 64, 0), (1, 32, 1), (2, 32, 0), (4, 16, 0)]
    fixed = _told(Knowledge("kind"), [_timing(*one, mode="fixed", limits=limits) for one in seen])
    assert fixed.speed.belief is not None
    points = {(one["workers"], one["local_batch"]): one for one in fixed.speed.belief.measured()}
    for workers, local_batch, accumulation in seen:
        rate = 1.0 / float(iteration_s(TRUE, 1, workers, local_batch, accumulation))
        assert points[workers, local_batch]["rate"] == pytest.approx(rate, rel=1e-3)
    adaptive = _adaptive(sqr=0.5, var=9.0).speed.belief
    assert adaptive is not None
    # Each point is at most what the best batch of as many workers makes, as the curve has it.
    curve = adaptive.curve(4, 4)
    assert all(one["rate"] <= 1.02 * curve[int(one["workers"])] for one in adaptive.measured())


def test_the_curve_of_an_adaptive_job_is_the_goodput_of_what_it_reported() -> None:
    knowledge = _adaptive(sqr=0.5, var=9.0)
    assert knowledge.speed.belief is not None and knowledge.speed.belief.params is not None
    gpus = np.arange(9)
    nodes = -(-gpus // 4)
    expected = best_goodput(knowledge.speed.belief.params, 0.5, 9.0, LIMITS, nodes, gpus)[0]
    assert knowledge.speed.curve(8, 4) == pytest.approx(expected)
    # The model itself is what was reported: gradients of one micro-batch, not whole accumulated steps.
    truth = best_goodput(TRUE, 0.5, 9.0, LIMITS, 1, np.arange(1, 5))[0]
    assert knowledge.speed.curve(4, 4)[1:] == pytest.approx(truth, rel=0.05)


def test_noise_makes_a_larger_share_worth_more() -> None:
    quiet, noisy = _adaptive(var=0.1).speed.curve(8, 8), _adaptive(var=50.0).speed.curve(8, 8)
    assert noisy[8] / noisy[1] > 1.5 * quiet[8] / quiet[1]


@pytest.mark.parametrize("mode", ["fixed", "consistent"])
def test_a_job_that_keeps_its_batch_is_planned_with_that_batch(mode: str) -> None:
    limits = BatchLimits(256, 256, 1, 64)
    reports = [
        _timing(1, 64, 3, mode, limits),
        _timing(2, 64, 1, mode, limits),
        _timing(4, 64, 0, mode, limits),
    ]
    knowledge = _told(Knowledge("kind"), reports)
    assert knowledge.speed.belief is not None and knowledge.speed.belief.fixed_batch == 256
    steps_per_s = [1 / float(iteration_s(TRUE, 1, k, 64, 4 // k - 1)) for k in (1, 2, 4)]
    assert knowledge.speed.curve(4, 4)[[1, 2, 4]] == pytest.approx(steps_per_s, rel=0.05)


def test_a_mode_that_becomes_known_late_switches_the_belief_over() -> None:
    old = {"params": TRUE.as_array().tolist(), "of": 900.0, "batch_size": 64, "most_gpus": 4}
    knowledge = Knowledge.from_history("kind", old)
    assert knowledge.known and knowledge.mode == "fixed"
    pinned = knowledge.speed.curve(4, 4)
    assert knowledge.take("timing", 0.0, _timing(2, 32, 0)), "other batches call for another decision"
    assert knowledge.mode == "adaptive" and not knowledge.known, "its noise is not known yet"
    assert knowledge.take("noise", 0.0, {"sqr": 1.0, "var": 30.0})
    assert knowledge.known
    expected = best_goodput(TRUE, 1.0, 30.0, LIMITS, 1, np.arange(5))[0]
    assert knowledge.speed.curve(4, 4) == pytest.approx(expected)
    assert knowledge.speed.curve(4, 4)[4] > 1.5 * pinned[4]


def test_a_narrower_limit_that_is_reported_later_is_planned_with() -> None:
    knowledge = _adaptive(var=50.0)
    tight = BatchLimits(64, 64, 1, 32)
    before = knowledge.speed.curve(4, 4)
    knowledge.take("timing", 0.0, _timing(2, 32, 0, limits=tight))
    assert knowledge.speed.belief is not None and knowledge.speed.belief.limits == tight
    assert knowledge.speed.curve(4, 4)[4] < before[4]


@pytest.mark.parametrize("limits", [None, {}, {"init_batch": 8}, LIMITS.as_dict() | {"max_batch": 1}, "all"])
def test_limits_that_make_no_sense_are_not_believed(limits: Any) -> None:
    knowledge = _told(Knowledge("kind"), [_timing(2, 32, 0, "fixed") | {"limits": limits}])
    assert knowledge.speed.belief is not None and knowledge.speed.belief.limits == BatchLimits(64, 64, 1, 64)


def test_history_of_an_adaptive_job_gives_the_same_curve_and_length() -> None:
    knowledge = _adaptive()
    for done in range(0, 1001, 100):
        knowledge.take("progress", float(done), {"done": done, "of": 1000.0})
        knowledge.take("noise", float(done), {"sqr": 2.0, "var": 12.0})
    knowledge.finished(1001.0)
    again = Knowledge.from_history("kind", json.loads(json.dumps(knowledge.to_json())))
    assert again.known and again.length.of == 1000.0
    assert again.mode == "adaptive" and again.source == "history"
    assert again.speed.belief is not None and again.speed.belief.limits == LIMITS
    assert again.speed.curve(4, 4) == pytest.approx(knowledge.speed.curve(4, 4), rel=1e-6)
    assert again.speed.belief.max_gpus(64) == 64, "a known job need not creep up"


def test_history_remembers_the_noise_of_the_whole_run_not_of_its_end() -> None:
    knowledge = _adaptive()
    shares = np.linspace(0.2, 0.9, 101)
    for done, share in enumerate(shares):
        knowledge.take("progress", float(done), {"done": float(done), "of": 100.0})
        knowledge.take("noise", float(done), {"sqr": 1.0 - share, "var": share})
    kept = knowledge.to_json()
    assert kept["version"] == HISTORY_VERSION
    assert kept["var"] == pytest.approx(shares[1:].mean())
    assert kept["noise_deviation"] == pytest.approx(shares[1:].std(), rel=1e-3)
    # At any one batch the iterations of the run follow from the mean share alone.
    scale = 8.0
    iterations = np.sum(1.0 - shares[1:] * (1.0 - 1.0 / scale))
    assert 100.0 * (1.0 - kept["var"] * (1.0 - 1.0 / scale)) == pytest.approx(iterations)


def test_a_few_steps_do_not_outweigh_what_history_says_of_the_noise() -> None:
    knowledge = Knowledge.from_history("kind", _adaptive(var=6.0).to_json())
    before = knowledge.speed.curve(4, 4)
    knowledge.take("noise", 0.0, {"sqr": 1.0, "var": 0.1, "updates": 3})
    assert knowledge.speed.curve(4, 4) is before
    knowledge.take("noise", 0.0, {"sqr": 1.0, "var": 0.1, "updates": 30})
    assert knowledge.speed.curve(4, 4)[4] < before[4]
    first = _told(Knowledge("kind"), [_timing(2, 32, 0)])
    first.take("noise", 0.0, {"sqr": 1.0, "var": 6.0, "updates": 3})
    assert first.speed.belief is not None and first.speed.belief.var == 6.0, "better than nothing"
    first.take("noise", 0.0, {"sqr": 1.0, "var": 8.0, "updates": 4})
    assert first.speed.belief.var == 8.0, "and the next ones are better still"


def test_an_entry_of_a_later_version_is_not_misread() -> None:
    content = _adaptive().to_json() | {"version": HISTORY_VERSION + 1}
    knowledge = Knowledge.from_history("kind", content)
    assert knowledge.speed.belief is None and knowledge.length.of is None and knowledge.source == "none"


def test_the_error_of_an_adaptive_job_includes_how_its_noise_changed() -> None:
    steady, changing = _adaptive(var=20.0), _adaptive(var=20.0)
    for done in range(50):
        for knowledge, var in ((steady, 20.0), (changing, 20.0 if done % 2 else 1.0)):
            knowledge.take("progress", float(done), {"done": float(done), "of": 100.0})
            knowledge.take("noise", float(done), {"sqr": 1.0, "var": var})
    assert steady.error(4) < changing.error(4)
    assert steady.length.left(40.0) == 60.0


def _train_until(knowledge: Knowledge, upto: int, at_most: float | None = None) -> None:
    """Reports of a job whose loss is 1 / (0.01 step + 1) + 0.1, hence 0.3 at step 400."""
    rng = np.random.default_rng(1)
    for done in range(0, upto, 2):
        loss = (1.0 / (0.01 * done + 1.0) + 0.1) * float(np.exp(rng.normal(0, 0.005)))
        data = {"done": float(done), "of": None, "at_most": at_most, "target_loss": 0.3, "loss": loss}
        knowledge.take("progress", float(done), data)


def test_the_length_of_a_job_with_a_target_is_predicted_from_its_losses() -> None:
    knowledge = _told(Knowledge("kind"), [_timing(1, 64, 0, "fixed", BatchLimits(64, 64, 1, 64))])
    assert not knowledge.known and not knowledge.length.is_predicted
    _train_until(knowledge, 200)
    assert knowledge.known and knowledge.length.is_predicted
    assert knowledge.length.of == pytest.approx(400, rel=0.15)
    speed_alone = _told(Knowledge("kind"), [_timing(1, 64, 0, "fixed", BatchLimits(64, 64, 1, 64))]).error(1)
    assert knowledge.error(1) > 1.2 * speed_alone
    _train_until(knowledge, 300)
    assert knowledge.length.of == pytest.approx(400, rel=0.08)


def test_a_prediction_does_not_exceed_the_most_a_job_trains() -> None:
    knowledge = _told(Knowledge("kind"), [_timing(1, 64, 0)])
    _train_until(knowledge, 200, at_most=250.0)
    assert knowledge.length.of == 250.0


def test_a_job_with_a_target_starts_with_how_long_the_last_one_took() -> None:
    knowledge = _told(Knowledge("kind"), [_timing(1, 64, 0, "fixed", BatchLimits(64, 64, 1, 64))])
    _train_until(knowledge, 200)
    assert knowledge.to_json()["of"] is None, "what is only predicted so far is not history"
    _train_until(knowledge, 401)
    knowledge.finished(402.0)
    assert knowledge.length.of == 400.0
    again = Knowledge.from_history("kind", json.loads(json.dumps(knowledge.to_json())))
    assert again.known and again.length.of == 400.0
    assert again.length.is_predicted, "no guarantee is given on it"
    _train_until(again, 100)
    assert again.length.of == pytest.approx(400, rel=0.2)


def test_progress_alone_works_as_it_did() -> None:
    knowledge = Knowledge("kind")
    knowledge.length.of = 30.0
    assert not knowledge.length.progressed(1.0, 3.0)
    assert knowledge.length.of == 30.0 and knowledge.length.left(3.0) == 27.0


def test_any_command_is_known_by_the_file_that_it_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("one")

    def kind(*args: str) -> str:
        return fingerprints(
            JobRequest(name="a", script="/bin/sh", args=args, workdir=str(tmp_path), command=True)
        )[0]

    first = kind("train.py", "--lr", "1")
    assert kind("train.py", "--lr", "1") == first
    assert kind("train.py", "--lr", "2") != first
    (tmp_path / "train.py").write_text("two")
    assert kind("train.py", "--lr", "1") != first


def test_kin_is_the_same_script_with_other_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("one")

    def marks(*args: str, **more: Any) -> tuple[str, str]:
        return fingerprints(JobRequest(name="a", script="train.py", args=args, workdir=str(tmp_path), **more))

    first, kin = marks("--lr", "1")
    assert marks("--lr", "2")[0] != first and marks("--lr", "2")[1] == kin
    assert marks("--lr", "1", auto=True)[1] != kin
    (tmp_path / "train.py").write_text("two")
    assert marks("--lr", "1")[1] != kin


def test_a_job_without_history_of_its_own_is_estimated_from_its_kin_until_it_is_longer() -> None:
    limits = BatchLimits(64, 64, 1, 64)
    reports = [_timing(workers, 64 // workers, 0, mode="fixed", limits=limits) for workers in (1, 2)]
    kin = _told(Knowledge("kin", source="kin"), reports)
    kin.length.of, kin.source = 100.0, "kin"
    job = Knowledge("kind", kin=kin)
    assert not job.known and job.basis(0.0) is kin
    _told(job, reports)
    basis = job.basis(40.0)
    assert not job.known, "no guarantee is made from kin"
    assert basis is not None and basis.speed.belief is job.speed.belief, "its own speed"
    assert (basis.length.of, basis.source, basis.length.left(40.0)) == (100.0, "kin", 60.0)
    assert job.basis(100.0) is None, "it trains longer than its kin did"
    job.length.of = 300.0
    assert job.basis(200.0) is job


def _slow_start(
    knowledge: Knowledge, workers: int, steps: int, *, slow: int = 4, step_s: float = 0.16
) -> None:
    """The reports of a job whose first steps take ten times as long as those that follow."""
    pace, since_s = StepTimes(), 0.0
    for number in range(steps + 1):
        took_s = 10 * step_s if number <= slow else step_s
        since_s += took_s
        if pace.add((workers,), took_s, took_s * 0.6) and since_s > 0.3:
            since_s = 0.0
            report = timing(pace, 64, None, workers, 1) | {"mode": "fixed"}
            knowledge.take("timing", 100.0 + number, report)


def test_a_job_of_a_few_seconds_teaches_no_speed_and_a_longer_one_that_of_its_steady_steps() -> None:
    brief, longer = Knowledge("kind"), Knowledge("kind")
    _slow_start(brief, 2, 7)
    brief.finished(110.0)
    assert not brief.speed.known and not brief.speed.trials.measured
    _slow_start(longer, 2, 60)
    assert longer.speed.known and longer.speed.trials.measured.keys() == {2}
    assert 1.0 / longer.speed.curve(2, 2)[2] == pytest.approx(0.16, rel=0.4)


def _taught(workers: int, rates: dict[int, float]) -> Knowledge:
    """What the next job of a kind starts with whose belief is this, and that ran with `workers`."""
    knowledge = Knowledge("kind")
    for count, rate in rates.items():
        step_s = 1.0 / rate
        for _ in range(3):
            grad_s = 0.5 * step_s if count > 1 else step_s
            report = {
                "workers": count,
                "local_batch": 64 // count,
                "step_s": step_s,
                "sync_s": step_s - grad_s,
            }
            knowledge.take("timing", 0.0, report)
    content = json.loads(json.dumps(knowledge.to_json()))
    content["tried"] = {str(workers): 0.0}
    return Knowledge.from_history("kind", content)


@settings(max_examples=60)
@given(
    true=st.tuples(*[st.floats(1.0, 20.0)] * 4),
    believed=st.tuples(*[st.floats(1.0, 20.0)] * 4),
    began=st.sampled_from([1, 2, 4]),
)
def test_no_belief_keeps_a_job_for_ever_from_what_it_has_not_tried(
    true: tuple[float, ...], believed: tuple[float, ...], began: int
) -> None:
    sizes, most = (1, 2, 4, 8), 8
    truth, knowledge = dict(zip(sizes, true)), _taught(began, dict(zip(sizes, believed)))
    trials, held, resizes, now_s = knowledge.speed.trials, began, 0, 10_000.0
    for _ in range(3000):  # five hours; the cluster is idle, and the policy gives what looks fastest
        now_s += 6.0
        step_s = 1.0 / truth[held]
        report = {"workers": held, "local_batch": 64 // held, "step_s": step_s, "sync_s": step_s * 0.3}
        knowledge.take("timing", now_s, report | {"steps": 50})
        if not trials.workers and trials.due(now_s):
            trials.begin(knowledge.speed.curve(most, most), held, min(2 * held, most), now_s)
        trials.under_way(held, now_s)
        curve = trials.hopeful(knowledge.speed.curve(most, most))
        best = max(sizes, key=lambda size: (float(curve[size]), -size))
        resizes += best != held
        held = best
    shown = knowledge.speed.curve(most, most)
    if held < most and int(np.argmax(shown[: 2 * held + 1])) <= held:
        assert now_s - trials.measured.get(2 * held, 0.0) < RETRY_S + 1000.0, "nobody ever tried more"
    assert resizes < 60, "it tries now and then, not all the time"


def test_a_wrong_belief_that_two_workers_are_slower_is_found_out_and_is_not_tried_again_at_once() -> None:
    knowledge = _taught(1, {1: 11.9, 2: 6.13})
    trials = knowledge.speed.trials
    for at_s in (1.0, 2.0, 3.0, 4.0):
        report = {"workers": 1, "local_batch": 64, "step_s": 0.084, "sync_s": 0.0, "steps": 40}
        knowledge.take("timing", at_s, report)
    assert trials.due(5.0) and trials.begin(knowledge.speed.curve(2, 2), 1, 2, 5.0)
    shown, believed = trials.hopeful(knowledge.speed.curve(2, 2)), knowledge.speed.curve(2, 2)
    assert shown[2] > shown[1] == believed[1] > believed[2], (
        "only what is tried looks better than it is believed"
    )
    for at_s in (8.0, 9.0, 10.0, 11.0, 12.0, 13.0):
        assert trials.under_way(2, at_s) == (at_s < 11.0)
        report = {"workers": 2, "local_batch": 32, "step_s": 0.05, "sync_s": 0.01, "steps": 40}
        knowledge.take("timing", at_s, report)
    assert knowledge.speed.curve(2, 2)[2] > 1.2 * knowledge.speed.curve(2, 2)[1]
    again = Knowledge.from_history("kind", json.loads(json.dumps(knowledge.to_json())))
    assert again.speed.trials.measured.keys() == {1, 2}, "the next job of the kind does not try it again"


class _Taught(VirtualPlatform):
    """A platform with `max-min` and two slots, whose jobs begin with what an earlier one taught."""

    def __init__(self, home: Path, content: Mapping[str, Any]) -> None:
        self.content = content
        super().__init__(make_trace(1, 1, "1x2", 0.0), "max-min", home, cost_s=1.0, round_s=None)

    def recall(self, request: JobRequest) -> Knowledge:
        return Knowledge.from_history("kind", self.content)


@pytest.mark.parametrize(("pair_rate", "then"), [(20.0, 2), (6.0, 1)])
def test_a_job_tries_two_workers_although_its_kind_taught_that_one_is_faster(
    tmp_path: Path, pair_rate: float, then: int
) -> None:
    wrong = json.loads(json.dumps(_taught(1, {1: 11.9, 2: 6.13}).to_json())) | {"tried": {}}
    platform = _Taught(tmp_path, wrong)
    platform.plane.come_up()
    name = platform.trace.jobs[0].job_id
    spec = JobSpec(job_id=name, submit_s=0.0, model="m", batch_size=64, work=1e6, gpus=2)
    job_id = platform.plane.jobs.submit(platform.request(spec), "ann").job_id
    had: list[int] = []
    for second in range(1, 400):
        platform.now_s = float(second)
        held = len(platform.plane.jobs.get(job_id).held)
        if held and second > 3:
            had.append(held)
            step_s = 1.0 / {1: 11.9, 2: pair_rate}[held]
            report = {"workers": held, "local_batch": 64 // held, "step_s": step_s, "sync_s": 0.2 * step_s}
            platform.engine.say(job_id, "timing", report | {"steps": 50, "nodes": 1})
        platform.plane.turn()
        platform.plane.turn()
    assert 2 in had and set(had[-50:]) == {then}
    tries = sum(before == 1 and after == 2 for before, after in pairwise(had))
    assert tries == 1, "what was measured is not tried again soon"
    assert platform.plane.jobs.explain(job_id)["tried"] == [1, 2]
