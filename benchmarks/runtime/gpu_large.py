"""Large models on one GPU: what a join costs, what one worker costs. Prints a table and then one JSON.

    python -m benchmarks.runtime.gpu_large [--sizes 85M,303M,303M-64,1.2B] [--rounds 4] [--json FILE]

A GPT in bf16 (weights in float32) with AdamW; needs torch, numpy and this checkout. For each size: a plain
loop and jobs of one worker in fixed and in adaptive mode, in turn (`gpu_modes`: peak memory, seconds per
step); and a job that grows from one to two workers on the GPU: the pause of the join, the steps before and
after it, the time from the request to the first step of both. Without a GPU, `--device cpu --sizes tiny`
tries the benchmark itself.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import table
from benchmarks.runtime import gpu_modes
from benchmarks.runtime.gpu import ROOT, Running, environment, running

SIZES = {
    "tiny": (64, 2, 2),
    "85M": (768, 12, 16),
    "303M": (1024, 24, 16),
    "303M-64": (1024, 24, 64),
    "1.2B": (2048, 24, 16),
}
"""Width, layers, samples in a step. With 64 samples the GPU is the limit, not the processor that feeds it."""
CONTEXT, WORDS = 512, 8192
JOINS = 3
MODES = [gpu_modes.PLAIN, gpu_modes.FIXED, gpu_modes.ADAPTIVE]
GOALS = {"85M": (30, 3.0), "303M": (40, 4.0), "1.2B": (60, 8.0)}
"""By size: the longest pause of a join in ms, and the longest time from request to first step in s."""
MODES_S = 240.0
"""Longest that one size may take in all modes; the waits of a join have limits of their own."""


def task(size: str, device: str) -> gpu_modes.Task:
    """A model, its optimizer and its data."""
    import torch
    from torch import nn

    width, layers, batch = SIZES[size]
    context = CONTEXT if size != "tiny" else 16
    torch.manual_seed(0)
    with torch.device(device):
        model = _gpt(nn, width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = torch.utils.data.TensorDataset(torch.randint(0, WORDS, (batch * 50, context + 1)))

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return model, optimizer, data, batch, loss_of


def worker(size: str, device: str, out: Path) -> None:
    """Train as a worker of a job; the leader writes when each step ended, with the number of workers then."""
    import torch

    import swell

    faulthandler.register(signal.SIGUSR1)
    model, optimizer, data, batch, loss_of = task(size, device)
    took: list[list[float]] = []
    job = swell.elastic(model, optimizer, checkpoint_every_s=None)
    loader = job.loader(data, batch_size=batch)
    for _ in job.epochs(1000):
        for (tokens,) in loader:
            job.step(loss_of(tokens))
            if device == "cuda":
                torch.cuda.synchronize()
            took.append([time.time(), job.world])
        if job.agree((out / "enough").exists()):
            break
    if job.is_leader:
        (out / "result.json").write_text(json.dumps({"steps": took}))


def _gpt(nn: Any, width: int, layers: int) -> Any:
    import torch

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            q, k, v = (
                part.view(b, t, -1, 64).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, t, -1))
            return x + self.down(nn.functional.gelu(self.up(self.after(x))))

    class GPT(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(CONTEXT, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.head = nn.Linear(width, WORDS, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
            return self.head(self.blocks(x))

    return GPT()


def modes(size: str, device: str, rounds: int) -> dict[str, Any]:
    """One worker in each mode, in a process of its own: its memory is free again afterwards."""
    with tempfile.TemporaryDirectory(prefix="swell-large-") as folder:
        command = [sys.executable, __file__, "--worker", "modes", "--sizes", size, "--device", device]
        command += ["--out", folder, "--rounds", str(rounds)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=MODES_S, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return found


@contextlib.contextmanager
def explained(job: Running) -> Iterator[None]:
    """If anything goes wrong: where the workers are, and what they said."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            for pid in job.client.status()["pids"].values():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        logs = {p.name: p.read_text()[-3000:] for p in (job.directory.path / "logs").iterdir()}
        raise RuntimeError(
            f"{error}\n{job.output.read_text()[-2000:]}\n{json.dumps(logs, indent=1)}"
        ) from None


def join(size: str, device: str) -> dict[str, Any]:
    """From one worker to two and back, three times; then to two, of which one is killed."""
    requests: list[float] = []
    with tempfile.TemporaryDirectory(prefix="swell-large-") as folder:
        out = Path(folder)
        arguments = ["--worker", "join", "--sizes", size, "--device", device, "--out", folder]
        with running(Path(__file__), arguments) as job, explained(job):
            now = job.client.wait_for(lambda s: s["step"] > 10, 60.0)
            for count in (2, 1) * JOINS + (2,):
                if count == 2:
                    requests.append(time.time())
                job.client.resize(count)
                now = job.client.wait_for(lambda s, count=count: len(s["members"]) == count, 60.0)
                now = job.client.wait_for(lambda s, begin=now["step"]: s["step"] >= begin + 12, 60.0)
            victim = now["members"][1]
            os.kill(now["pids"][victim], signal.SIGKILL)
            now = job.client.wait_for(lambda s: victim not in s["members"], 60.0)
            job.client.wait_for(lambda s: s["step"] >= now["step"] + 12, 60.0)
            (out / "enough").touch()
            job.finish()
            steps = json.loads((out / "result.json").read_text())["steps"]
            events = job.directory.events()
    spans = [b - a for (a, _), (b, _) in pairwise(steps)]
    joins = [i for i in range(1, len(steps)) if steps[i][1] == 2 and steps[i - 1][1] == 1]
    # The first step that is noted with two workers was made by both, and the switch came just before it.
    pauses_s = [e["pause_s"] for e in events if e["event"] == "switch"][::2]
    return {
        "join_pause_ms": [round(pause_s * 1e3, 1) for pause_s in pauses_s],
        "of_that_waited_ms": [round(e["waited_s"] * 1e3, 1) for e in events if e["event"] == "switch"][::2],
        "first_step_of_two_s": [round(spans[i - 1] - pause_s, 4) for i, pause_s in zip(joins, pauses_s)],
        "step_of_two_s": round(statistics.median(s for i in joins for s in spans[i : i + 8]), 4),
        "step_of_one_s": round(statistics.median(spans[: joins[0] - 1]), 4),
        "request_to_first_step_s": [round(steps[i][0] - asked, 2) for i, asked in zip(joins, requests)],
        "recovery_ms": [round(e["pause_s"] * 1e3, 1) for e in events if e["event"] == "recovery"],
    }


def verdicts(size: str, found: dict[str, Any]) -> Iterator[list[Any]]:
    """What was measured of one size against what must be shown: item, figure, goal, and whether it holds."""
    if "error" in found:
        yield [size, "measured", found["error"].strip().splitlines()[-1][:80], "yes", False]
    if "modes" in found:
        fixed, adaptive = found["modes"][gpu_modes.FIXED], found["modes"][gpu_modes.ADAPTIVE]
        for mode, figures, limit in ((gpu_modes.FIXED, fixed, 1.02), (gpu_modes.ADAPTIVE, adaptive, 1.10)):
            ratio = figures["memory_ratio"]
            yield [size, f"peak memory, {mode} over plain", ratio, limit, ratio is None or ratio <= limit]
        ratio = adaptive["step_ratio"]
        must = not size.startswith("85M")
        yield [size, "step, adaptive over plain", ratio, 1.03 if must else None, not must or ratio <= 1.03]
    if "join" in found and size in GOALS:
        pause_ms, request_s = GOALS[size]
        join = found["join"]
        paused = statistics.median(join["join_pause_ms"])
        yield [size, "pause of a join, median, ms", paused, pause_ms, paused <= pause_ms]
        slower = statistics.median(s / join["step_of_two_s"] for s in join["first_step_of_two_s"])
        yield [size, "step after a join over a normal one", round(slower, 3), 1.2, slower <= 1.2]
        request = statistics.median(join["request_to_first_step_s"])
        yield [size, "request to first step, median, s", request, request_s, request <= request_s]


def show(results: dict[str, Any]) -> None:
    """Print the figures and the verdicts."""
    rows = [
        [
            size,
            mode,
            figures["parameters"],
            figures["step_s"] * 1e3,
            figures["step_ratio"],
            figures["peak_gb"],
        ]
        for size, found in results.items()
        for mode, figures in found.get("modes", {}).items()
    ]
    table("One worker", ["size", "mode", "parameters", "step, ms", "over plain", "peak, GB"], rows)
    words = {True: "holds", False: "DOES NOT HOLD"}
    judged = [row for size, found in results.items() for row in verdicts(size, found)]
    table(
        "Must show",
        ["size", "item", "found", "at most", ""],
        [[*row[:4], words[row[4]]] for row in judged],
    )


def main() -> None:
    """Run every size; print the figures as tables and one JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="85M,303M,303M-64,1.2B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="modes,join")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of 16 steps in each mode")
    parser.add_argument("--json", type=Path, help="write the JSON to this file too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    if args.worker == "modes":
        found = gpu_modes.in_turn(lambda: task(args.sizes, args.device), MODES, args.rounds, args.device)
        (args.out / "result.json").write_text(json.dumps(found))
        return
    if args.worker:
        worker(args.sizes, args.device, args.out)
        return
    results: dict[str, Any] = {}
    parts = args.parts.split(",")
    for size in args.sizes.split(","):
        if size not in SIZES:
            parser.error(f"--sizes: got {size!r}, known are {', '.join(SIZES)}")
        results[size] = {}
        for part in parts:
            if part == "join" and size.endswith("-64"):
                continue  # the same model, only with more samples
            begin_s = time.monotonic()
            try:
                results[size][part] = (
                    join(size, args.device) if part == "join" else modes(size, args.device, args.rounds)
                )
            except Exception as error:  # the other parts are still worth knowing
                results[size]["error"] = f"{type(error).__name__}: {error}"[-9000:]
            took_s = round(time.monotonic() - begin_s, 1)
            results[size].setdefault("seconds", {})[part] = took_s
            print(f"{size}, {part}: {took_s:.0f} s", file=sys.stderr, flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    show(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
