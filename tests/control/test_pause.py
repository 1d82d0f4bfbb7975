"""A job that is paused and resumed before the policy was asked again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.control.virtual import VirtualPlatform, make_trace

from swell.control import promises
from swell.control.model import Phase


@pytest.mark.parametrize("policy", ["afs-l", "elasticflow", "max-min", "pollux", "tide", "tiresias"])
def test_a_job_resumed_before_the_next_decision_gets_its_slots_again(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "MOST_JOBS", 0)
    trace = make_trace(7, 1, "1x4", 0.01)
    platform = VirtualPlatform(trace, policy, tmp_path, cost_s=1.0, round_s=None)
    plane = platform.plane
    plane.come_up()
    platform.now_s = trace.jobs[-1].submit_s
    job_id = plane.jobs.submit(platform.request(trace.jobs[0]), "ann").job_id
    plane.turn()
    platform.now_s += 60.0  # for policies that decide in rounds
    plane.turn()
    assert plane.jobs.get(job_id).wanted
    plane.jobs.pause(job_id)
    assert plane.jobs.resume(job_id).phase is Phase.QUEUED
    for _ in range(3):
        platform.now_s += 60.0
        plane.turn()
    assert plane.jobs.get(job_id).wanted and plane.jobs.get(job_id).phase is Phase.RUNNING
