"""Who used what: every GPU-second counts once, and the figures are those of the log."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from swell.cli import main
from swell.domain import Event, EventKind, write_events
from swell.report.usage import NOBODY, By, Usage, usage

HOUR_S = 3600.0


def job(kind: EventKind, hours: float, job_id: str = "a", **data: object) -> Event:
    return Event(hours * HOUR_S, kind, job_id=job_id, data=data)


def only(events: list[Event], by: By = "job", now_h: float = 10.0, **options: object) -> Usage:
    (row,) = usage(events, by, now_s=now_h * HOUR_S, **options)  # type: ignore[arg-type]
    return row


def hours(row: Usage) -> dict[str, float]:
    return {key: value for key, value in row.to_json().items() if key not in ("of", "jobs") and value}


def two_gpus_for_two_hours(**submitted: object) -> list[Event]:
    return [
        job(EventKind.SUBMITTED, 0, owner="ann", model="/home/ann/train.py", name="night", **submitted),
        job(EventKind.ALLOCATED, 1, gpus=[0, 1], pause_s=360.0),
        job(EventKind.FINISHED, 3, jct_s=3 * HOUR_S, met=None),
    ]


def test_a_finished_job_held_was_paused_and_waited() -> None:
    figures = {"held_gpu_hours": 4, "useful_gpu_hours": 3.8, "paused_gpu_hours": 0.2, "waited_hours": 1}
    assert hours(only(two_gpus_for_two_hours())) == pytest.approx(figures)


@pytest.mark.parametrize(
    ("by", "of"), [("user", "ann"), ("model", "train.py"), ("job", "night"), ("team", NOBODY)]
)
def test_jobs_are_counted_by_what_was_asked(by: By, of: str) -> None:
    assert only(two_gpus_for_two_hours(), by).of == of


def test_a_failed_job_is_lost_and_a_refused_one_is_not_counted() -> None:
    failed = [*two_gpus_for_two_hours()[:2], job(EventKind.FAILED, 3, reason="x")]
    figures = {"held_gpu_hours": 4, "lost_gpu_hours": 3.8, "paused_gpu_hours": 0.2, "waited_hours": 1}
    assert hours(only(failed)) == pytest.approx(figures)
    refused = [two_gpus_for_two_hours()[0], job(EventKind.REJECTED, 0, reason="x")]
    assert usage(refused, "job", now_s=HOUR_S) == []


def test_steps_that_were_repeated_are_lost() -> None:
    log = [
        job(EventKind.SUBMITTED, 0),
        job(EventKind.ALLOCATED, 0, gpus=[0]),
        *(job(EventKind.PROGRESS, hour, done=done) for hour, done in ((1, 10), (2, 20), (3, 30))),
        job(EventKind.PROGRESS, 4, done=10.0),  # all workers died; a checkpoint had the state of hour 1
        job(EventKind.PROGRESS, 6, done=30.0),
    ]
    figures = {"held_gpu_hours": 7, "lost_gpu_hours": 2, "useful_gpu_hours": 5}
    assert hours(only(log, now_h=7)) == pytest.approx(figures)


def test_only_the_time_asked_for_is_counted() -> None:
    row = only(two_gpus_for_two_hours(), now_h=2.5, since_s=2 * HOUR_S)
    assert hours(row) == pytest.approx({"held_gpu_hours": 1, "useful_gpu_hours": 1})
    assert usage(two_gpus_for_two_hours(), "job", now_s=9 * HOUR_S, since_s=8 * HOUR_S) == []


def test_what_a_team_holds_beyond_its_quota_is_lent() -> None:
    log = [
        *(job(EventKind.SUBMITTED, 0, name, team="vision") for name in "ab"),
        job(EventKind.ALLOCATED, 0, "a", gpus=[0, 1, 2]),
        job(EventKind.ALLOCATED, 1, "b", gpus=[3]),
        job(EventKind.FINISHED, 2, "a", jct_s=1.0, met=None),
    ]
    # The first hour 1 of 3 is lent, the second 2 of 4, the third none.
    row = only(log, "team", now_h=3, quotas={"vision": 2})
    assert row.lent_s / HOUR_S == pytest.approx(1 + 2)
    by_job = {
        one.of: one.lent_s / HOUR_S for one in usage(log, "job", now_s=3 * HOUR_S, quotas={"vision": 2})
    }
    assert by_job == pytest.approx({"a": 1 + 1.5, "b": 0.5})


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4), st.integers(0, 90)), max_size=12),
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 30)), max_size=12),
    st.sampled_from(["finished", "failed", None]),
    st.integers(0, 300),
    st.integers(0, 3),
)
def test_every_gpu_second_counts_once(
    changes: list[tuple[int, int, int]],
    reports: list[tuple[int, int]],
    end: str | None,
    since_s: int,
    quota: int,
) -> None:
    log = [Event(0.0, EventKind.SUBMITTED, job_id="a", data={"team": "t"})]
    now_s = 0.0
    for after_s, gpus, pause_s in changes:
        now_s += after_s
        kind = EventKind.RESIZED if gpus else EventKind.PREEMPTED
        log.append(Event(now_s, kind, job_id="a", data={"gpus": list(range(gpus)), "pause_s": pause_s}))
    log += [Event(s, EventKind.PROGRESS, job_id="a", data={"done": done}) for s, done in sorted(reports)]
    if end is not None:
        log.append(Event(now_s + 5, EventKind(end), job_id="a"))
    log.sort(key=lambda event: event.time_s)
    for row in usage(log, "job", now_s=now_s + 9, since_s=float(since_s), quotas={"t": quota}):
        parts = row.useful_s + row.paused_s + row.lost_s
        assert math.isclose(parts, row.held_s, abs_tol=1e-6)
        assert min(row.useful_s, row.paused_s, row.lost_s, row.lent_s, row.waited_s) >= -1e-6
        assert row.lent_s <= row.held_s + 1e-6
        if quota == 0:
            assert math.isclose(row.lent_s, row.held_s, abs_tol=1e-6)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["usage", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_prints_a_table_csv_and_json(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    events = two_gpus_for_two_hours()
    log.write_text("".join(write_events([*events, job(EventKind.SUBMITTED, 3, "b", owner="=1+1")])))
    table = run("--from", str(log))
    assert "ann" in table and "95%" in table and "GPU-hours" in table
    first, *_ = json.loads(run("--from", str(log), "--json"))
    assert first["of"] == "ann" and first["held_gpu_hours"] == 4
    header, one, other = csv.reader(run("--from", str(log), "--csv").splitlines())
    assert header[0] == "user" and len(header) == len(one) and one[0] == "ann"
    assert other[0] == "'=1+1"
    assert "in that time" in run("--from", str(_empty(tmp_path)), "--since", "1d")


def _empty(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    path.write_text("")
    return path


def test_a_file_that_is_not_there_is_refused_with_what_to_do(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["usage", "--from", str(tmp_path / "none")])
    assert done.exit_code == 2 and "swell events --json --admin" in done.output
