"""What a job that has not run yet is taken to be like: the jobs of its model that ran before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from swell.perf.belief import JobBelief
from swell.perf.goodput import BatchLimits
from swell.policies import Snapshot, make_policy
from swell.policies.tide import EXPLORE, FIRST_SHARE, KINDS_REMEMBERED, SeenModels

LIMITS = BatchLimits(32, 1024, 8, 64)
FLAT, STEEP = [0.0, 1.0, 1.1, 1.2, 1.3] + [1.3] * 12, [float(k) for k in range(17)]


def seen_on(gpus: int, fixed_batch: int | None = None) -> JobBelief:
    """The belief about a job that has run on that many GPUs; on none for 0."""
    belief = JobBelief(LIMITS, fixed_batch)
    if gpus:
        belief.observe(1, gpus, 32, 0.1, 0.01)
    return belief


def moment(make_snapshot: Any, beliefs: list[JobBelief | None], **columns: Any) -> Snapshot:
    snapshot: Snapshot = make_snapshot(len(beliefs), cluster="4x4", rates=[FLAT, STEEP], **columns)
    snapshot.table.belief[:] = beliefs
    return snapshot


def test_a_job_of_an_unknown_kind_starts_small(make_snapshot: Any) -> None:
    found = SeenModels().believed(moment(make_snapshot, [seen_on(0), None]))
    assert found.unseen.tolist() == [True, False]
    assert found.most.tolist() == [FIRST_SHARE, 16]


def test_a_new_job_is_taken_to_be_like_the_one_of_its_kind_seen_on_the_most_gpus(make_snapshot: Any) -> None:
    models = SeenModels()
    now = moment(make_snapshot, [seen_on(1), seen_on(2), seen_on(0)], curve=[1, 0, 1])
    found = models.believed(now)
    assert not found.unseen.any()
    assert found.rates[found.curve[2]].tolist() == FLAT
    assert found.most.tolist() == [16, 16, 16], "jobs explore from where their kind was seen"
    assert EXPLORE * 2 == 16
    # The same job with another curve later: what counts is how it was when it was first seen there.
    later = moment(make_snapshot, [seen_on(2), seen_on(0)], curve=[1, 1])
    found = models.believed(later)
    assert found.rates[found.curve[1]].tolist() == FLAT
    assert found.rates[found.curve[0]].tolist() == STEEP, "a job that has run is judged by itself"


def test_jobs_that_keep_different_batch_sizes_are_of_different_kinds(make_snapshot: Any) -> None:
    now = moment(make_snapshot, [seen_on(4, 32), seen_on(0), seen_on(0, 32)], curve=0)
    assert SeenModels().believed(now).unseen.tolist() == [False, True, False]


def test_the_oldest_kind_is_forgotten(make_snapshot: Any) -> None:
    models = SeenModels()
    for number in range(KINDS_REMEMBERED + 1):
        models._observe((f"model-{number}", 0), 1, np.array(STEEP))
    assert len(models._seen) == KINDS_REMEMBERED
    assert ("model-0", 0) not in models._seen


def test_a_new_job_of_a_known_model_starts_on_the_share_that_suits_it(make_snapshot: Any) -> None:
    def first_share(others: int) -> int:
        now = moment(make_snapshot, [seen_on(others), seen_on(0)], curve=1, left=1000.0, max_gpus=[1, 8])
        return int(make_policy("tide").allocate(now).gpus[1])

    assert first_share(0) == FIRST_SHARE
    assert first_share(4) == 8
