"""What people do to jobs that run: pause, scale, drain, switch the policy, cancel, ask for a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.waiting import wait_until

from swell.control.model import JobRequest, Phase
from swell.domain import EventKind
from swell.engines.processes import processes_of

from .conftest import TOY, Platform, finished

ENGINES = ["local", pytest.param("ray", marks=pytest.mark.long)]
"""For what does not depend on the engine: on Ray only in the long form."""


@pytest.mark.slow
def test_a_life_with_pause_bounds_another_policy_and_a_drained_node(
    platform: Callable[..., Platform], tmp_path: Path
) -> None:
    here = platform(policy="afs-l", nodes="2x2")
    hurry = tmp_path / "hurry"
    job_id = here.submit("toy", "--epochs", 50, "--sample-ms", 8, "--hurry", hurry).job_id
    here.wait(job_id, lambda r: len(r.wanted) >= 2 and here.steps(job_id) > 5)

    here.plane.jobs.pause(job_id)
    here.wait(job_id, lambda r: r.phase is Phase.PAUSED and not processes_of(here.home / "jobs" / job_id))
    paused_at = here.steps(job_id)
    assert here.plane.jobs.get(job_id).wanted == ()
    here.plane.jobs.resume(job_id)
    here.wait(job_id, lambda r: here.steps(job_id) > paused_at)
    first = [line for line in here.output(job_id).splitlines() if "| step " in line][paused_at]
    assert int(first.split()[2]) == paused_at + 1, "it goes on with the step after the last"

    here.plane.jobs.scale(job_id, 1, 1)
    here.wait(job_id, lambda r: len(r.wanted) == 1)
    here.plane.set_policy("elasticflow")
    here.plane.jobs.scale(job_id, 1, None)
    here.wait(job_id, lambda r: len(r.wanted) >= 2)

    node = here.plane.nodes.states()[0].name
    here.plane.nodes.drain(node)
    here.wait(job_id, lambda r: r.wanted and min(r.wanted) >= 2)
    assert here.plane.nodes.states()[0].used == 0
    here.plane.nodes.undrain(node)

    here.restart()
    assert here.plane.policy() == "elasticflow"
    assert here.plane.jobs.get(job_id).phase is Phase.RUNNING
    hurry.touch()
    record = here.wait(job_id, finished)
    printed = [int(line.split()[2]) for line in here.output(job_id).splitlines() if "| step " in line]
    assert printed == list(range(1, 801)), "every step once, through all of that"
    assert record.restarts == 0 and record.resizes > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_deadline_of_an_unknown_script_is_decided_after_a_profiling_run(
    platform: Callable[..., Platform],
) -> None:
    here = platform()
    args = ("--epochs", "60", "--sample-ms", "2")
    easy = here.submit("easy", *args, deadline_s=time.time() + 900)
    assert easy.promise.pending and "profiled" in easy.promise.reason
    easy = here.wait(easy.job_id, lambda r: not r.promise.pending)
    assert easy.promise.guaranteed_s is not None and easy.phase is Phase.RUNNING

    # The same script is known now: its answer comes at once, and one that cannot be kept with an offer.
    hard = here.submit("hard", *args, deadline_s=time.time() + 3)
    assert hard.phase is Phase.REFUSED and not hard.promise.pending
    assert hard.promise.earliest_deadline_s is not None and hard.promise.reason
    request = JobRequest(
        name="q", script=str(TOY), args=args, deadline_s=hard.promise.earliest_deadline_s + 60
    )
    assert here.plane.jobs.quote(request, "ann").admitted

    here.plane.jobs.cancel(easy.job_id)
    here.wait(easy.job_id, lambda r: r.phase is Phase.CANCELLED)
    left = here.home / "jobs" / easy.job_id
    wait_until(lambda: not processes_of(left), 60, lambda: f"the end of {processes_of(left)}")


@pytest.mark.slow
def test_a_job_that_lost_all_its_processes_goes_on_from_its_checkpoint(
    platform: Callable[..., Platform], tmp_path: Path
) -> None:
    here = platform()
    hurry = tmp_path / "hurry"
    args = ("--epochs", 12, "--sample-ms", 2, "--hurry", hurry)
    job_id = here.submit("toy", *args, checkpoint_s=0.5, max_workers=2).job_id
    here.wait(job_id, lambda r: here.steps(job_id) > 30)
    for pid in processes_of(here.home / "jobs" / job_id):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    before = here.steps(job_id)
    hurry.touch()
    record = here.wait(job_id, finished)
    assert record.restarts == 1
    printed = [int(line.split()[2]) for line in here.output(job_id).splitlines() if "| step " in line]
    # The last lines may be lost with the process that passed them on, so it may have been a little further.
    assert 1 < printed[before] <= before + 10
    assert printed[before:] == list(range(printed[before], 193))
    assert here.loss(job_id) > 0


@pytest.mark.slow
def test_a_job_that_always_dies_is_given_up_with_a_reason(platform: Callable[..., Platform]) -> None:
    here = platform()
    job_id = here.submit("toy", "--epochs", 50, "--sample-ms", 2, max_restarts=0, max_workers=1).job_id
    here.wait(job_id, lambda r: here.steps(job_id) > 3)
    for pid in processes_of(here.home / "jobs" / job_id):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    record = here.wait(job_id, lambda r: r.phase.over)
    assert record.phase is Phase.FAILED and "died" in record.reason


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_the_second_run_of_a_script_is_quoted_from_history(platform: Callable[..., Platform]) -> None:
    here = platform()
    args = ("--epochs", 15, "--sample-ms", 2)
    first = here.submit("first", *args)
    assert first.promise.estimate.finish_s is None
    here.wait(first.job_id, finished)
    second = here.submit("second", *args)
    estimate = second.promise.estimate
    assert estimate.source == "history" and estimate.finish_s is not None
    assert estimate.earliest_s is not None and estimate.latest_s is not None
    assert estimate.earliest_s < estimate.finish_s < estimate.latest_s
    ended = here.wait(second.job_id, finished)
    assert ended.ended_s is not None
    first_step_s = next(
        e.time_s for e in here.events() if e.job_id == second.job_id and e.kind is EventKind.PROGRESS
    )
    predicted_s, trained_s = estimate.finish_s - second.submitted_s, ended.ended_s - first_step_s
    # `benchmarks.platform.quotes` measures this on a quiet machine. Here others compute too, and a start can
    # take several times as long as the last one; how long the job trains cannot.
    assert 0.5 * trained_s < predicted_s < 2.0 * trained_s + 10.0
