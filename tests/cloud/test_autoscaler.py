"""How many nodes are worth having, on cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swell.cloud import Autoscaler, NodeOffer, Terms, parse_rentable
from swell.cloud.autoscaler import summed_speedups, worth_having
from swell.domain import Cluster, InputError, JobSpec
from swell.perf.curves import Curves
from swell.policies import JobTable, Snapshot

OFFER = NodeOffer(gpus_per_node=4, price_per_hour=2.0, start_s=100.0)
LARGEST = Cluster.parse("16x4")
LINEAR = np.arange(65, dtype=float)
FLAT = np.minimum(LINEAR, 8.0)
"""A job that scales perfectly to 8 GPUs and no further."""


def snapshot(
    curves: list[Any], left: float = 1e6, gpus: int = 0, deadline_s: float | None = None
) -> Snapshot:
    specs = [
        JobSpec(job_id=f"j{i}", submit_s=0.0, model="m", batch_size=1, deadline_s=deadline_s)
        for i in range(len(curves))
    ]
    table = JobTable(specs)
    table.left[:], table.gpus[:] = left, gpus
    table.curve[:] = np.arange(len(curves))
    rates = np.array(curves) if curves else LINEAR[None]
    return Snapshot(0.0, LARGEST, table, np.arange(len(curves)), Curves(rates))


def wanted(view: Snapshot, nodes: int = 0, **terms: Any) -> int:
    return worth_having(view, nodes, Terms(**{"most_nodes": 16} | terms), OFFER).nodes


def test_each_gpu_goes_where_it_adds_the_most() -> None:
    summed = summed_speedups([np.array([1.0, 0.5, 0.4]), np.array([1.0, 0.1])], 3, 2)
    assert summed.tolist() == pytest.approx([0.0, 2.0, 2.9, 3.0])


def test_a_job_that_scales_perfectly_gets_all_nodes() -> None:
    assert wanted(snapshot([LINEAR])) == 16


def test_nodes_that_add_nothing_are_not_had_although_the_utility_is_in_range() -> None:
    # 8 GPUs of speed-up: 3 nodes would have a utility of 2/3, above the middle of the range
    assert wanted(snapshot([FLAT]), least_gain=0.0) == 3
    assert wanted(snapshot([FLAT])) == 2
    assert wanted(snapshot([FLAT]), nodes=3) == 2


def test_within_the_range_nothing_changes() -> None:
    root = np.sqrt(LINEAR)  # the utility of n nodes is 1 / sqrt(4 n): .5 for one
    assert wanted(snapshot([root]), nodes=1, low=0.3, high=0.6) == 1
    assert wanted(snapshot([root] * 4), nodes=4, low=0.3, high=0.6) == 4
    assert wanted(snapshot([root]), nodes=16, low=0.3, high=0.6) == 1
    assert wanted(snapshot([root] * 8), nodes=1, low=0.3, high=0.6) > 1


def test_an_hour_that_is_worth_more_gets_more_nodes() -> None:
    root = np.sqrt(LINEAR)
    # (2 n + w) / sqrt(4 n) is least at n = w / 2
    assert [wanted(snapshot([root]), hour_worth=w) for w in (4.0, 8.0, 16.0, 1000.0)] == [2, 4, 8, 16]
    assert wanted(snapshot([root]), nodes=5, hour_worth=8.0) == 5  # nearly as good, so it stays


def test_by_pace_there_are_the_fewest_nodes_that_are_as_fast_as_those_of_a_throughput_only_autoscaler() -> (
    None
):
    # Throughput is what the curve says here, as nothing is known of the batch: 3 nodes by range, of which
    # the third adds nothing.
    scaler = Autoscaler(Terms(most_nodes=16, pace=1.0), OFFER)
    assert wanted(snapshot([FLAT]), measure="throughput", least_gain=0.0) == 3
    assert scaler.look(snapshot([FLAT]), 0).nodes == 2
    assert scaler.look(snapshot([LINEAR]), 2).nodes == 16
    slower = Autoscaler(Terms(most_nodes=16, pace=0.5), OFFER)
    assert slower.look(snapshot([LINEAR]), 0).nodes == 8


def test_by_pace_the_other_autoscaler_keeps_its_nodes_while_its_utility_is_in_its_range() -> None:
    terms = Terms(most_nodes=16, pace=1.0, low=0.15, high=0.25)
    scaler, fresh = Autoscaler(terms, OFFER), Autoscaler(terms, OFFER)
    assert scaler.look(snapshot([LINEAR**0.5]), 0).nodes == 6
    assert scaler.look(snapshot([LINEAR**0.53]), 6).nodes == 6
    assert fresh.look(snapshot([LINEAR**0.53]), 6).nodes == 7
    idle = snapshot([])
    scaler.look(idle, 6)
    idle.now_s = 60.0
    assert scaler.look(idle, 6).nodes == 0
    assert scaler.look(snapshot([LINEAR**0.53]), 0).nodes == 7, "without jobs it has let its nodes go too"


def test_the_budget_bounds_the_nodes() -> None:
    assert wanted(snapshot([LINEAR]), budget_per_hour=7.0) == 3
    assert wanted(snapshot([LINEAR]), budget_per_hour=1.0) == 0


def test_deadlines_come_first() -> None:
    # 12 GPUs for 1,000 s of a job that goes by range on one node only
    curve = np.concatenate([[0.0], 1.0 + 0.3 * np.arange(64)])
    work = float(curve[12]) * 1000
    calm = wanted(snapshot([curve], left=work), low=0.7, high=0.9)
    hurried = wanted(snapshot([curve], left=work, deadline_s=1200.0), low=0.7, high=0.9)
    assert calm == 1 and 3 <= hurried <= 4
    # one that cannot be kept within the budget is no reason for a node
    assert wanted(snapshot([curve], left=work, deadline_s=1200.0), low=0.7, high=0.9, budget_per_hour=4) == 1


def test_a_job_that_ends_before_a_node_could_start_is_no_reason_for_one() -> None:
    assert wanted(snapshot([LINEAR], left=4 * 50.0, gpus=4), nodes=1) == 1
    assert wanted(snapshot([LINEAR], left=4 * 500.0, gpus=4), nodes=1) == 16


def test_without_jobs_there_are_no_nodes_after_a_while() -> None:
    scaler = Autoscaler(Terms(most_nodes=4, idle_s=60.0), OFFER)
    empty = snapshot([])
    assert scaler.look(empty, 3).nodes == 3
    empty.now_s = 59.0
    assert scaler.look(empty, 3).nodes == 3
    empty.now_s = 60.0
    assert scaler.look(empty, 3).nodes == 0
    assert scaler.look(snapshot([FLAT]), 0).nodes == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("low", 0.9),
        ("high", 1.5),
        ("measure", "speed"),
        ("most_nodes", 0),
        ("hour_worth", -1),
        ("pace", 0),
        ("pace", 1.1),
    ],
)
def test_terms_that_make_no_sense_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        Terms(**{"most_nodes": 4} | {field: value})


def test_the_least_nodes_are_kept_without_jobs_and_only_as_far_as_the_budget_goes() -> None:
    idle = snapshot([])
    assert Autoscaler(Terms(most_nodes=4, least_nodes=2, idle_s=0.0), OFFER).look(idle, 3).nodes == 2
    poor = Terms(most_nodes=4, least_nodes=2, idle_s=0.0, budget_per_hour=2.0)
    assert Autoscaler(poor, OFFER).look(idle, 3).nodes == 1
    with pytest.raises(InputError, match="least_nodes must be from 0 to"):
        Terms(most_nodes=4, least_nodes=5)


def test_a_job_gets_the_nodes_that_it_needs_at_the_least_if_they_are_affordable() -> None:
    view = snapshot([np.minimum(LINEAR, 1.0)])
    view.table.min_gpus[:] = 9
    assert wanted(view) == 3 and wanted(view, most_nodes=2) == 1


def test_what_a_live_platform_may_rent_is_read_from_text() -> None:
    read = parse_rentable("1:8x4:A100,price=3,budget=20,idle=5", 120.0)
    assert (read.offer.gpus_per_node, read.offer.start_s, read.gpu_type) == (4, 120.0, "a100")
    assert (read.terms.least_nodes, read.terms.most_nodes, read.terms.idle_s) == (1, 8, 5.0)
    assert (
        read.terms.affordable(read.offer) == 6 and parse_rentable("0:1x1,start=7", 120.0).offer.start_s == 7
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "must begin with MIN:MAXxSLOTS, such as 0:3x2"),
        ("0:3", "must begin with"),
        ("3:1x2", "must begin with"),
        ("0:0x2", "must begin with"),
        ("0:3x0", "must begin with"),
        ("0:3x2,spot=6", "unknown option 'spot=6'"),
        ("0:3x2,price=much", "price must be a number, got 'much'"),
        ("0:3x2,low=2", "low must be more than 0 and not above 'high'"),
        ("0:3x2,pace=2", "pace must be more than 0 and at most 1, got 2.0"),
        ("0:3x2,pace=1,worth=9", "pace must be left out if there is a worth of an hour"),
        ("0:3x2,price=5,budget=4", "a budget of 4 per hour pays 0 nodes at a price of 5"),
        ("2:3x2,price=5,budget=9", "at least 2 must be affordable"),
    ],
)
def test_what_cannot_be_rented_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match="autoscale") as refused:
        parse_rentable(text, 120.0)
    assert said in str(refused.value) and refused.value.field == "autoscale"
