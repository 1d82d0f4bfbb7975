"""`make bench-cluster`: what its verdicts say. Each of its benchmarks has tests of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.autoscaling import BASELINE, JUDGED
from benchmarks.bench import Bench
from benchmarks.cluster.__main__ import SUITE
from benchmarks.cluster.parts import PARTS
from benchmarks.cluster.verdicts import JUDGES, verdicts


def judged(part: str, figures: Any) -> dict[str, bool | None]:
    return {v.item: v.holds for v in verdicts({part: {"measured": figures}})}


def test_every_part_is_judged() -> None:
    assert set(PARTS) == set(JUDGES)


def test_elastic_must_be_faster_than_gang_and_the_second_job_must_not_wait() -> None:
    gang = {"total_s": 59.0, "second_waits_s": 28.0, "utilisation": 0.54}
    good = {"total_s": 37.0, "second_waits_s": 0.1, "utilisation": 0.77}
    assert all(judged("two_jobs", {"gang": gang, "elastic": good}).values())
    assert not any(judged("two_jobs", {"gang": gang, "elastic": gang}).values())


def test_a_service_that_waits_too_long_or_idle_slots_do_not_hold() -> None:
    good = {"utilisation": 0.97, "worst_s": 0.2, "problems": []}
    assert list(judged("service", good).values()) == [True, True, True]
    bad = {"utilisation": 0.89, "worst_s": 2.1, "problems": ["train-0 ended"]}
    assert list(judged("service", bad).values()) == [False, False, False]


def test_accuracy_outside_the_spread_or_of_too_few_seeds_does_not_hold() -> None:
    fixed = {"accuracy": [0.98, 0.99, 0.99, 0.99, 0.98]}
    way = {"accuracy": [0.98, 0.99, 0.99, 0.99, 0.98], "mean": 0.986, "switches": 28}
    figures = {"4 workers": fixed, "8 workers": fixed, "4 to 8, changing": way, "within_spread": True}
    assert list(judged("accuracy", figures).values()) == [True, True, True]
    few = figures | {"4 to 8, changing": way | {"accuracy": [0.97], "switches": 0}, "within_spread": False}
    assert list(judged("accuracy", few).values()) == [False, False, False]


def test_a_late_reclaim_a_problem_or_too_few_of_them_do_not_hold() -> None:
    good = {"reclaims": 100, "jobs": 6, "worst_s": 1.9, "problems": []}
    assert list(judged("reclaims", good).values()) == [True] * 4
    bad = {"reclaims": 10, "jobs": 3, "worst_s": 2.5, "problems": ["job-1: sample 3 lost"]}
    assert list(judged("reclaims", bad).values()) == [False] * 4


def test_a_sweep_must_be_faster_as_good_and_lose_no_trial() -> None:
    def sweep(trials: int, ratio: float, best: float) -> dict[str, Any]:
        return {
            "elastic": [{"trials": {"complete": 1, "pruned": trials - 1}}],
            "ratio": ratio,
            "scores": {"one slot each": 0.994, "elastic": best},
        }

    assert list(judged("sweep", sweep(24, 0.67, 0.992)).values()) == [True] * 3
    assert list(judged("sweep", sweep(6, 0.80, 0.97)).values()) == [False] * 3
    killed = {"ended_before": 6, "lost": 0, "jobs_beyond_trials": 0}
    assert list(judged("sweep_killed", killed).values()) == [True] * 3
    assert (
        list(judged("sweep_killed", {key: 1 - bool(killed[key]) for key in killed}).values()) == [False] * 3
    )


def test_an_autoscaler_must_be_cheaper_and_no_slower() -> None:
    ways = {way.name: [4.0, 100.0] for way in JUDGED}
    ways[BASELINE] = [4.0, 100.0]
    first, *others = [way.name for way in JUDGED[1:]]
    ways[first] = [4.01, 74.0]  # less than half a percent slower counts as the same time
    found = judged("autoscaling", {"imagenet": {"steady": ways, "spot": ways}})
    assert {item for item, holds in found.items() if holds} == {
        f"imagenet, {first}",
        f"imagenet, {first}, spot loss",
    }
    assert len(found) == 2 * (1 + len(others))
    ways[first] = [4.2, 60.0]
    assert not any(judged("autoscaling", {"imagenet": {"steady": ways}}).values())


def test_nodes_must_follow_the_queue_up_and_down() -> None:
    assert all(judged("rented", {"nodes": [0, 3, 0]}).values())
    assert not any(judged("rented", {"nodes": [0, 3, 1]}).values())


def test_gpu_types_are_judged_for_each_policy() -> None:
    figures = {
        "tide": {"blind": [100.0, 200.0], "by type": [80.0, 160.0]},
        "pollux": {"blind": [100.0, 200.0], "by type": [90.0, 190.0]},
    }
    assert list(judged("gpu_types", figures).values()) == [True, False]


def test_teams_are_judged_for_each_policy_and_live() -> None:
    def day(shared_s: float, longest_s: float) -> dict[str, float]:
        return {"free_jct_s": 100.0, "shared_jct_s": shared_s, "longest_s": longest_s, "round_s": 60.0}

    figures = {"fifo": [day(104.0, 0.0), day(101.0, 60.0)], "pollux": [day(104.0, 0.0), day(103.0, 61.0)]}
    assert list(judged("teams", figures).values()) == [True, True, False, False]
    live = {"returns": 10, "worst_s": 0.2, "borrower_still_runs": True}
    assert all(judged("teams_live", live).values())
    assert not any(
        judged("teams_live", {"returns": 3, "worst_s": 6.0, "borrower_still_runs": False}).values()
    )


def test_stragglers_and_neighbours_on_a_gpu_are_judged() -> None:
    assert list(judged("straggler", {"after_30_s": 0.95, "replaced": True}).values()) == [True, True]
    assert list(judged("straggler", {"after_30_s": 0.6, "replaced": False}).values()) == [False, False]
    assert list(judged("gpu_sharing", {"jobs": 4, "gain": 2.1}).values()) == [True]
    assert list(judged("gpu_sharing", {"jobs": 4, "gain": 1.7}).values()) == [False]
    assert judged("gpu_sharing", {"skipped": "there is no GPU"}) == {"measured": None}


def test_a_part_runs_in_a_process_of_its_own_and_its_verdict_is_written(tmp_path: Path) -> None:
    """With the cheapest part: it is skipped where there is no GPU, and is quick where there is one."""
    Bench(SUITE, {}, quick=True, minutes=0.1, out=tmp_path).run(["teams"])
    Bench(SUITE, {}, quick=True, minutes=5.0, out=tmp_path).run(["gpu_sharing"])
    report = json.loads((tmp_path / "cluster.json").read_text())
    assert report["gpu_sharing"]["quick"]
    assert [v["part"] for v in report["verdicts"]] == ["gpu_sharing"]
