"""A job that found out that it can use one worker only: it gets no more, and people are told why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.control.virtual import Trace, VirtualPlatform

from swell.control import promises
from swell.control.errors import Conflict
from swell.control.model import Phase
from swell.control.store import record_from_json, record_to_json
from swell.domain import Cluster, JobSpec
from swell.engines import EngineReport

WHY = "it changes its parameters by hand"


@pytest.mark.parametrize("policy", ["tide", "elasticflow", "fifo"])
def test_a_confined_job_gets_one_worker_whatever_the_policy_and_leaves_the_rest_to_others(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "MOST_JOBS", 0)  # estimates are of no interest here
    counts = np.arange(5)
    specs = [
        JobSpec(job_id=name, submit_s=0.0, model=name, batch_size=1, work=1e6, gpus=3) for name in ("a", "b")
    ]
    trace = Trace(specs, {s.job_id: counts / (1 + 0.1 * counts) for s in specs}, Cluster.parse("1x4"))
    platform = VirtualPlatform(trace, policy, tmp_path / "home", cost_s=1.0, round_s=1.0)
    plane = platform.plane
    plane.come_up()

    def turns(count: int) -> None:
        for _ in range(count):
            platform.now_s += 30.0
            plane.turn()

    confined = plane.jobs.submit(platform.request(specs[0]), "ann").job_id
    turns(4)
    assert len(plane.jobs.get(confined).wanted) > 1, "until the job has said so"
    said = EngineReport(
        job_id=confined, time_s=platform.now_s, kind="confined", data={"workers": 1, "reason": WHY}
    )
    platform.engine._reports.extend([said, said])
    other = plane.jobs.submit(platform.request(specs[1]), "ann").job_id
    turns(4)
    assert len(plane.jobs.get(confined).wanted) == 1 and len(plane.jobs.get(other).wanted) >= 2
    told = plane.jobs.explain(confined)
    assert WHY in told["why"] and (told["most_workers"], told["confined"]) == (1, WHY)
    assert len([n for n in told["notices"] if WHY in n["text"]]) == 1, "said once, however often it is heard"
    for least, most in ((1, 3), (2, None)):
        with pytest.raises(Conflict, match=WHY):
            plane.jobs.scale(confined, least, most)
    assert plane.jobs.scale(confined, 1, None).max_workers == 1
    record = plane.jobs.pause(confined)
    assert record_from_json(record_to_json(record)) == record, "it is on disk"
    turns(1)
    plane.jobs.resume(confined)
    turns(3)
    assert plane.jobs.get(confined).phase is Phase.RUNNING and len(plane.jobs.get(confined).wanted) == 1
    platform.store.close()
