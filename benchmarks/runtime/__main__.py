"""`make bench-runtime`: every figure of the runtime, with its goal and what others need, in out/runtime.json.

    python -m benchmarks.runtime [--quick] [--minutes 30] [part ...]

All of it takes about 25 minutes on two quiet cores. Each part runs in a process of its own with a time limit.
A part that fails is reported, and the others go on. Without parts all of them run; with some, their figures
replace those in the file. Messages of a part are in
out/runtime/PART.log. What torchft and Ray Train need is installed once into build/anchors; where that fails,
their parts are skipped and say why.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bench import Suite, main
from benchmarks.runtime.anchors import packages
from benchmarks.runtime.parts import PARTS
from benchmarks.runtime.verdicts import verdicts


def _prepare(names: Sequence[str]) -> None:
    """Install what other systems need, if they are measured."""
    if {"torchft", "ray_train"} & set(names):
        packages.prepare(print)


SUITE = Suite(
    name="runtime",
    parts=PARTS,
    verdicts=verdicts,
    minutes=30.0,
    machine={"transport": "loopback"},
    prepare=_prepare,
)

if __name__ == "__main__":
    main(SUITE, __doc__)
