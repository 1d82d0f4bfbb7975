"""Everything behind the figures of the scheduling core, one after the other: `make bench`."""

from __future__ import annotations

import runpy
import sys
import time

SCRIPTS = (
    "fidelity",
    "deadlines",
    "elasticflow",
    "promises",
    "afs",
    "speed",
    "decision_time",
    "pollux_fitness",
    "tide",
    "tournament",
    "gpu_types",
    "fractions",
    "autoscaling",
)


def main() -> None:
    """Run them all; exit code 1 if one of them found what must not be."""
    failed = []
    for name in SCRIPTS:
        sys.argv = [name] + (["--plot"] if name == "decision_time" else [])
        started = time.monotonic()
        print(f"\n== benchmarks/{name}.py")
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        except SystemExit as end:
            if end.code:
                failed.append(name)
        print(f"\n({time.monotonic() - started:.0f} s)")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
