"""What holds for every share-giving policy, whatever the moment it is asked about."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.domain import InputError
from swell.policies import Decision, Policy, Snapshot, make_policy
from swell.policies.afs import legal_shares

RIGID = ["fifo", "fifo:backfill=true", "srtf", "tiresias", "tiresias-gittins:learn=0"]
RIGID += ["tiresias:thresholds=3250/7200,fifo=start,promote=2"]
ELASTIC = ["max-min", "gandiva", "themis", "optimus", "elastic-tiresias"]
ELASTIC += ["afs-l", "afs-l:shares=any", "afs-p", "tide-fixed", "tide-fixed:length=unknown"]
WORK_CONSERVING = [name for name in ELASTIC if name not in ("gandiva", "elastic-tiresias")]


def check(name: str, policy: Policy, snapshot: Snapshot) -> Decision:
    """Ask the policy and check its answer."""
    decision = policy.allocate(snapshot)
    gpus = decision.gpus
    assert gpus.shape == snapshot.rows.shape
    assert np.issubdtype(gpus.dtype, np.integer)
    assert np.all(gpus >= 0)
    assert gpus.sum() <= snapshot.capacity
    assert np.all(gpus <= snapshot.max_gpus)
    if name in RIGID:
        assert np.all((gpus == 0) | (gpus == snapshot.requested)), "rigid jobs: all or nothing"
    elif policy.knows == "profiles":
        no_progress = snapshot.rate_at(gpus) == 0
        held = gpus == snapshot.gpus  # a lease may be kept whatever the job is on
        whole = gpus == snapshot.requested
        assert np.all((gpus == 0) | ~no_progress | held | whole), "GPUs for no progress"
    if decision.order is not None:
        assert sorted(decision.order.tolist()) == list(range(len(snapshot)))
    assert policy.next_wakeup_s(snapshot, decision) > snapshot.now_s
    return decision


def pass_time(snapshot: Snapshot, decision: Decision, dt_s: float, leaves: int | None) -> Snapshot:
    """The moment `dt_s` later, with the decision carried out and perhaps one job gone."""
    table = copy.deepcopy(snapshot.table)
    rows = snapshot.rows
    held_s = snapshot.now_s - table.since_s[rows]
    table.attained_gpu_s[rows] += table.gpus[rows] * held_s + decision.gpus * dt_s
    table.run_s[rows] = snapshot.run_s + (decision.gpus > 0) * dt_s
    started = rows[(decision.gpus > 0) & np.isinf(table.first_start_s[rows])]
    table.first_start_s[started] = snapshot.now_s
    table.gpus[rows] = decision.gpus
    table.rate[rows] = snapshot.rate_at(decision.gpus)
    table.left[rows] = np.maximum(snapshot.remaining - table.rate[rows] * dt_s, 1.0)
    table.since_s[rows] = snapshot.now_s + dt_s
    stay = rows if leaves is None or len(rows) == 1 else np.delete(rows, leaves % len(rows))
    return Snapshot(snapshot.now_s + dt_s, snapshot.cluster, table, stay, snapshot.curves)


@pytest.mark.parametrize("name", RIGID + ELASTIC)
@settings(max_examples=60)
@given(data=st.data())
def test_shares_are_within_bounds_at_any_moment_of_a_run(name: str, data: Any, snapshots: Any) -> None:
    snapshot = data.draw(snapshots)
    policy = make_policy(name)
    for _ in range(data.draw(st.integers(1, 4))):
        decision = check(name, policy, snapshot)
        dt_s = data.draw(st.sampled_from([1.0, 60.0, 3600.0, 30_000.0]))
        snapshot = pass_time(snapshot, decision, dt_s, data.draw(st.none() | st.integers(0, 20)))


@pytest.mark.parametrize("name", RIGID + ELASTIC)
@settings(max_examples=20)
@given(data=st.data())
def test_the_same_moments_give_the_same_shares(name: str, data: Any, snapshots: Any) -> None:
    first = data.draw(snapshots)
    one, other = make_policy(name), make_policy(name)
    decision = one.allocate(first)
    assert np.array_equal(decision.gpus, other.allocate(first).gpus)
    later = pass_time(first, decision, 600.0, 0)
    assert np.array_equal(one.allocate(later).gpus, other.allocate(later).gpus)


@pytest.mark.parametrize("name", WORK_CONSERVING)
@settings(max_examples=40)
@given(data=st.data())
def test_elastic_policies_leave_no_gpu_idle_that_a_waiting_job_could_use(
    name: str, data: Any, snapshots: Any
) -> None:
    snapshot = data.draw(snapshots)
    gpus = make_policy(name).allocate(snapshot).gpus
    free = snapshot.capacity - gpus.sum()
    for i in np.flatnonzero(gpus == 0):
        usable = snapshot.curves.rates[snapshot.curve[i], 1 : snapshot.max_gpus[i] + 1] > 0
        if name in ("afs-l", "afs-p"):
            usable &= legal_shares("coddl", snapshot.cluster.gpus_per_node, len(usable))[1:] > 0
        if usable.any():
            assert free < 1 + int(np.argmax(usable))


@pytest.mark.parametrize("name", RIGID + ELASTIC)
def test_a_job_never_runs_below_its_minimum(name: str, make_snapshot: Any) -> None:
    snapshot = make_snapshot(4, cluster="2x4", requested=[2, 4, 2, 1], min_gpus=[2, 3, 2, 1], now_s=10.0)
    gpus = make_policy(name).allocate(snapshot).gpus
    assert np.all((gpus == 0) | (gpus >= snapshot.min_gpus))
    assert gpus.sum() > 0


@pytest.mark.parametrize("name", RIGID + ELASTIC)
def test_a_job_beyond_the_cluster_stands_in_nobodys_way(name: str, make_snapshot: Any) -> None:
    snapshot = make_snapshot(2, cluster="1x4", requested=[8, 2], min_gpus=[8, 1])
    assert make_policy(name).allocate(snapshot).gpus.tolist()[0] == 0
    assert make_policy(name).allocate(snapshot).gpus.tolist()[1] >= 2


@pytest.mark.parametrize(
    "text",
    [
        "tiresias:thresholds=7200/3250",
        "tiresias:thresholds=soon",
        "tiresias:fifo=lifo",
        "tiresias:promote=-1",
        "gandiva:quantum_s=0",
        "themis:lease_s=0",
        "afs-l:shares=some",
        "afs-p:lease_s=-5",
        "elastic-tiresias:least=0",
        "tide:length=maybe",
    ],
)
def test_a_bad_option_is_refused_by_name(text: str) -> None:
    option = text.partition(":")[2].partition("=")[0]
    with pytest.raises(InputError, match=option) as refused:
        make_policy(text)
    assert refused.value.field == option
    assert "got" in str(refused.value)
