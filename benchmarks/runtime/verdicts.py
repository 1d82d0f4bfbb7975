"""Whether the figures of `make bench-runtime` are what they must be. Pure: a report in, verdicts out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Judge, Verdict, at_least, at_most, judge_parts, same, why_not

NOT_WORSE = 1.25
"""A figure counts as worse than an earlier one if it is this many times as large: medians of few vary."""
EARLIER_MS = {"join": {"small": 7, "large": 23}, "death": {"small": 18, "large": 39}}
ROUND_TRIPS_MS = 2
"""What two round trips between two hosts may add, with the network's queue."""
EARLIER_S = {"fork": 0.16, "spare": 0.03}


def _switch(figures: Any) -> Iterator[Verdict]:
    for model, limit in (("small", 15), ("large", 60)):
        join, leave = figures[model]["join"]["median_ms"], figures[model]["leave"]["median_ms"]
        yield at_most("switch", f"join, {model}", join, limit, " ms")
        yield _earlier("switch", f"join, {model}", join, EARLIER_MS["join"][model], " ms")
        yield at_most("switch", f"leave, {model}", leave, 10, " ms")


def _earlier(part: str, item: str, found: float, before: float, unit: str) -> Verdict:
    goal = f"not worse than {before:g}{unit} (by more than {NOT_WORSE - 1:.0%})"
    return Verdict(part, item, goal, found, found <= before * NOT_WORSE)


def _death(figures: Any) -> Iterator[Verdict]:
    for model in ("small", "large"):
        found = figures[model]
        yield at_most("death", f"median, {model}", found["median_ms"], 80, " ms")
        before = EARLIER_MS["death"][model]
        yield _earlier("death", f"median, {model}", found["median_ms"], before, " ms")
        yield at_most("death", f"largest, {model}", found["largest_ms"], 1000, " ms")
        yield same("death", f"steps lost or repeated, {model}", found["steps_lost_or_repeated"], 0)
    frozen = figures["frozen"]
    limit = frozen["detection_s"] + 1.0
    yield at_most(
        "death", "training again after a worker froze", frozen["training_again_after_s"], limit, " s"
    )


def _start(figures: Any) -> Iterator[Verdict]:
    yield at_most("start", "from nothing", figures["cold"]["median_s"], 4.0, " s")
    yield at_most("start", "from a spare", figures["spare"]["median_s"], 0.4, " s")
    for kind, before in EARLIER_S.items():
        yield _earlier("start", kind, figures[kind]["median_s"], before, " s")


def _overhead(figures: Any) -> Iterator[Verdict]:
    for mode, limit in (("fixed", 1.02), ("adaptive", 1.05), ("consistent", 1.06)):
        yield at_most("overhead", f"step of {mode} mode over DDP's", figures[mode]["ratio"], limit)


def _sizes(figures: Any) -> Iterator[Verdict]:
    for size, found in figures.items():
        yield at_most("sizes", f"step over DDP's, {size}", found["ratio"], 1.00)
    yield _during_backward("sizes", "one host, 60M", figures.get("60M"))


def _links(figures: Any) -> Iterator[Verdict]:
    for rate, sizes in figures.items():
        for size, found in sizes.items():
            yield at_most("links", f"step over DDP's on two hosts, {rate}, {size}", found["ratio"], 1.05)
    yield _during_backward("links", "two hosts, 60M", figures.get("no limit", {}).get("60M"))


def _during_backward(part: str, where: str, found: Any) -> Verdict:
    """How many pieces were summed before backward had ended."""
    item, goal = f"pieces summed during backward, {where}", "at least 1"
    if found is None or not found["timeline"]:
        return Verdict(part, item, goal, None, None)
    over = next(end for what, _, end in found["timeline"] if what == "backward")
    count = sum(what == "add" and end <= over for what, _, end in found["timeline"])
    return Verdict(part, item, goal, count, count >= 1)


def _joins(figures: Any) -> Iterator[Verdict]:
    part = "join_across_hosts"
    for newcomers in [key for key in figures if key.endswith("newcomers")]:
        found = figures[newcomers]
        item, normal_ms = f"pause of a join at 1 Gbit/s, {newcomers}", found["normal_step_ms"]
        yield at_most(part, item, found["pause_ms"], normal_ms, " ms, a normal step")
    for what, limit_ms in (("leave", 10), ("death", 80)):
        paused = max(figures[what]["pause_ms"], default=None)
        yield at_most(part, f"{what} at 1 Gbit/s, largest pause", paused, limit_ms + ROUND_TRIPS_MS, " ms")


def _hosts(figures: Any) -> Iterator[Verdict]:
    for case, found in figures.items():
        if "longest_gap_s" in found:
            yield at_most("hosts", f"standstill, {case}", found["longest_gap_s"], 5, " s")
            if "steps_of_the_cut_off" in found:
                yield same("hosts", f"steps of the cut off, {case}", found["steps_of_the_cut_off"], 0)
        yield same("hosts", f"every sample once, {case}", found["problem"] or "yes", "yes")


def _exactly_once(figures: Any) -> Iterator[Verdict]:
    yield same("exactly_once", "schedules that failed", figures["failed"], 0)
    played = figures["schedules"]
    yield Verdict("exactly_once", "schedules played", "200", played, played >= 200)


def _straggler(figures: Any) -> Iterator[Verdict]:
    speed = figures["after_30_s"]
    yield at_least("straggler", "speed 30 s after a worker became slow", speed, 0.9)
    yield same("straggler", "the slow worker was replaced", figures["replaced"], True)


def _auto(figures: Any) -> Iterator[Verdict]:
    for what in ("accuracy", "loss"):
        yield same("auto", f"{what} within the spread of plain runs", figures[what]["within_spread"], True)


def _passed(part: str) -> Judge:
    return lambda figures: iter([same(part, "passed", figures["passed"], True)])


JUDGES: dict[str, Judge] = {
    "switch": _switch,
    "death": _death,
    "start": _start,
    "overhead": _overhead,
    "sizes": _sizes,
    "links": _links,
    "join_across_hosts": _joins,
    "hosts": _hosts,
    "hosts_at_random": _hosts,
    "exactly_once": _exactly_once,
    "identity": lambda f: iter([same("identity", "one hash", f["identical"], True)]),
    "coordinator": lambda f: iter(
        [same("coordinator", "steps lost or repeated", f["steps_lost_or_repeated"], 0)]
    ),
    "straggler": _straggler,
    "disaster": _passed("disaster"),
    "quality": _passed("quality"),
    "auto": _auto,
}
ANCHORS = {"torchrun": "torchrun", "torchft": "torchft", "ray_train": "Ray Train, elastic"}


def verdicts(report: dict[str, Any]) -> list[Verdict]:
    """One for each item of each part in the report; of a part without figures, that it was not measured."""
    return judge_parts(report, JUDGES) + list(_anchored(report))


def _anchored(report: dict[str, Any]) -> Iterator[Verdict]:
    """Our pauses and our step beside those of others."""
    for part, name in ANCHORS.items():
        if part not in report:
            continue
        figures = report[part]["measured"]
        if (reason := why_not(figures)) is not None:
            yield Verdict(part, f"pauses: {name}", "ours are shorter", reason, None)
            continue
        for what, ours_in in (("death", "death small"), ("join", "switch small join")):
            ours_ms = _ours(report, f"{ours_in} median_ms")
            yield _beside(part, f"pause of a {what}: {name}", ours_ms, figures.get(what, {}))
        if "step" in figures:
            ours, theirs = _ours(report, "overhead fixed ratio"), figures["step"].get("ratio")
            holds = None if ours is None or theirs is None else ours < theirs
            found = f"{theirs}x, ours {ours}x"
            yield Verdict(part, f"step over DDP's: {name}", "ours is shorter", found, holds)


def _ours(report: dict[str, Any], path: str) -> float | None:
    """One of our own figures, or None if its part was not measured."""
    part, *keys = path.split()
    found: Any = report.get(part, {}).get("measured", {})
    for key in keys:
        found = found.get(key, {})
    return found if isinstance(found, float | int) else None


def _beside(part: str, item: str, ours_ms: float | None, figures: dict[str, Any]) -> Verdict:
    """Another system's median over the rounds in which it went on; the others are told with it."""
    theirs_s, rounds, failed = figures.get("median_s"), figures.get("rounds", 0), figures.get("failed", [])
    words = "not measured" if theirs_s is None else f"{theirs_s} s, ours {ours_ms} ms"
    if failed:
        words += f"; {len(failed)} of {rounds} rounds failed: {failed[0]}"
    holds = None if ours_ms is None or theirs_s is None else ours_ms < theirs_s * 1e3
    return Verdict(part, item, "ours is shorter", words, holds)
