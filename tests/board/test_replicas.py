"""Jobs whose GPUs come in replicas get whole ones, from every policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.board.board import in_replicas
from swell.domain import ANY_GPU, Cluster, Event, EventKind, InputError, JobSpec
from swell.perf.profiles import MeasuredCounts, ProfileSet
from swell.policies import Decision, policy_names
from swell.sim import simulate


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6))
def test_shares_become_multiples_and_never_more_in_sum(jobs: list[tuple[int, int]]) -> None:
    gpus, size = np.array(jobs).T
    rounded = in_replicas(Decision(gpus), size, np.full(len(jobs), 8)).gpus
    assert not (rounded % size).any()
    assert rounded.sum() <= gpus.sum()
    assert (rounded[size == 1] == gpus[size == 1]).all()


def test_what_rounding_frees_completes_the_replica_that_lacks_least() -> None:
    decision = Decision(np.array([3, 5, 2]))
    assert in_replicas(decision, np.array([2, 4, 1]), np.full(3, 8)).gpus.tolist() == [4, 4, 2]
    assert in_replicas(decision, np.array([2, 4, 1]), np.array([3, 8, 8])).gpus.tolist() == [2, 4, 2]


def test_a_policy_that_names_nodes_gives_up_the_rest_where_a_job_has_fewest() -> None:
    named = Decision(np.array([5]), np.array([[1, 4]]))
    rounded = in_replicas(named, np.array([2]), np.array([8]))
    assert rounded.per_node is not None and rounded.per_node.tolist() == [[0, 4]]


@pytest.mark.parametrize("policy", policy_names())
def test_in_the_simulator_every_policy_gives_whole_replicas(policy: str) -> None:
    counts = np.arange(1.0, 9.0)
    profile = MeasuredCounts("m", {ANY_GPU: (counts, {8: counts**0.9})}, 1e6)
    jobs = [
        JobSpec(job_id="a", submit_s=0.0, model="m", batch_size=8, gpus=2, work=900.0, gpus_per_replica=2),
        JobSpec(job_id="b", submit_s=9.0, model="m", batch_size=8, gpus=1, work=500.0),
        JobSpec(job_id="c", submit_s=30.0, model="m", batch_size=8, gpus=3, work=600.0, gpus_per_replica=3),
    ]
    events: list[Event] = []
    simulate(jobs, ProfileSet([profile]), Cluster.parse("2x4"), policy, on_event=events.append)
    moves = [e for e in events if e.kind in (EventKind.ALLOCATED, EventKind.RESIZED)]
    sizes = {job.job_id: job.gpus_per_replica for job in jobs}
    held = [(e.job_id, len(e.data["gpus"])) for e in moves]
    assert {job for job, _ in held} == set(sizes)
    assert all(count % sizes[str(job)] == 0 for job, count in held), held


@pytest.mark.parametrize("policy", ["tide", "optimus", "afs-l", "max-min"])
def test_a_job_of_replicas_alone_gets_as_many_as_fit(policy: str) -> None:
    counts = np.arange(1.0, 9.0)
    profile = MeasuredCounts("m", {ANY_GPU: (counts, {8: counts})}, 1e6)
    job = JobSpec(job_id="a", submit_s=0.0, model="m", batch_size=8, work=900.0, gpus_per_replica=3)
    events: list[Event] = []
    simulate([job], ProfileSet([profile]), Cluster.parse("2x4"), policy, on_event=events.append)
    held = [len(e.data["gpus"]) for e in events if e.kind in (EventKind.ALLOCATED, EventKind.RESIZED)]
    assert held[-1] == 6


def test_bounds_of_a_job_of_replicas_are_multiples() -> None:
    spec = JobSpec(job_id="a", submit_s=0.0, model="m", batch_size=8, gpus_per_replica=4)
    assert (spec.gpus, spec.min_gpus) == (4, 4)
    with pytest.raises(InputError, match=r"max_gpus must be a multiple of gpus_per_replica \(4\), got 6"):
        JobSpec(job_id="a", submit_s=0.0, model="m", batch_size=8, max_gpus=6, gpus_per_replica=4)
