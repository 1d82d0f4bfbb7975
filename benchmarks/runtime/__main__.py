"""`make bench-runtime`: every figure of the runtime with its anchor beside it, in out/runtime.json.

python -m benchmarks.runtime [--quick] [part ...]        parts: see PARTS
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import OUT
from benchmarks.runtime import (
    anchors,
    auto,
    coordinator,
    death,
    disaster,
    exactly_once,
    hosts,
    identity,
    links,
    mesh_size,
    overhead,
    quality,
    start,
    straggler,
    switch,
)

TARGETS: dict[str, Any] = {
    "switch": {"join_ms": {"small": 15, "large": 60}, "leave_ms": 10},
    "death": {"median_ms": 80, "largest_ms": 1000, "steps_lost_or_repeated": 0, "frozen": "detection + 1 s"},
    "start": {"cold_s": 4.0, "spare_s": 0.4},
    "overhead": {"fixed": 1.02, "adaptive": 1.05, "consistent": 1.06},
    "sizes": {"ratio": 1.00},
    "links": {"ratio": 1.05},
    "join_across_hosts": {"pause": "at most a normal step, for two newcomers too"},
    "identity": {"identical": True},
    "exactly_once": {"failed": 0, "schedules": 200},
    "hosts": {"longest_gap_s": 5, "steps_of_the_cut_off": 0, "problem": None},
    "straggler": {"after_30_s": 0.9, "replaced": True},
    "coordinator": {"steps_lost_or_repeated": 0, "kills": 10},
    "quality": {
        "modes": "within the spread of 5 runs",
        "noise_scale_error": 0.2,
        "steps": "fewer with more workers",
    },
    "auto": {"accuracy": "within the spread of the plain runs"},
    "disaster": {"lost": "at most the interval", "truncated": "falls back", "disk_full": "training goes on"},
}
ANCHORS: dict[str, Any] = {
    "switch": {"torchrun": "fails, or 3.1 to 3.6 s", "torchft_ms": {"small": 22, "large": 62}},
    "death": {"torchrun": "2.2 to 3.3 s, half of the tries hung", "torchft": "0.5 s tuned, 5 s by default"},
}


def parts(quick: bool) -> dict[str, Callable[[], Any]]:
    """Name -> measurement. `quick` takes a minute or two and is for trying things out."""
    models = ("small", "large")
    few = quick
    return {
        "switch": lambda: {m: switch.measure(m, *((4, 30.0) if few else (10, 120.0))) for m in models},
        "death": lambda: {m: death.measure(m, 5 if few else 50) for m in models} | {"frozen": death.frozen()},
        "start": lambda: {k: start.measure(k, 3 if few else 10) for k in ("cold", "fork", "spare")},
        "overhead": lambda: {m: overhead.measure(m) for m in ("fixed", "adaptive", "consistent")},
        "sizes": overhead.sizes,
        "links": lambda: links.steps(("0.4M", "10M") if few else ("0.4M", "10M", "60M")),
        "join_across_hosts": links.joins,
        "mesh": lambda: mesh_size.measure((2, 8, 32) if few else (2, 4, 8, 16, 32, 64)),
        "torchrun_death": lambda: anchors.torchrun_death(1 if few else 4),
        "torchft_death": lambda: anchors.torchft_death(1 if few else 3),
        "ray_train_death": lambda: anchors.ray_death(1),
        "identity": identity.measure,
        "exactly_once": lambda: exactly_once.measure(10 if few else 200),
        "hosts": lambda: hosts.figures(quick=few),
        "straggler": straggler.measure,
        "coordinator": lambda: coordinator.measure(3 if few else 10),
        "quality": lambda: quality.run(quick=few),
        "auto": lambda: auto.measure(2 if few else 5, 60),
        "disaster": lambda: disaster.run(quick=few),
    }


def main() -> None:
    """Run the parts asked for (all by default) and merge them into out/runtime.json."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces and jobs end with this process
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no part after this time")
    parser.add_argument("parts", nargs="*")
    options = parser.parse_args()
    known = parts(options.quick)
    unknown = [p for p in options.parts if p not in known]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; known are {', '.join(known)}")
    OUT.mkdir(exist_ok=True)
    path = OUT / "runtime.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() and options.parts else {}
    report["machine"] = {"cores": os.cpu_count(), "torch": torch.__version__, "transport": "loopback"}
    started = time.monotonic()
    for name in options.parts or known:
        if time.monotonic() - started > options.minutes * 60:
            report[name] = {"measured": {"skipped": f"{options.minutes:g} minutes were over; run it alone"}}
            path.write_text(json.dumps(report, indent=1))
            print(name, "skipped: no time left", flush=True)
            continue
        load = os.getloadavg()[0]
        begin = time.monotonic()
        report[name] = {
            "measured": known[name](),
            "target": TARGETS.get(name),
            "anchor": ANCHORS.get(name),
            "load_at_start": round(load, 2),
            "wall_s": round(time.monotonic() - begin, 1),
        }
        path.write_text(json.dumps(report, indent=1))
        print(name, json.dumps(report[name]["measured"]), flush=True)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
