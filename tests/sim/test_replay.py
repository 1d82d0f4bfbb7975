"""Replay: an event log comes again, under the same policy the same, under others as they would have it.

The logs here come from the simulator, with what a live control plane writes beside: nodes, work and speeds as
seen. That live logs are replayed as well is tested on a live cluster (tests/cli/test_platform.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from swell.cli import main
from swell.control.views import node_changes
from swell.domain import (
    ANY_GPU,
    Calendar,
    Cluster,
    Event,
    EventKind,
    InputError,
    JobSpec,
    Reservation,
    read_events,
    write_events,
)
from swell.perf.profiles import MeasuredCounts, ProfileSet
from swell.sim import NodeFailure, simulate
from swell.sim.engine import Exploration
from swell.sim.replay import _costs, _profiles, read_log, replay

STARTUP_S, PAUSE_S = 5.0, 1.0
TOLD_S = 4.0
"""What jobs say their start-up took; the rest is lost unseen."""


@dataclass(frozen=True)
class Cost:
    """What the recorded cluster loses at starts and resizes."""

    def seconds(self, state_bytes: float, before: int, after: int, startup_s: float | None = None) -> float:
        return PAUSE_S if before else STARTUP_S


@dataclass
class Meter:
    """Measures how fast a job is on each number of workers, as a live control plane does."""

    done: float = 0.0
    gpus: int = 0
    begins_s: float = 0.0
    noted: float = 0.0
    made: dict[int, tuple[float, float]] = field(default_factory=dict)

    def note(self, now_s: float, done: float, gpus: int, pause_s: float) -> None:
        """The job was `done` so far and has `gpus` from now on, after a pause."""
        made, ran_s = self.made.get(self.gpus, (0.0, 0.0))
        self.made[self.gpus] = made + done - self.noted, ran_s + max(now_s - self.begins_s, 0.0)
        self.noted, self.gpus, self.begins_s = done, gpus, max(self.begins_s, now_s + pause_s)

    @property
    def rates(self) -> dict[str, float]:
        return {str(n): made / ran_s for n, (made, ran_s) in self.made.items() if n and ran_s > 0}


def curve_of(index: int, gpus: int) -> np.ndarray:
    """Iterations per second on 0 to `gpus` GPUs; jobs scale well or badly."""
    counts = np.arange(gpus + 1, dtype=np.float64)
    return (10.0 + index) * counts / (1 + (0.05 + 0.1 * (index % 3)) * np.maximum(counts - 1, 0))


def jobs(count: int = 8, deadline: bool = False) -> list[JobSpec]:
    return [
        JobSpec(
            job_id=f"job-{i}",
            submit_s=7.0 * i,
            model=f"job-{i}",
            batch_size=1,
            work=300.0 + 150.0 * (i % 4),
            deadline_s=7.0 * i + 120.0 if deadline and i % 2 else None,
        )
        for i in range(count)
    ]


def record(
    specs: list[JobSpec],
    policy: str,
    cluster: Cluster,
    failures: tuple[NodeFailure, ...] = (),
    explore: Exploration | None = None,
) -> list[Event]:
    """The log of a run, as a live control plane would have written it (from a moment far from 0)."""
    width = 16
    counts = np.arange(1.0, width + 1)
    curves = {spec.job_id: curve_of(i, width) for i, spec in enumerate(specs)}
    tables = [MeasuredCounts(name, {ANY_GPU: (counts, {1: c[1:]})}, 1e6) for name, c in curves.items()]
    epoch_s = 1_000_000.0
    events = [
        Event(epoch_s - 60, EventKind.NODE_JOINED, node=n.name, data=n.figures | {"gpu_type": "cpu"})
        for n in cluster.nodes
    ]
    seen: dict[str, set[int]] = {}
    meters = {spec.job_id: Meter() for spec in specs}

    def tell(event: Event) -> None:
        data: dict[str, Any] = dict(event.data)
        if event.kind is EventKind.SUBMITTED:
            deadline_s = data.pop("deadline_s")
            data |= {"deadline_s": None if deadline_s is None else epoch_s + deadline_s, "policy": policy}
            data |= {"source": "none" if explore is not None else "history"}
            del data["work"]
        if event.kind is EventKind.PROGRESS:
            meters[str(event.job_id)].done = data["done"]
        if event.kind in (EventKind.ALLOCATED, EventKind.RESIZED, EventKind.PREEMPTED):
            meter, gpus = meters[str(event.job_id)], len(data.get("gpus", ()))
            meter.note(event.time_s, meter.done, gpus, data.get("pause_s", 0.0))
            if gpus:
                seen.setdefault(str(event.job_id), set()).add(gpus)
        if event.kind in (EventKind.FINISHED, EventKind.REJECTED):
            job_id = str(event.job_id)
            sizes = seen.get(job_id) or {1, 2, 4}
            work = next(s.work for s in specs if s.job_id == job_id)
            data |= {"work": work, "params": None, "pause_s": 0.1, "startup_s": TOLD_S}
            data |= {"rates": {str(n): float(curves[job_id][n]) for n in sizes}}
            if cluster.per_gpu > 1 and event.kind is EventKind.FINISHED:
                meters[job_id].note(event.time_s, work, 0, 0.0)
                data |= {"rates": meters[job_id].rates}
        events.append(replace(event, time_s=epoch_s + event.time_s, data=data))

    simulate(
        specs,
        ProfileSet(tables),
        cluster,
        policy,
        interval_s=0.0,
        resize_cost=Cost(),
        failures=failures,
        explore=explore,
        on_event=tell,
    )
    return events


@pytest.mark.parametrize("policy", ["afs-l", "elasticflow", "tiresias", "max-min"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_the_same_policy_on_the_same_cluster_gives_the_same(policy: str, known: bool) -> None:
    explore = None if known else Exploration.of(3.0, ())
    log = record(jobs(), policy, Cluster.parse("1x4"), explore=explore)
    live, again = replay(log, [policy])
    assert live["finished"] == again["finished"] == 8
    assert again["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.05)
    assert again["utilisation"] == pytest.approx(live["utilisation"], rel=0.10)


def test_what_happened_is_told_as_it_was() -> None:
    log = record(jobs(deadline=True), "elasticflow", Cluster.parse("1x4"))
    (live,) = replay(log, [])
    ends = [e for e in log if e.kind is EventKind.FINISHED]
    assert live["avg_jct_s"] == pytest.approx(np.mean([e.data["jct_s"] for e in ends]))
    assert live["policy"] == "what happened (elasticflow)"
    assert live["cluster"] == "1x4"
    assert live["deadline_jobs"] == 4
    assert live["deadline_met"] == sum(e.data["met"] is True for e in ends)
    assert live["finished"] + live["refused"] == 8
    assert 0.3 < live["utilisation"] <= 1.0


def test_costs_are_found_in_the_log() -> None:
    log = read_log(record(jobs(), "afs-l", Cluster.parse("1x4")))
    cost = _costs(log, Cluster.parse("1x4"))
    assert cost.extra_s == pytest.approx(STARTUP_S - TOLD_S, rel=0.2)
    assert cost.pause_s == pytest.approx(PAUSE_S, rel=0.2)


def test_a_profile_of_a_replayed_job_has_seconds_as_seconds() -> None:
    cluster = Cluster.parse("1x4")
    log = read_log(record(jobs(), "afs-l", cluster))
    for job, profile in zip(log.jobs, _profiles(log, cluster), strict=True):
        assert profile.startup_s == job.startup_s > 0 and profile.model_bytes == 0.0
    cost, (some, *_) = _costs(log, cluster), log.jobs
    assert cost.seconds(1e12, 0, 1, some.startup_s) == some.startup_s + cost.extra_s, (
        "bytes cost nothing here"
    )


def test_a_resize_during_start_up_does_not_cut_it_short() -> None:
    specs = [replace(spec, submit_s=0.1 * i) for i, spec in enumerate(jobs(2))]
    log = record(specs, "afs-l", Cluster.parse("1x4"))
    first = [e for e in log if e.job_id == "job-0" and e.kind is not EventKind.PROGRESS]
    assert [e.kind for e in first[2:4]] == [EventKind.ALLOCATED, EventKind.RESIZED]
    most = float(curve_of(0, 4)[4])
    assert first[-1].data["jct_s"] >= STARTUP_S + specs[0].work / most


def test_a_larger_cluster_would_have_been_faster_and_emptier() -> None:
    log = record(jobs(), "afs-l", Cluster.parse("1x4"))
    live, larger = replay(log, ["afs-l"], Cluster.parse("4x4"))
    assert larger["cluster"] == "4x4"
    assert larger["avg_jct_s"] < 0.8 * live["avg_jct_s"]
    assert larger["utilisation"] < live["utilisation"]


def test_a_job_that_was_refused_runs_under_a_policy_that_refuses_nothing() -> None:
    specs = [replace(spec, deadline_s=spec.submit_s + 12.0) for spec in jobs()]
    log = record(specs, "elasticflow", Cluster.parse("1x2"))
    live, same, other = replay(log, ["elasticflow", "afs-l"])
    assert live["refused"] > 0
    assert same["refused"] == live["refused"]
    assert other["refused"] == 0
    assert other["finished"] == 8
    assert other["deadline_met"] <= live["deadline_met"] + live["refused"]


def test_a_job_that_failed_holds_its_gpus_again_and_has_no_jct() -> None:
    log = record(jobs(), "fifo", Cluster.parse("1x1"))
    failed = [
        replace(e, kind=EventKind.FAILED) if e.kind is EventKind.FINISHED and e.job_id == "job-0" else e
        for e in log
    ]
    live, again = replay(failed, ["fifo"])
    assert live["finished"] == again["finished"] == 7
    assert again["makespan_s"] == pytest.approx(live["makespan_s"], rel=0.05)


def test_jobs_under_way_are_left_out_and_counted() -> None:
    log = [e for e in record(jobs(), "afs-l", Cluster.parse("1x4")) if e.time_s < 1_000_060]
    live, _ = replay(log, ["afs-l"])
    ended = sum(e.kind is EventKind.FINISHED for e in log)
    assert live["jobs"] == ended
    assert live["left_out"] == 8 - ended > 0


def test_a_node_that_was_lost_is_lost_again() -> None:
    failures = (NodeFailure(1, 20.0, 60.0),)
    log = record(jobs(), "afs-l", Cluster.parse("2x2"), failures)
    live, again = replay(log, ["afs-l"])
    assert again["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.07)
    whole = [e for e in log if e.kind is not EventKind.NODE_LOST]
    assert replay(whole, ["afs-l"])[1]["avg_jct_s"] < again["avg_jct_s"]


def test_a_log_file_says_the_same_as_the_events() -> None:
    log = record(jobs(), "afs-l", Cluster.parse("1x4"))
    assert replay(read_events(write_events(log)), ["max-min"]) == replay(log, ["max-min"])


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (lambda e: e.kind is not EventKind.FINISHED, "no job in the log has ended yet"),
        (lambda e: e.node is None, "the log names no nodes"),
    ],
)
def test_a_log_that_cannot_be_replayed_is_refused(keep: Callable[[Event], bool], expected: str) -> None:
    log = [e for e in record(jobs(), "afs-l", Cluster.parse("1x4")) if keep(e)]
    with pytest.raises(InputError, match=expected):
        replay(log, ["afs-l"])


def test_a_job_that_never_said_how_far_it_is_holds_its_gpus_as_long_again() -> None:
    log = [
        replace(e, data=dict(e.data) | {"work": 0.0, "rates": {}}) if e.kind is EventKind.FINISHED else e
        for e in record(jobs(3), "fifo", Cluster.parse("1x4"))
    ]
    live, again = replay(log, ["fifo"])
    assert again["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.02)


def test_policies_that_decide_in_rounds_are_not_kept_waiting_for_them() -> None:
    log = record(jobs(), "afs-l", Cluster.parse("1x4"))
    live, pollux = replay(log, ["pollux"])
    assert pollux["finished"] == 8
    assert pollux["avg_jct_s"] < 2 * live["avg_jct_s"]


def test_jobs_explore_by_doubling_once_they_are_known_at_a_size() -> None:
    spec = replace(jobs(1)[0], work=5000.0)
    log = record([spec], "afs-l", Cluster.parse("1x8"), explore=Exploration.of(3.0, ()))
    sizes = [len(e.data["gpus"]) for e in log if e.kind in (EventKind.ALLOCATED, EventKind.RESIZED)]
    moments = [e.time_s - 1_000_000 for e in log if e.kind in (EventKind.ALLOCATED, EventKind.RESIZED)]
    assert sizes == [1, 2, 4, 8]
    assert np.diff(moments) == pytest.approx([STARTUP_S + 3.0, PAUSE_S + 3.0, PAUSE_S + 3.0])


def test_what_was_reserved_is_reserved_again() -> None:
    def held(at_s: float, name: str, gpus: list[int]) -> Event:
        return Event(at_s, EventKind.HELD, data={"reservation": name, "gpus": gpus, "before": []})

    log = read_log(
        [
            Event(1.0, EventKind.RESERVED, data={"reservation": "web", "most": 3}),
            held(5.0, "web", [0, 1]),
            held(6.0, "night", [4]),
            held(9.0, "night", []),
            held(11.0, "web", []),
        ]
    )
    web = Reservation(name="web", most=3)
    assert log.calendar == Calendar((web, Reservation(name="night.0", gpus=1, start_s=6.0, end_s=9.0)))
    assert [(one.at_s, one.gpus) for one in log.demand] == [(5.0, 2), (11.0, 0)]


# -- several jobs on one GPU ---------------------------------------------------------------------------------


def without(log: list[Event], kind: EventKind, name: str) -> list[Event]:
    """The log without one figure of the events of a kind."""
    return [
        replace(e, data={k: v for k, v in e.data.items() if k != name}) if e.kind is kind else e for e in log
    ]


def on_one_gpu(fill: float, slots: int = 2) -> list[Event]:
    """Two jobs that began at the same time and shared one GPU to their end."""
    specs = [replace(spec, submit_s=0.0, work=1000.0, fill=fill, max_gpus=1) for spec in jobs(2)]
    return record(specs, "max-min", Cluster.parse("1x1").shared_by(slots))


@pytest.mark.parametrize("policy", ["afs-l", "elasticflow", "max-min"])
@pytest.mark.parametrize("fills", [(0.2, 0.3), (0.3, 1.0), (1.0,)], ids=str)
def test_the_same_policy_on_the_same_shared_gpus_gives_the_same(
    policy: str, fills: tuple[float, ...]
) -> None:
    specs = [replace(spec, fill=fills[i % len(fills)]) for i, spec in enumerate(jobs())]
    live, again = replay(record(specs, policy, Cluster.parse("1x2").shared_by(4)), [policy])
    assert (live["cluster"], live["per_gpu"]) == (again["cluster"], again["per_gpu"]) == ("1x2", 4)
    assert live["finished"] == again["finished"] == 8
    assert again["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.07)
    assert again["utilisation"] == pytest.approx(live["utilisation"], rel=0.10)


def test_jobs_that_took_turns_are_twice_as_fast_with_a_gpu_each() -> None:
    live, again, apart = (
        *replay(on_one_gpu(1.0), ["max-min"]),
        replay(on_one_gpu(1.0), ["max-min"], Cluster.parse("1x2"))[1],
    )
    assert again["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.02)
    assert (apart["cluster"], apart["per_gpu"]) == ("1x2", 2)
    assert apart["avg_jct_s"] - STARTUP_S == pytest.approx((live["avg_jct_s"] - STARTUP_S) / 2, rel=0.05)


def test_jobs_that_left_each_other_room_gain_little_from_a_gpu_each() -> None:
    live, apart = replay(on_one_gpu(0.4), ["max-min"], Cluster.parse("1x2"))
    assert 0.9 * live["avg_jct_s"] < apart["avg_jct_s"] < live["avg_jct_s"]


def test_a_log_without_fills_is_replayed_as_if_jobs_filled_their_gpus_and_says_so() -> None:
    log = without(on_one_gpu(0.4), EventKind.SUBMITTED, "fill")
    live, again = replay(log, ["max-min"])
    assert again["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.02)
    (said,) = live["assumed"]
    assert "does not say of 2 jobs which part of a GPU's time" in said and "slow each other" in said
    moved, apart = replay(log, ["max-min"], Cluster.parse("1x2"))
    assert "Each GPU of 1x2 is taken to be 2 slots" in moved["assumed"][0]
    assert apart["avg_jct_s"] < 0.6 * live["avg_jct_s"]
    assert replay(on_one_gpu(0.4), [])[0]["assumed"] == []


def test_a_log_that_does_not_say_which_slots_share_gpus_has_a_gpu_for_each_and_says_so() -> None:
    live, again = replay(without(on_one_gpu(1.0), EventKind.NODE_JOINED, "per_gpu"), ["max-min"])
    assert (live["cluster"], live["per_gpu"]) == ("1x2", 1)
    assert again["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.02)
    assert live["assumed"] == [
        "The log does not say whether slots share GPUs: each slot is taken for a GPU of its own."
    ]


def test_a_job_that_never_said_how_far_it_is_is_as_slow_beside_its_neighbours_again() -> None:
    log = [
        replace(e, data=dict(e.data) | {"work": 0.0, "rates": {}}) if e.kind is EventKind.FINISHED else e
        for e in on_one_gpu(1.0)
    ]
    live, again = replay(log, ["max-min"])
    assert again["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.02)


def test_the_command_says_what_is_assumed_below_its_table(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(write_events(without(on_one_gpu(0.4), EventKind.SUBMITTED, "fill"))))
    done = CliRunner().invoke(main, ["replay", "--from", str(file), "--policy", "max-min"])
    assert done.exit_code == 0, done.output
    assert "The log does not say of 2 jobs which part of a GPU's time" in done.output


def test_a_live_log_says_how_many_slots_share_a_gpu() -> None:
    (joined,) = node_changes({}, {"n0": [8, "h200", 4]}, 5.0)
    assert joined.data == {"gpus": 8, "gpu_type": "h200", "per_gpu": 4}
    assert [e.data["per_gpu"] for e in node_changes({}, {"n0": [8, "h200"]}, 5.0)] == [1]
    (told,) = node_changes({"n0": [8, "h200"]}, {"n0": [8, "h200", 4]}, 5.0)
    assert told.kind is EventKind.NODE_JOINED, "what an earlier version did not write is no loss"
    kinds = [e.kind for e in node_changes({"n0": [2, "h200"]}, {"n0": [8, "h200", 4]}, 5.0)]
    assert kinds == [EventKind.NODE_LOST, EventKind.NODE_JOINED]
