"""Large models on one GPU: what a join costs, what one worker costs. Prints one JSON.

    python -m benchmarks.runtime.gpu_large [--sizes 85M,303M,1.2B] [--rounds 3] [--device cuda]

A GPT in bf16 (weights in float32) with AdamW. For each size: a plain loop, a job of one worker in fixed and
in adaptive mode (peak memory, seconds per step), and a job that grows from one to two workers on the GPU: the
pause of the join, the steps before and after it, the time from the request to the first step of both. The
modes alone take turns, and the quietest round counts: a step waits for the processor, which others use too.
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

from benchmarks.runtime.gpu import Running, environment, running

SIZES = {
    "tiny": (64, 2, 2),
    "85M": (768, 12, 16),
    "303M": (1024, 24, 16),
    "303M-64": (1024, 24, 64),
    "1.2B": (2048, 24, 16),
}
"""Width, layers, samples in a step. With 64 samples the GPU is the limit, not the processor that feeds it."""
CONTEXT, WORDS = 512, 8192
STEPS = 60
JOINS = 3


def worker(size: str, mode: str, device: str, out: Path, steps: int) -> None:
    """Train with or without swell; write the time of every step with the number of workers then."""
    import torch
    from torch import nn

    faulthandler.register(signal.SIGUSR1)
    width, layers, batch = SIZES[size]
    torch.manual_seed(0)
    with torch.device(device):
        model = _gpt(nn, width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = torch.utils.data.TensorDataset(torch.randint(0, WORDS, (batch * 50, CONTEXT + 1)))

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    took: list[list[float]] = []

    def note(world: int) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        took.append([time.time(), world])

    if mode == "plain":
        for i, (tokens,) in enumerate(torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)):
            optimizer.zero_grad()
            loss_of(tokens).backward()
            optimizer.step()
            note(1)
            if i + 1 >= steps:
                break
    else:
        import swell

        job = swell.elastic(model, optimizer, mode=mode, checkpoint_every_s=None, max_batch=batch)
        loader = job.loader(data, batch_size=batch)
        for _ in job.epochs(1000):
            for (tokens,) in loader:
                job.step(loss_of(tokens))
                note(job.world)
            if job.agree((out / "enough").exists() or (mode == "adaptive" and len(took) >= steps)):
                break
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    parameters = sum(p.numel() for p in model.parameters())
    if mode == "plain" or job.is_leader:
        said = {"peak_gb": round(peak / 1e9, 2), "parameters": parameters, "steps": took}
        (out / "result.json").write_text(json.dumps(said))


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


def alone(size: str, mode: str, device: str) -> dict[str, Any]:
    """One worker: peak memory and seconds per step."""
    with tempfile.TemporaryDirectory(prefix="swell-large-") as folder:
        command = [sys.executable, __file__, "--worker", mode, "--sizes", size, "--device", device]
        command += ["--out", folder, "--steps", str(STEPS)]
        if mode == "fixed":
            (Path(folder) / "enough").touch()
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        result = json.loads((Path(folder) / "result.json").read_text())
    times = [at for at, _ in result.pop("steps")]
    result["step_s"] = round(statistics.median(b - a for a, b in pairwise(times[5:])), 5)
    return result


def in_turn(size: str, modes: list[str], device: str, rounds: int) -> dict[str, Any]:
    """One worker in each mode: the quietest of several rounds, and its ratio to the first mode."""
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for mode in modes:
            result = alone(size, mode, device)
            kept = found.setdefault(mode, result | {"rounds_s": []})
            kept["rounds_s"].append(result["step_s"])
            kept["step_s"] = min(kept["rounds_s"])
            kept["peak_gb"] = max(kept["peak_gb"], result["peak_gb"])
    for result in found.values():
        result["step_ratio"] = round(result["step_s"] / found[modes[0]]["step_s"], 3)
        result["memory_ratio"] = round(result["peak_gb"] / max(found[modes[0]]["peak_gb"], 0.01), 3)
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
        arguments = ["--worker", "fixed", "--sizes", size, "--device", device, "--out", folder]
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
    # The step that ends with the switch is noted with two workers; the next one is made by both.
    return {
        "join_pause_ms": [round(e["pause_s"] * 1e3, 1) for e in events if e["event"] == "switch"][::2],
        "of_that_waited_ms": [round(e["waited_s"] * 1e3, 1) for e in events if e["event"] == "switch"][::2],
        "first_step_of_two_s": [round(spans[i], 4) for i in joins],
        "step_of_two_s": round(statistics.median(s for i in joins for s in spans[i + 1 : i + 9]), 4),
        "step_of_one_s": round(statistics.median(spans[: joins[0] - 1]), 4),
        "request_to_first_step_s": [round(steps[i + 1][0] - asked, 2) for i, asked in zip(joins, requests)],
        "recovery_ms": [round(e["pause_s"] * 1e3, 1) for e in events if e["event"] == "recovery"],
    }


def main() -> None:
    """Run every size and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="85M,303M,1.2B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default="plain,fixed,adaptive,join")
    parser.add_argument("--rounds", type=int, default=3, help="of each mode alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=10**9, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.sizes, args.worker, args.device, args.out, args.steps)
        return
    results: dict[str, Any] = {}
    parts = args.parts.split(",")
    for size in args.sizes.split(","):
        try:
            alone_modes = [part for part in parts if part != "join"]
            results[size] = in_turn(size, alone_modes, args.device, args.rounds)
            if "join" in parts:
                results[size]["join"] = join(size, args.device)
        except Exception as error:
            results.setdefault(size, {})["error"] = str(error)[-9000:]
        print(f"{size}: {json.dumps(results[size])}", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
