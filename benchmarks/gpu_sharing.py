"""Small jobs on one GPU: one after the other, and side by side with `swell up --per-gpu 4`.

    python -m benchmarks.gpu_sharing [--jobs 4] [--seconds 20] [--heavy]

Each job is examples/tiny_gpt.py, started by the local engine. First one job trains alone; then all of them at
the same time. One after the other they would train at the speed of the one alone, so the gain is the sum of
the speeds side by side over that. With `--heavy` the batch is so large that each job fills the GPU: then the
gain should not be below 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from swell.domain import JobRequest
from swell.engines import Launch, RunState
from swell.engines.local import LocalSite
from swell.engines.supervised import SupervisedEngine

HEAVY = ("--batch-size", "512", "--width", "512", "--layers", "6", "--context", "128", "--bf16")
SETTLE_S = 2.0
"""Speeds are measured so long after the last job began to train."""
SCRIPT = Path(__file__).parents[1] / "examples" / "tiny_gpt.py"


class Bench:
    """A local engine on one GPU, and what its jobs report."""

    def __init__(self, home: Path, per_gpu: int, *, heavy: bool) -> None:
        self.home, self.heavy = home, heavy
        self.engine = SupervisedEngine(LocalSite(home, per_gpu=per_gpu))
        self.engine.start(lambda: None)
        self.steps: dict[str, list[tuple[float, float]]] = {}
        """By job: times and steps done."""

    def begin(self, name: str, slot: int) -> None:
        """Start a job on a slot."""
        arguments = ("--device", "cuda", "--epochs", "1000", *(HEAVY if self.heavy else ()))
        request = JobRequest(name=name, script=str(SCRIPT), args=arguments, workdir=str(self.home))
        launch = Launch(job_id=name, request=request, job_dir=self.home / "jobs" / name, max_workers=1)
        self.engine.apply(launch, (slot,))

    def watch(self, for_s: float = 0.0, until: int = 0, limit_s: float = 180.0) -> None:
        """Take in reports for so long, or until so many jobs have trained for a moment."""
        begin_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            for report in self.engine.reports():
                if report.kind == "progress":
                    self.steps.setdefault(report.job_id, []).append((now_s, float(report.data["done"])))
            seen = self.engine.observe()
            failed = [job for job in seen.values() if job.state is RunState.FAILED]
            if failed:
                raise RuntimeError(f"{failed[0].job_id} failed: {failed[0].reason}")
            if now_s - begin_s > for_s and sum(len(s) > 3 for s in self.steps.values()) >= until:
                return
            if now_s - begin_s > limit_s:
                raise TimeoutError(f"{len(self.steps)} of {until} jobs train after {limit_s:g} s")
            time.sleep(0.05)

    def speeds(self, since_s: float) -> dict[str, float]:
        """Steps per second of each job since then."""
        out = {}
        for name, steps in sorted(self.steps.items()):
            span = [(at_s, done) for at_s, done in steps if at_s >= since_s]
            out[name] = (span[-1][1] - span[0][1]) / (span[-1][0] - span[0][0])
        return out


def measure(jobs: int, seconds: float, *, heavy: bool) -> dict[str, Any]:
    """Speeds alone and side by side."""
    home = Path(tempfile.mkdtemp(prefix="swell-gpu-"))
    bench = Bench(home, jobs, heavy=heavy)
    try:
        bench.begin("job0", 0)
        bench.watch(until=1)
        begin_s = time.monotonic()
        bench.watch(for_s=seconds)
        alone = bench.speeds(begin_s)["job0"]
        for i in range(1, jobs):
            bench.begin(f"job{i}", i)
        bench.watch(until=jobs)
        bench.watch(for_s=SETTLE_S)
        begin_s = time.monotonic()
        bench.watch(for_s=seconds)
        together = bench.speeds(begin_s)
        return {
            "jobs": jobs,
            "alone_steps_s": round(alone, 1),
            "together_steps_s": {name: round(speed, 1) for name, speed in together.items()},
            "gain": round(sum(together.values()) / alone, 2),
        }
    finally:
        for i in range(jobs):
            bench.engine.end(f"job{i}")
        time.sleep(2.0)
        bench.engine.close()
        shutil.rmtree(home, ignore_errors=True)


def measured(seconds: float) -> dict[str, Any]:
    """Four small jobs on one GPU; or why that cannot be measured here."""
    if not torch.cuda.is_available():
        return {"skipped": "there is no GPU"}
    return measure(4, seconds, heavy=False)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--heavy", action="store_true", help="jobs that fill the GPU")
    options = parser.parse_args()
    print(json.dumps(measure(options.jobs, options.seconds, heavy=options.heavy), indent=1))


if __name__ == "__main__":
    main()
