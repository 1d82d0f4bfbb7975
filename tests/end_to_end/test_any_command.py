"""Jobs without torch beside each other on a platform: promised, resized, paused, killed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.waiting import wait_until

from swell.control.model import JobRecord, JobRequest, Phase
from swell.domain import EventKind
from swell.engines.processes import processes_of

from .conftest import Platform, finished

ENGINES = ["local", pytest.param("ray", marks=pytest.mark.long)]
BOOSTING = Path(__file__).parents[2] / "examples" / "xgboost_digits.py"
PROGRAM = """#!/bin/sh
# Counts to $1, $SWELL_WORKERS times as fast with so many workers: rank 0 counts, the others are there.
# Once there is a file hurry-$1 in $2 it counts by tens.
while [ "$SWELL_RANK" -gt 0 ]; do
    [ -e "$SWELL_SAVE_NOW" ] && exit 75
    [ -f "$SWELL_STATE/i" ] && [ "$(cat "$SWELL_STATE/i")" = "$1" ] && exit 0
    sleep 0.2
done
i=0; [ -f "$SWELL_STATE/i" ] && i=$(cat "$SWELL_STATE/i")
echo "begins at $i with $SWELL_WORKERS"
while [ "$i" -lt "$1" ]; do
    if [ -e "$2/hurry-$1" ]; then i=$((i + 10)); [ "$i" -gt "$1" ] && i=$1
    else i=$((i + 1)); sleep "$(printf 0.%03d $((150 / SWELL_WORKERS)))"; fi
    echo $i > "$SWELL_STATE/new" && mv "$SWELL_STATE/new" "$SWELL_STATE/i"
    echo "swell: progress=$i of=$1 loss=0.$i"
    [ -e "$SWELL_SAVE_NOW" ] && exit 75
done
echo "counted to $i"
"""


def _submit(here: Platform, name: str, count: int, **options: object) -> str:
    script = here.home / "count.sh"
    if not script.exists():
        script.write_text(PROGRAM)
        script.chmod(0o755)
    request = JobRequest(
        name=name,
        script="count.sh",
        args=(str(count), str(here.home)),
        workdir=str(here.home),
        command=True,
        **options,
    )  # type: ignore[arg-type]
    return here.plane.jobs.submit(request, "ann").job_id


def _workers(record: JobRecord) -> int:
    return len(record.held)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_program_is_grown_paused_and_goes_on(platform: Callable[..., Platform]) -> None:
    here = platform("elasticflow", nodes="1x2")
    job = _submit(here, "first", 400, max_workers=2)
    here.wait(job, lambda r: _workers(r) == 2 and r.done > 3)  # grown by the scheduler
    here.plane.jobs.pause(job)
    paused = here.wait(job, lambda r: r.phase is Phase.PAUSED and not r.held)
    wait_until(lambda: not processes_of(here.home / "jobs" / job), 60, "the paused job to save and end")
    here.plane.jobs.resume(job)
    here.wait(job, lambda r: r.done > paused.done + 1)
    _ends_whole(here, {job: 400})
    assert here.output(job).count("begins at") >= 3, "with one worker, with two, and after the pause"
    kinds = [e.kind for e in here.events() if e.job_id == job]
    assert EventKind.RESIZED in kinds and EventKind.PROGRESS in kinds


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_programs_share_the_slots_outlive_a_kill_and_keep_their_promises(
    platform: Callable[..., Platform],
) -> None:
    here = platform("elasticflow", nodes="1x2")
    first = _submit(here, "first", 300, max_workers=2)
    here.wait(first, lambda r: r.done > 3)
    second = _submit(here, "second", 400, max_workers=2)
    killed = here.wait(second, lambda r: r.done > 1)
    for pid in processes_of(here.home / "jobs" / second):  # all of it, its supervisor too
        with contextlib.suppress(ProcessLookupError):  # it went with another one
            os.kill(pid, signal.SIGKILL)
    here.wait(second, lambda r: r.restarts == 1 and r.done > killed.done + 1)
    _ends_whole(here, {first: 300, second: 400})

    # The second run of a kind is known: its deadline is answered at once, and kept.
    again = _submit(here, "again", 300, max_workers=2, deadline_s=time.time() + 600)
    promise = here.plane.jobs.get(again).promise
    assert promise.admitted and promise.guaranteed_s is not None and not promise.pending
    (record,) = here.wait_over(again)
    assert finished(record) and record.ended_s is not None
    assert record.ended_s <= promise.guaranteed_s


def _ends_whole(here: Platform, jobs: dict[str, int]) -> None:
    """Lets them run on and sees that each counted to its end, going on where it was."""
    for count in jobs.values():
        (here.home / f"hurry-{count}").touch()
    for record in here.wait_over(*jobs):
        assert finished(record), record.reason
    for job, count in jobs.items():
        assert here.output(job).count(f"counted to {count}\n") == 1
        begins = [int(w.split()[3]) for w in here.output(job).splitlines() if "begins at" in w]
        assert begins[0] == 0 and begins == sorted(begins), "it went on where it was"


@pytest.mark.skipif(importlib.util.find_spec("xgboost") is None, reason="xgboost is not installed")
@pytest.mark.parametrize("engine", ["local"], indirect=True)
def test_boosting_is_grown_by_the_scheduler_and_promised_on_its_second_run(
    platform: Callable[..., Platform],
) -> None:
    here = platform("elasticflow", nodes="1x2")

    def ask(**options: object) -> str:
        request = JobRequest(
            name="trees",
            script=str(BOOSTING),
            args=("--rounds", "30", "--round-ms", "300"),
            workdir=str(BOOSTING.parent),
            max_workers=2,
            **options,  # type: ignore[arg-type]
        )
        return here.plane.jobs.submit(request, "ann").job_id

    first = ask()
    (record,) = here.wait_over(first)
    assert finished(record) and here.output(first).count("final accuracy") == 1, record.reason
    again = ask(deadline_s=time.time() + 200)
    promise = here.plane.jobs.get(again).promise
    assert promise.guaranteed_s is not None and not promise.pending
    (record,) = here.wait_over(again)
    assert finished(record) and record.ended_s is not None
    assert record.ended_s <= promise.guaranteed_s
    placed = (EventKind.ALLOCATED, EventKind.RESIZED)
    sizes = {len(e.data["gpus"]) for e in here.events() if e.kind in placed}
    assert 2 in sizes, "the scheduler gave it a second worker, on the way or in the second run"
