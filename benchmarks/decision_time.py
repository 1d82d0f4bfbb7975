"""How long one decision takes, and how that grows with the cluster.

    python -m benchmarks.decision_time [--policy afs-l] [--jobs 2000] [--plot]

Jobs in mid-life on 5 GPUs each on average; the seconds include placing the result on GPUs.
Pollux is measured on its own scale, up to 640 jobs on 256 GPUs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.common import OUT, table, write_json
from swell.domain import Cluster, JobSpec
from swell.perf.belief import JobBelief
from swell.perf.curves import Curves
from swell.perf.profiles import ProfileSet
from swell.placement import make_placer
from swell.policies import JobTable, Policy, Snapshot, make_policy, policy_names

SIZES = (125, 250, 500, 1000, 2000)
GPUS_PER_JOB = 5
SLOW = {"pollux", "oasis", "themis"}
"""Policies that the one-second goal leaves out; they are measured on smaller clusters."""
SLOW_SIZES = (40, 80, 160, 320, 640)


def busy_snapshot(policy: Policy, jobs: int, cluster: Cluster, seed: int = 0) -> Snapshot:
    """A cluster in the middle of its day: jobs of all ages, most of them running."""
    rng = np.random.default_rng(seed)
    profiles = ProfileSet.load(None)
    names = list(profiles.names)
    models = [names[i] for i in rng.integers(len(names), size=jobs)]
    now_s = 1e5
    submit = np.sort(rng.uniform(0, now_s, jobs))
    lengths = rng.lognormal(8, 1.5, jobs)
    specs = []
    for i, model in enumerate(models):
        batch = profiles.get(model).limits.init_batch
        deadline = now_s + 3 * float(lengths[i]) + 60 if i % 2 else None
        gpus = int(rng.choice([1, 2, 4, 8]))
        specs.append(
            JobSpec(
                job_id=f"j{i}",
                submit_s=float(submit[i]),
                model=model,
                batch_size=batch,
                gpus=gpus,
                work=float(lengths[i]),
                deadline_s=deadline,
            )
        )
    table = JobTable(specs)
    widest = min(cluster.capacity, 512)
    curves = []
    for name in names:
        profile = profiles.get(name)
        kind = profile.gpu_types[0]
        curves.append(profile.curve(profile.limits.init_batch, widest, cluster.gpus_per_node, kind))
    index = {name: i for i, name in enumerate(names)}
    table.curve[:] = [index[m] for m in models]
    known = Curves(np.array(curves))
    table.left[:] = lengths * known.rates[table.curve, 1]
    table.since_s[:] = now_s - rng.uniform(0, 600, jobs)
    table.attained_gpu_s[:] = rng.lognormal(8, 2, jobs)
    table.run_s[:] = table.attained_gpu_s / 2
    if policy.knows == "fitted":
        for row, spec in enumerate(specs):
            profile = profiles.get(spec.model)
            belief = JobBelief(profile.limits)
            for gpus in (1, 2, 4, 8):
                shape = (min(gpus, 4),) * max(gpus // 4, 1)
                local = max(profile.limits.min_local, profile.limits.init_batch // gpus)
                local = min(local, profile.limits.max_local)
                belief.observe(
                    len(shape), gpus, local, *profile.step_time(shape, local, profile.gpu_types[0])
                )
            belief.observe_gradients(1.0, float(rng.uniform(1, 50)))
            table.belief[row] = belief
    return Snapshot(now_s, cluster, table, np.arange(jobs, dtype=np.int64), known, 30.0)


def decide(policy: Policy, jobs: int, cluster: Cluster) -> float:
    """CPU seconds of one decision in mid-life: the first one only sets the scene."""
    snapshot = busy_snapshot(policy, jobs, cluster)
    rows = snapshot.table
    first = policy.allocate(snapshot)
    placer = make_placer(policy.placer, cluster)
    if first.per_node is None:
        moved = placer.place({i: int(k) for i, k in enumerate(first.gpus) if k})
    else:
        moved = placer.place_per_node({i: c for i, c in enumerate(first.per_node) if c.any()})
    for row, placement in moved.items():
        rows.placement[row], rows.gpus[row] = placement, len(placement)
        rows.first_start_s[row] = rows.last_start_s[row] = snapshot.now_s
    rows.left *= np.random.default_rng(1).uniform(0.2, 1.0, jobs)
    later = Snapshot(snapshot.now_s + 60, cluster, rows, snapshot.rows, snapshot.curves, 30.0)
    started = time.process_time()
    second = policy.allocate(later)
    if second.per_node is None:
        changed = np.flatnonzero(second.gpus != later.gpus)
        placer.place({int(i): int(second.gpus[i]) for i in changed})
    return time.process_time() - started


def main() -> None:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--jobs", type=int, help="only this many active jobs")
    parser.add_argument("--plot", action="store_true", help="write out/decision-time.png")
    args = parser.parse_args()
    figures: dict[str, dict[int, float]] = {}
    for name in args.policy or policy_names():
        slow = name in SLOW
        sizes = (args.jobs,) if args.jobs else (SLOW_SIZES if slow else SIZES)
        for jobs in sizes:
            gpus = jobs * 2 // 5 if slow else jobs * GPUS_PER_JOB
            width = 4 if slow else 8
            cluster = Cluster.parse(f"{max(gpus // width, 1)}x{width}")
            decide(make_policy(name), min(jobs, 40), Cluster.parse("4x8"))  # compile first
            figures.setdefault(name, {})[jobs] = decide(make_policy(name), jobs, cluster)
    header = sorted({jobs for row in figures.values() for jobs in row})
    rows: list[list[Any]] = [
        [n, *(f"{1e3 * figures[n][jobs]:.2f}" if jobs in figures[n] else None for jobs in header)]
        for n in figures
    ]
    table("CPU milliseconds of one decision, by active jobs", ["policy", *map(str, header)], rows)
    write_json("decision-time", figures)
    if args.plot:
        plot(figures)


def plot(figures: dict[str, dict[int, float]]) -> None:
    """Cost against active jobs, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9.5, 5.5), layout="constrained")
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    dearest_first = sorted(figures, key=lambda name: -list(figures[name].values())[-1])
    for i, name in enumerate(dearest_first):
        points = figures[name]
        style = {"color": colours[i % 20], "marker": "os^D"[i % 4], "markersize": 4}
        axes.plot(list(points), [1e3 * s for s in points.values()], label=name, **style)
    axes.axhline(1000, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="active jobs", ylabel="one decision, CPU ms")
    axes.set_title(f"Decision time ({GPUS_PER_JOB} GPUs a job; pollux, oasis and themis: 0.4)")
    figure.legend(loc="outside right upper", fontsize=9, frameon=False, title="dearest first")
    path = OUT / "decision-time.png"
    figure.savefig(path, dpi=130)
    print(f"\nplot: {path}")


if __name__ == "__main__":
    main()
