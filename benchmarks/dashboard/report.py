"""The report on the four ElasticFlow traces under six policies: how large it is, how long it takes to make.

python -m benchmarks.dashboard.report [FILE]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.common import OUT, data_dir
from benchmarks.deadlines import TRACES
from swell.domain import Cluster, Event
from swell.perf.profiles import ProfileSet
from swell.report.page import page
from swell.report.runs import Run
from swell.sim import simulate
from swell.sim.traces import load_trace

POLICIES = ("elasticflow", "tide-fixed", "afs-l", "tiresias", "gandiva", "edf")


def main() -> None:
    """Simulate, then make the report, and print the figures as JSON."""
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT / "report.html"
    where.parent.mkdir(parents=True, exist_ok=True)
    data, groups, jobs = data_dir() / "elasticflow", [], 0
    for name, cluster, kind in TRACES:
        profiles = ProfileSet.load(data / f"throughputs_{kind}")
        trace = load_trace(data / f"{name}.csv", profiles)
        jobs += len(trace.jobs)
        logs: list[tuple[str, list[Event]]] = []
        for policy in POLICIES:
            events: list[Event] = []
            simulate(
                trace.jobs, profiles, Cluster.parse(cluster), policy, resize_cost=5.0, on_event=events.append
            )
            logs.append((policy, events))
            print(name, policy, len(events), file=sys.stderr)
        groups.append((f"{name}: {len(trace.jobs):,} jobs", logs))
    began_s = time.process_time()
    made = [(title, [Run.read(policy, events) for policy, events in logs]) for title, logs in groups]
    text = page("The ElasticFlow traces", made)
    took_s = time.process_time() - began_s
    where.write_text(text, encoding="utf-8")
    figures = {"jobs": jobs, "logs": len(POLICIES) * len(TRACES), "bytes": where.stat().st_size}
    print(json.dumps(figures | {"cpu_s": round(took_s, 1), "file": str(where)}, indent=2))


if __name__ == "__main__":
    main()
