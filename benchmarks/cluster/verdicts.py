"""Whether the figures of `make bench-cluster` are what they must be. Pure: a report in, verdicts out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.autoscaling import BASELINE, JUDGED
from benchmarks.bench import Judge, Verdict, at_least, at_most, judge_parts, same
from benchmarks.elasticdl_service import LEAST_USED
from benchmarks.reclaims import BOUND_S
from benchmarks.sweep import MOST_RATIO, NOISE
from benchmarks.teams import BOUND_S as RETURN_S

NEAR_ZERO_S = 1.0
"""A second job that waits no longer than this does not wait."""
RECLAIMS, RECLAIM_JOBS, TRIALS, RETURNS, SEEDS = 100, 6, 24, 10, 5
"""Of a whole run. A quick one has fewer, and does not count as the experiment."""
GOAL_JOB = "imagenet"
MOST_COST = 0.75
"""Of the throughput-only autoscaler's cost."""
LEAST_SAVED = 0.15
"""Of the average JCT, by knowing the GPU types."""
TEAMS_COST = 0.03
"""How much longer the average JCT may be with teams."""
LEAST_GAIN = 1.8
"""Four small jobs on one GPU, over one after the other."""


def _two_jobs(figures: Any) -> Iterator[Verdict]:
    gang, elastic = figures["gang"], figures["elastic"]
    goal = f"less than gang's {gang['total_s']:g} s"
    faster = elastic["total_s"] < gang["total_s"]
    yield Verdict("two_jobs", "both jobs done", goal, elastic["total_s"], faster)
    yield at_most("two_jobs", "the second job waits", elastic["second_waits_s"], NEAR_ZERO_S, " s")
    goal = f"more than gang's {gang['utilisation']:g}"
    more = elastic["utilisation"] > gang["utilisation"]
    yield Verdict("two_jobs", "slots in use", goal, elastic["utilisation"], more)


def _service(figures: Any) -> Iterator[Verdict]:
    yield at_least("service", "slots in use after start-up", figures["utilisation"], LEAST_USED)
    yield at_most("service", "longest wait of the service", figures["worst_s"], BOUND_S, " s")
    yield same("service", "problems", figures["problems"], [])


def _accuracy(figures: Any) -> Iterator[Verdict]:
    changing = figures["4 to 8, changing"]
    yield at_least("accuracy", "seeds", len(changing["accuracy"]), SEEDS)
    fixed = figures["4 workers"]["accuracy"] + figures["8 workers"]["accuracy"]
    goal = f"within {min(fixed):g} and {max(fixed):g}, of fixed 4 and 8"
    yield Verdict("accuracy", "4 to 8 workers, mean", goal, changing["mean"], figures["within_spread"])
    yield at_least("accuracy", "changes of membership", changing["switches"], 1)


def _reclaims(figures: Any) -> Iterator[Verdict]:
    yield at_least("reclaims", "reclaims", figures["reclaims"], RECLAIMS)
    yield at_least("reclaims", "jobs", figures["jobs"], RECLAIM_JOBS)
    yield at_most("reclaims", "longest until training had left", figures["worst_s"], BOUND_S, " s")
    item = "jobs that failed, samples lost, promises broken and not named"
    yield same("reclaims", item, figures["problems"], [])


def _sweep(figures: Any) -> Iterator[Verdict]:
    ended = min(sum(one["trials"].values()) for one in figures["elastic"])
    yield at_least("sweep", "trials", ended, TRIALS)
    yield at_most("sweep", "makespan over one-slot trials'", figures["ratio"], MOST_RATIO)
    scores = figures["scores"]
    least = round(scores["one slot each"] - NOISE, 4)
    yield at_least("sweep", "best score", scores["elastic"], least, " (one-slot trials', less noise)")


def _sweep_killed(figures: Any) -> Iterator[Verdict]:
    yield at_least("sweep_killed", "trials ended before the sweep was killed", figures["ended_before"], 1)
    yield same("sweep_killed", "of these lost", figures["lost"], 0)
    yield same("sweep_killed", "trials with two jobs or none", figures["jobs_beyond_trials"], 0)


def _autoscaling(figures: Any) -> Iterator[Verdict]:
    """Only the imagenet job has a goal; the figures of other jobs show what the same rules do elsewhere."""
    goal = f"cost at most {MOST_COST:g}, time at most 1.00, of throughput-only's"
    for case, ways in figures[GOAL_JOB].items():
        (base_hours, base_cost), where = ways[BASELINE], "" if case == "steady" else ", spot loss"
        for way in JUDGED[1:]:
            hours, cost = ways[way.name]
            time, price = round(hours / base_hours, 2), round(cost / base_cost, 2)
            item, found = f"{GOAL_JOB}, {way.name}{where}", f"cost {price:.2f}, time {time:.2f}"
            yield Verdict("autoscaling", item, goal, found, price <= MOST_COST and time <= 1)


def _rented(figures: Any) -> Iterator[Verdict]:
    yield same("rented", "nodes before, with and after the jobs", figures["nodes"], [0, 3, 0])


def _gpu_types(figures: Any) -> Iterator[Verdict]:
    for policy, ways in figures.items():
        seeds = zip(ways["by type"], ways["blind"], strict=True)
        saved = round(statistics.mean(1 - aware / blind for aware, blind in seeds), 3)
        item = f"JCT saved over being blind to types, {policy}"
        yield at_least("gpu_types", item, saved, LEAST_SAVED)


def _teams(figures: Any) -> Iterator[Verdict]:
    for policy, runs in figures.items():
        free, shared = (statistics.mean(run[name] for run in runs) for name in ("free_jct_s", "shared_jct_s"))
        item = f"JCT with teams over without, {policy}"
        yield at_most("teams", item, round(shared / free, 3), 1 + TEAMS_COST)
        longest_s, round_s = max(run["longest_s"] for run in runs), runs[0]["round_s"]
        yield at_most("teams", f"longest return, {policy}", longest_s, round_s, " s, one round")


def _teams_live(figures: Any) -> Iterator[Verdict]:
    yield at_least("teams_live", "returns", figures["returns"], RETURNS)
    yield at_most("teams_live", "longest return", figures["worst_s"], RETURN_S, " s")
    yield same("teams_live", "the borrower still trains", figures["borrower_still_runs"], True)


def _straggler(figures: Any) -> Iterator[Verdict]:
    yield at_least("straggler", "speed 30 s after a worker became slow", figures["after_30_s"], 0.9)
    yield same("straggler", "the slow worker was replaced", figures["replaced"], True)


def _gpu_sharing(figures: Any) -> Iterator[Verdict]:
    item = f"{figures['jobs']} small jobs on one GPU over one after the other"
    yield at_least("gpu_sharing", item, figures["gain"], LEAST_GAIN)


JUDGES: dict[str, Judge] = {
    "two_jobs": _two_jobs,
    "service": _service,
    "accuracy": _accuracy,
    "reclaims": _reclaims,
    "sweep": _sweep,
    "sweep_killed": _sweep_killed,
    "autoscaling": _autoscaling,
    "rented": _rented,
    "gpu_types": _gpu_types,
    "teams": _teams,
    "teams_live": _teams_live,
    "straggler": _straggler,
    "gpu_sharing": _gpu_sharing,
}


def verdicts(report: dict[str, Any]) -> list[Verdict]:
    """One for each item of each part in the report; of a part without figures, that it was not measured."""
    return judge_parts(report, JUDGES)
