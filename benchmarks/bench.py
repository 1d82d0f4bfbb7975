"""One command for many figures: parts that run in processes of their own, and a verdict for each item.

A *suite* (`python -m benchmarks.runtime`, `python -m benchmarks.cluster`) has parts and judges. Each part
runs in a process of its own with a time limit. A part that fails is reported, and the others go on. Judges
are pure: figures in, verdicts out. Everything is written to out/NAME.json, and messages of a part to
out/NAME/PART.log.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.children import Limited
from benchmarks.common import OUT, table

LANES = 3
"""How many parts run at the same time if their figures are not times."""


class Verdict(NamedTuple):
    """One item: what was found against what must be shown."""

    part: str
    item: str
    goal: str
    found: Any
    holds: bool | None
    """None: it was not measured."""


Judge = Callable[[Any], Iterable[Verdict]]
"""Takes the figures of a part, and gives a verdict for each of its items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part, which runs in a process of its own."""

    measure: Callable[[bool], Any]
    """Takes whether to be quick, and returns the figures."""
    expected_s: float
    """About how long it takes on two quiet cores."""
    alone: bool = True
    """Whether nothing else may run beside it, because its figures are times."""

    @property
    def limit_s(self) -> float:
        """After this long the part is ended and counts as failed."""
        return 60.0 + 2.5 * self.expected_s


def at_most(part: str, item: str, found: float | None, limit: float, unit: str = "") -> Verdict:
    """A figure that must not be above its limit."""
    holds = None if found is None else found <= limit
    return Verdict(part, item, f"at most {limit:g}{unit}", found, holds)


def at_least(part: str, item: str, found: float | None, limit: float, unit: str = "") -> Verdict:
    """A figure that must not be below its limit."""
    holds = None if found is None else found >= limit
    return Verdict(part, item, f"at least {limit:g}{unit}", found, holds)


def same(part: str, item: str, found: Any, wanted: Any) -> Verdict:
    """A finding that must be exactly this one."""
    return Verdict(part, item, f"{wanted}", found, found == wanted)


def why_not(figures: dict[str, Any]) -> str | None:
    """Why a part has no figures, if it has none."""
    return next((f"{key}: {figures[key]}" for key in ("error", "skipped") if key in figures), None)


def judge_parts(report: Mapping[str, Any], judges: Mapping[str, Judge]) -> list[Verdict]:
    """One for each item of each part in the report; of a part without figures, that it was not measured."""
    out: list[Verdict] = []
    for part, judge in judges.items():
        if part not in report:
            continue
        figures = report[part]["measured"]
        reason = why_not(figures)
        if reason is not None:
            out.append(Verdict(part, "measured", "yes", reason, False if "error" in figures else None))
        else:
            try:
                out += list(judge(figures))
            except (KeyError, TypeError, StopIteration) as error:  # of another version, say
                out.append(Verdict(part, "measured", "yes", f"not understood: {error!r}", False))
    return out


def show(found: Sequence[Verdict]) -> None:
    """Print the verdicts as a table."""
    words = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
    rows = [[v.part, v.item, v.goal, str(v.found)[:80], words[v.holds]] for v in found]
    table("Must show", ["part", "item", "goal", "found", ""], rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Parts that are run by one command, and how their figures are judged."""

    name: str
    """Of the file out/NAME.json, and of the package benchmarks.NAME whose `__main__` runs the suite."""
    parts: Mapping[str, Part]
    """In the order in which they begin, except that those with `alone` come first."""
    verdicts: Callable[[dict[str, Any]], list[Verdict]]
    minutes: float
    """No part begins that would end later, unless `--minutes` says otherwise."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """What the report says of the machine, besides its cores and the version of torch."""
    prepare: Callable[[Sequence[str]], None] = lambda names: None
    """Called with the parts that are going to run, before the first of them."""

    @property
    def command(self) -> list[str]:
        """What runs the suite."""
        return [sys.executable, "-m", f"benchmarks.{self.name}"]


class Begun(NamedTuple):
    """A part that is running."""

    name: str
    process: Limited
    result: Path
    at_s: float
    load: float


class Bench:
    """The report of a suite while it is being made."""

    def __init__(
        self, suite: Suite, report: dict[str, Any], *, quick: bool, minutes: float, out: Path = OUT
    ) -> None:
        self._suite, self._report = suite, report
        self._path, self._folder = out / f"{suite.name}.json", out / suite.name
        self._quick = quick
        self._minutes = minutes
        self._began_s = time.monotonic()
        self._running: list[Begun] = []

    def run(self, names: Sequence[str]) -> None:
        """Run these parts: those whose figures are times one by one, then the others, some at a time."""
        parts = self._suite.parts
        waiting = sorted(names, key=lambda name: not parts[name].alone)
        total = len(waiting)
        try:
            while waiting or self._running:
                while waiting and self._may_begin(waiting[0]):
                    name = waiting.pop(0)
                    self._begin(name, f"[{total - len(waiting)}/{total}]")
                for begun in [one for one in self._running if one.process.over()]:
                    self._running.remove(begun)
                    self._note(begun)
                time.sleep(0.2)
        finally:
            for begun in self._running:
                begun.process.end()

    def _may_begin(self, name: str) -> bool:
        """Nothing runs beside a part whose figures are times."""
        parts = self._suite.parts
        running = [parts[begun.name] for begun in self._running]
        alone = parts[name].alone or any(part.alone for part in running)
        return len(running) < (1 if alone else LANES)

    def _begin(self, name: str, place: str) -> None:
        part = self._suite.parts[name]
        expected_s = part.expected_s / (4 if self._quick else 1)
        passed_s = time.monotonic() - self._began_s
        if passed_s + expected_s > self._minutes * 60:
            self._report[name] = {
                "measured": {"skipped": f"it would not end within {self._minutes:g} minutes"}
            }
            self._save()
            self._say(f"{place} {name}: skipped, not enough time; run it with --minutes, or alone")
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        result = self._folder / f"{name}.json"
        result.unlink(missing_ok=True)
        command = [*self._suite.command, "--one", str(result), name, *["--quick"] * self._quick]
        self._say(f"{place} {name}: about {expected_s:.0f} s")
        process = Limited(command, self._folder / f"{name}.log", part.limit_s)
        load = round(os.getloadavg()[0], 2)
        self._running.append(Begun(name, process, result, time.monotonic(), load))

    def _note(self, begun: Begun) -> None:
        problem = begun.process.problem()
        found = {"error": problem} if problem is not None else json.loads(begun.result.read_text())
        wall_s = round(time.monotonic() - begun.at_s, 1)
        entry = {"measured": found, "load_at_start": begun.load, "wall_s": wall_s}
        self._report[begun.name] = entry | ({"quick": True} if self._quick else {})
        self._save()
        self._say(f"{begun.name}: {why_not(found) or f'done in {wall_s:.0f} s'}")

    def _save(self) -> None:
        found = self._suite.verdicts(self._report)
        self._report["verdicts"] = [verdict._asdict() for verdict in found]
        writing = self._path.with_suffix(".writing")
        writing.write_text(json.dumps(self._report, indent=1))
        writing.rename(self._path)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.0f} s  {text}", flush=True)


def main(suite: Suite, description: str) -> None:
    """Run the parts asked for (all by default), merge their figures into out/NAME.json, and show verdicts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces and jobs end with this process
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, to see whether the parts work")
    parser.add_argument(
        "--minutes", type=float, default=suite.minutes, help="begin no part that would end later"
    )
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(suite.parts)}")
    options = parser.parse_args()
    if unknown := [p for p in options.parts if p not in suite.parts]:
        parser.error(f"unknown parts {', '.join(unknown)}; known are {', '.join(suite.parts)}")
    if options.one is not None:
        found = suite.parts[options.parts[0]].measure(options.quick)
        options.one.write_text(json.dumps(found))
        return
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{suite.name}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() and options.parts else {}
    report["machine"] = {"cores": os.cpu_count(), "torch": version("torch"), **suite.machine}
    names = list(options.parts or suite.parts)
    suite.prepare(names)
    Bench(suite, report, quick=options.quick, minutes=options.minutes).run(names)
    show(suite.verdicts(report))
    print(f"\nwritten to {path}")
