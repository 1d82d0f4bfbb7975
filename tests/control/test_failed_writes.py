"""A store that cannot be written for a while: decisions are carried out once it can."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.control.virtual import VirtualPlatform, make_trace

from swell.control import promises
from swell.control.errors import StoreUnavailable
from swell.control.model import Phase
from swell.domain import EventKind


def test_moves_that_could_not_be_written_are_carried_out_in_the_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "MOST_JOBS", 0)
    trace = make_trace(7, 4, "1x4", 0.01)
    platform = VirtualPlatform(trace, "max-min", tmp_path, cost_s=1.0, round_s=None)
    platform.plane.come_up()
    platform.now_s = trace.jobs[-1].submit_s
    ids = [platform.plane.jobs.submit(platform.request(job), "ann").job_id for job in trace.jobs]
    save, calls = platform.store.save, []

    def second_fails(*args: object) -> list[int]:
        calls.append(args)
        if len(calls) == 2:
            raise StoreUnavailable("the disk is full")
        return save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(platform.store, "save", second_fails)
    with pytest.raises(StoreUnavailable):
        platform.plane.turn()
    assert sum(bool(platform.plane.jobs.get(job_id).wanted) for job_id in ids) == 1
    platform.plane.turn()
    platform.plane.turn()
    records = [platform.plane.jobs.get(job_id) for job_id in ids]
    assert [record.phase for record in records] == [Phase.RUNNING] * 4
    assert sorted(slot for record in records for slot in record.held) == [0, 1, 2, 3]


def test_a_report_that_could_not_be_written_is_heard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the log would show the slots of a job that shrank as its own while another one has them."""
    monkeypatch.setattr(promises, "MOST_JOBS", 0)
    trace = make_trace(7, 1, "1x4", 0.01)
    platform = VirtualPlatform(trace, "max-min", tmp_path, cost_s=1.0, round_s=None)
    platform.plane.come_up()
    platform.now_s = trace.jobs[-1].submit_s
    job_id = platform.plane.jobs.submit(platform.request(trace.jobs[0]), "ann").job_id
    platform.plane.turn()  # decides, and the engine has something to report
    assert not platform.plane.jobs.get(job_id).held

    def fails(*args: object) -> list[int]:
        raise StoreUnavailable("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(platform.store, "save", fails)
        with pytest.raises(StoreUnavailable):
            platform.plane.turn()
    platform.plane.turn()
    record = platform.plane.jobs.get(job_id)
    assert record.held == record.wanted != ()
    events = [event for _, event in platform.plane.events(limit=1000)]
    assert [e.kind for e in events if e.job_id == job_id].count(EventKind.ALLOCATED) == 1
