"""Scripts that people have on one GPU under `--auto`: 1, 2 workers, a `kill -9`, 2, 1. Prints one JSON.

    PYTHONPATH=src python -m benchmarks.runtime.gpu_scripts [--forms bf16,nanogpt-compiled]

A script for torchrun, in float32, bf16 and compiled, and one in the style of nanoGPT. Each form runs as its
author would run it (torchrun with one process over nccl; python), and as a job. The JSON has the last losses
of both, the largest difference of a tensor of weights relative to its largest number, and what the job
reported. Needs torch, numpy and this checkout; without a GPU all runs on the processor, over gloo and without
SyncBatchNorm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.runtime.gpu import ROOT, Running, environment, running

DDP, NANOGPT = (Path(__file__).with_name(f"gpu_{name}_script.py") for name in ("ddp", "nanogpt"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
FORMS = {
    **dict.fromkeys(("float32", "bf16", "compiled"), (TORCHRUN, DDP)),
    **dict.fromkeys(("nanogpt", "nanogpt-compiled"), ((), NANOGPT)),
}
LOSS = re.compile(r"epoch \d+ loss ([\d.]+)")
REST_S = 0.08
"""So that there is time for all changes of the workers."""


def _plain(path: Path, form: str) -> list[float]:
    launcher, script = FORMS[form]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(path), form, "0"],
        **{"env": environment(), "cwd": ROOT, "capture_output": True, "text": True, "timeout": 180},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [float(found) for found in LOSS.findall(done.stdout)]


def _change(job: Running) -> dict[str, float]:
    """1, 2, a death of the leader, 2, 1 workers; what each took, in seconds."""
    took: dict[str, float] = {}

    def until(name: str, count: int, without: str = "") -> dict[str, Any]:
        begin = time.monotonic()
        since = job.client.status()["step"]
        now: dict[str, Any] = job.client.wait_for(
            lambda s: len(s["members"]) == count and without not in s["members"] and s["step"] >= since + 2,
            90.0,
        )
        took[name] = round(time.monotonic() - begin, 2)
        return now

    until("first steps", 1)
    job.client.resize(2)
    now = until("second worker", 2)
    leader = now["members"][0]
    os.kill(now["pids"][leader], signal.SIGKILL)
    until("another one after a death", 2, without=leader)
    job.client.resize(1)
    until("one worker", 1)
    return took


def measure(form: str) -> dict[str, Any]:
    """One form of the script, both ways."""
    import torch

    with tempfile.TemporaryDirectory() as home:
        plain, shared = Path(home) / "plain.pt", Path(home) / "job.pt"
        losses = _plain(plain, form)
        arguments = [str(shared), form, str(REST_S)]
        with running(FORMS[form][1], arguments, auto=True, checkpoint_s=2.0) as job:
            try:
                took = _change(job)
            except ConnectionError:  # the job is over: why?
                raise RuntimeError(f"it ended too early: {job.finish()[-3000:]}") from None
            said = job.finish()
            events = [
                e for e in job.directory.events() if e["event"] in ("could_not_follow", "confined", "differs")
            ]
        one, other = torch.load(plain, weights_only=True), torch.load(shared, weights_only=True)
    apart = {n: float((one[n] - other[n]).abs().max() / one[n].abs().max().clamp_min(1e-12)) for n in one}
    return {
        "form": form,
        "loss of a plain run": losses[-1],
        "loss of the job": float(LOSS.findall(said)[-1]),
        "largest difference of weights": max(apart.values()),
        "took_s": took,
        "events": events,
    }


def main() -> None:
    """Measure all forms; one that fails does not keep the others from being measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", default=",".join(FORMS))
    found = []
    for form in parser.parse_args().forms.split(","):
        try:
            found.append(measure(form))
        except (RuntimeError, OSError, subprocess.SubprocessError, TimeoutError) as error:
            found.append({"form": form, "failed": f"{type(error).__name__}: {error}"})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
