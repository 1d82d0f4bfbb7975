"""Unmodified scripts as jobs of a platform: resized beside another job, promised on their second run."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swell.control.model import JobRecord, JobRequest
from swell.domain import EventKind

from .conftest import Platform, finished

SCRIPTS = Path(__file__).parents[1] / "train" / "plain_scripts"


def _framework(script: str, package: str, *arguments: object) -> Any:
    missing = importlib.util.find_spec(package) is None
    reason = f"{package} is not installed (pip install 'swell[frameworks]')"
    marks = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.skipif(missing, reason=reason)]
    return pytest.param(script, arguments, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local"], indirect=True)
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("everyday.py", (80, 0.05, "mean")),
        _framework("accelerated.py", "accelerate", 60, 0.1),
        _framework("lightning_fit.py", "lightning", 150, 0.1),
        _framework("hugging_face.py", "transformers", 20, 0.3),
    ],
)
def test_a_plain_script_makes_room_for_another_job_and_keeps_a_deadline_when_it_is_known(
    platform: Callable[..., Platform], tmp_path: Path, script: str, arguments: tuple[object, ...]
) -> None:
    here = platform("elasticflow", nodes="1x2")
    hurry, folder = tmp_path / "hurry", tmp_path / "out"
    folder.mkdir()
    epochs, pace, *more = arguments
    args = (str(epochs), f"{pace}:{hurry}", str(folder), *map(str, more))

    def ask(name: str, **options: object) -> str:
        request = JobRequest(
            name=name,
            script=str(SCRIPTS / script),
            args=args,
            workdir=str(tmp_path),
            auto=True,
            max_workers=2,
            **options,  # type: ignore[arg-type]
        )
        return here.plane.jobs.submit(request, "ann").job_id

    def wait(job_id: str, condition: Callable[[JobRecord], object]) -> JobRecord:
        record = here.wait(job_id, lambda r: r.phase.over or condition(r), 200.0)
        assert not record.phase.over, f"it ended too early: {record} {here.output(job_id)[-3000:]}"
        return record

    first = ask("first")
    wait(first, lambda r: r.done)
    (tmp_path / "hurry.late").touch()  # newcomers need not pause while they catch up
    grown = wait(first, lambda r: len(r.held) == 2)
    wait(first, lambda r: r.done > grown.done + 3)
    rival = here.submit("rival", "--epochs", 400, "--sample-ms", 8).job_id
    wait(rival, lambda r: r.held and r.done)
    shared = wait(first, lambda r: len(r.held) == 1)
    wait(first, lambda r: r.done > shared.done + 3)
    hurry.touch()
    (ended,) = here.wait_over(first, timeout_s=200.0)
    assert finished(ended), (ended.reason, here.output(first)[-3000:])

    shutil.rmtree(folder)
    folder.mkdir()
    again = ask("again", deadline_s=time.time() + 600)
    promise = here.plane.jobs.get(again).promise
    assert promise.guaranteed_s is not None and not promise.pending, promise
    (record,) = here.wait_over(again, timeout_s=200.0)
    assert finished(record) and record.ended_s is not None, record.reason
    assert record.ended_s <= promise.guaranteed_s
    assert not here.plane.jobs.get(rival).phase.over, "it had a rival all the time"

    results = [_result(here.output(job)) for job in (first, again)]
    assert all(result["final"] < 0.16 for result in results), results
    sizes = [len(e.data["gpus"]) for e in here.events() if e.kind is EventKind.RESIZED and e.job_id == first]
    assert 2 in sizes and sizes[-1] == 1, f"the scheduler grew it and took workers back: {sizes}"
    assert not ended.confined and not record.confined


def _result(output: str) -> dict[str, Any]:
    found = [line for line in output.splitlines() if '{"' in line]
    assert len(found) == 1, f"only the leader speaks: {output[-3000:]}"
    result: dict[str, Any] = json.loads(found[0][found[0].index('{"') :])
    return result
