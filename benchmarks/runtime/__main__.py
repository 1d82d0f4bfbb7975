"""`make bench-runtime`: every figure of the runtime, with its goal and what others need, in out/runtime.json.

    python -m benchmarks.runtime [--quick] [--minutes 30] [part ...]

All of it takes about 25 minutes on two quiet cores. Each part runs in a process of its own with a time limit.
A part that fails is reported, and the others go on. Without parts all of them run; with some, their figures
replace those in the file. Messages of a part are in
out/runtime/PART.log. What torchft and Ray Train need is installed once into build/anchors; where that fails,
their parts are skipped and say why.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import OUT, table
from benchmarks.runtime.anchors import packages
from benchmarks.runtime.children import Limited
from benchmarks.runtime.parts import PARTS
from benchmarks.runtime.verdicts import Verdict, verdicts, why_not

LANES = 3
"""How many parts run at the same time if their figures are not times."""


class Begun(NamedTuple):
    """A part that is running."""

    name: str
    process: Limited
    result: Path
    at_s: float
    load: float


class Bench:
    """The report while it is being made."""

    def __init__(self, path: Path, report: dict[str, Any], *, quick: bool, minutes: float) -> None:
        self._path, self._report = path, report
        self._quick = quick
        self._minutes = minutes
        self._began_s = time.monotonic()
        self._running: list[Begun] = []

    def run(self, names: list[str]) -> None:
        """Run these parts: those whose figures are times one by one, then the others, some at a time."""
        waiting = sorted(names, key=lambda name: not PARTS[name].alone)
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
        running = [PARTS[begun.name] for begun in self._running]
        alone = PARTS[name].alone or any(part.alone for part in running)
        return len(running) < (1 if alone else LANES)

    def _begin(self, name: str, place: str) -> None:
        expected_s = PARTS[name].expected_s / (4 if self._quick else 1)
        passed_s = time.monotonic() - self._began_s
        if passed_s + expected_s > self._minutes * 60:
            self._report[name] = {
                "measured": {"skipped": f"it would not end within {self._minutes:g} minutes"}
            }
            self._save()
            self._say(f"{place} {name}: skipped, not enough time; run it with --minutes, or alone")
            return
        folder = OUT / "runtime"
        folder.mkdir(parents=True, exist_ok=True)
        result = folder / f"{name}.json"
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.runtime", "--one", str(result), name]
        command += ["--quick"] * self._quick
        self._say(f"{place} {name}: about {expected_s:.0f} s")
        process = Limited(command, folder / f"{name}.log", PARTS[name].limit_s)
        load = round(os.getloadavg()[0], 2)
        self._running.append(Begun(name, process, result, time.monotonic(), load))

    def _note(self, begun: Begun) -> None:
        problem = begun.process.problem()
        found = {"error": problem} if problem is not None else json.loads(begun.result.read_text())
        wall_s = round(time.monotonic() - begun.at_s, 1)
        self._report[begun.name] = {"measured": found, "load_at_start": begun.load, "wall_s": wall_s}
        self._save()
        self._say(f"{begun.name}: {why_not(found) or f'done in {wall_s:.0f} s'}")

    def _save(self) -> None:
        found = verdicts(self._report)
        self._report["verdicts"] = [verdict._asdict() for verdict in found]
        writing = self._path.with_suffix(".writing")
        writing.write_text(json.dumps(self._report, indent=1))
        writing.rename(self._path)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.0f} s  {text}", flush=True)


def show(found: list[Verdict]) -> None:
    """Print the verdicts as a table."""
    words = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
    rows = [[v.part, v.item, v.goal, str(v.found)[:80], words[v.holds]] for v in found]
    table("Must show", ["part", "item", "goal", "found", ""], rows)


def main() -> None:
    """Run the parts asked for (all by default) and merge them into out/runtime.json."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces and jobs end with this process
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, to see whether the parts work")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no part that would end later")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    if unknown := [p for p in options.parts if p not in PARTS]:
        parser.error(f"unknown parts {', '.join(unknown)}; known are {', '.join(PARTS)}")
    if options.one is not None:
        found = PARTS[options.parts[0]].measure(options.quick)
        options.one.write_text(json.dumps(found))
        return
    OUT.mkdir(exist_ok=True)
    path = OUT / "runtime.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() and options.parts else {}
    report["machine"] = {"cores": os.cpu_count(), "torch": torch.__version__, "transport": "loopback"}
    bench = Bench(path, report, quick=options.quick, minutes=options.minutes)
    names = list(options.parts or PARTS)
    if {"torchft", "ray_train"} & set(names):
        packages.prepare(print)
    bench.run(names)
    show(verdicts(report))
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
