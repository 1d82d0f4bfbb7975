"""The runtime on a GPU: examples in bf16, resizes, one hash, overhead. Prints one JSON.

    python -m benchmarks.runtime.gpu [--device cuda] [--parts examples,auto,consistent,overhead] [--brief]

Two workers share one GPU. Needs nothing installed but torch and numpy (and scikit-learn for the digits):
jobs are started through Python, not through the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FINAL = re.compile(r"final (accuracy|validation loss|test error|loss \S+ accuracy) (\d+\.\d+)")
LONG = {
    "digits_cnn": ["--epochs", "60"],
    "tiny_gpt": ["--epochs", "4", "--windows", "12000", "--width", "256", "--layers", "4", "--lr", "1e-3"],
    "recommender": [],
}
BRIEF = {
    "digits_cnn": ["--epochs", "40"],
    "tiny_gpt": ["--epochs", "4", "--windows", "1500", "--width", "32", "--layers", "1"],
    "recommender": ["--epochs", "12"],
}


def environment() -> dict[str, str]:
    """Children find this checkout whether or not it is installed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SWELL_")}
    return {**clean, "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}


# ---------------------------------------------------------------------- jobs


class Running:
    """A job in a process of its own, begun on one worker."""

    def __init__(self, root: Path, script: Path, arguments: list[str], settings: dict[str, Any]) -> None:
        from swell.train.agent.client import JobClient
        from swell.train.agent.jobdir import JobDirectory

        fields = {
            "script": str(script),
            "arguments": arguments,
            "maximum": 2,
            "workers": 1,
            "threads": 4 if (os.cpu_count() or 1) >= 8 else 1,
            "silent_after_s": 20.0,
            "gather_s": 0.1,
            **settings.pop("limits", {}),
            "settings": settings,
        }
        (root / "launch.json").write_text(json.dumps({**fields, "directory": str(root / "job")}))
        command = [sys.executable, "-m", "benchmarks.runtime.gpu", "--launch", str(root / "launch.json")]
        self.output = root / "output.txt"
        self._file = self.output.open("wb")
        self.process = subprocess.Popen(
            command, env=environment(), cwd=ROOT, stdout=self._file, stderr=self._file
        )
        self.directory = JobDirectory(root / "job")
        self.client = JobClient(self.directory, wait_s=60.0)

    def grow_and_shrink(self, steps: int) -> None:
        """1 -> 2 -> 1 workers, with some steps in between."""
        now = self.client.wait_for(lambda s: s["step"] > steps, 90.0)
        for count in (2, 1):
            self.client.resize(count)
            now = self.client.wait_for(lambda s, count=count: len(s["members"]) == count, 90.0)
            self.client.wait_for(lambda s, begin=now["step"]: s["step"] >= begin + steps, 90.0)

    def finish(self, timeout_s: float = 240.0) -> str:
        """Wait for the end and return what it said."""
        code = self.process.wait(timeout_s)
        text = self.output.read_text()
        if code:
            raise RuntimeError(f"exit code {code}: {text[-3000:]}")
        return text

    def changes(self) -> dict[str, Any]:
        """Generations and what each switch and each start cost."""
        events = self.directory.events()
        spawned = {e["worker"]: e["time_s"] for e in events if e["event"] == "spawn"}
        ready = {e["worker"]: e["time_s"] for e in events if e["event"] == "ready"}
        return {
            "workers_and_step": [
                [len(e["members"]), e["step"]] for e in events if e["event"] == "generation"
            ],
            "switch_pause_ms": [round(e["pause_s"] * 1e3, 2) for e in events if e["event"] == "switch"],
            "spawn_to_ready_s": [round(ready[w] - spawned[w], 2) for w in ready],
        }

    def close(self) -> None:
        """End whatever still runs."""
        with contextlib.suppress(OSError):
            self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        if self.process.poll() is None:
            self.process.kill()
        self._file.close()


@contextlib.contextmanager
def running(script: Path, arguments: list[str], **settings: Any) -> Iterator[Running]:
    """A job whose directory and processes are gone afterwards; `limits` are its numbers of workers."""
    root = Path(tempfile.mkdtemp(prefix="swell-gpu-"))
    job = Running(root, script, arguments, settings)
    try:
        yield job
    finally:
        job.close()
        shutil.rmtree(root, ignore_errors=True)


def launch(path: Path) -> int:
    """The process that `Running` starts."""
    from swell.train.agent.launcher import Launcher
    from swell.train.agent.run_config import RunConfig

    fields = json.loads(path.read_text())
    config = RunConfig(**{**fields, "directory": Path(fields["directory"])})
    return Launcher(config, lambda line: print(line, flush=True)).run()


# ---------------------------------------------------------------------- parts


def examples(device: str, brief: bool) -> dict[str, Any]:
    """Each example in bf16: alone, and 1 -> 2 -> 1."""
    out: dict[str, Any] = {}
    for name, long in (BRIEF if brief else LONG).items():
        script, arguments = EXAMPLES / f"{name}.py", [*long, "--device", device, "--bf16"]
        begin = time.perf_counter()
        alone = subprocess.run(
            [sys.executable, str(script), *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        entry: dict[str, Any] = {"alone_s": round(time.perf_counter() - begin, 1)}
        entry["alone"] = quality(alone.stdout) if alone.returncode == 0 else alone.stderr[-1500:]
        begin = time.perf_counter()
        with running(script, arguments) as job:
            job.grow_and_shrink(20 if brief else 100)
            entry["resized"] = quality(job.finish())
            entry |= job.changes() | {"resized_s": round(time.perf_counter() - begin, 1)}
        out[name] = entry
        print(f"{name}: {json.dumps(entry)}", file=sys.stderr, flush=True)
    return out


def auto(device: str, brief: bool) -> dict[str, Any]:
    """The unmodified script, 1 -> 2 -> 1."""
    epochs = "40" if brief else "60"
    arguments = ["--epochs", epochs, "--device", device, "--log-interval", "1000"]
    with running(EXAMPLES / "plain_mnist_style.py", arguments, auto=True) as job:
        job.grow_and_shrink(20 if brief else 100)
        return {"accuracy": quality(job.finish()), **job.changes()}


def quality(output: str) -> float:
    """What an example says at its end."""
    found = FINAL.findall(output)
    if len(found) != 1:
        raise RuntimeError(f"no single result in: {output[-2000:]}")
    return float(found[0][1])


def consistent(device: str, brief: bool) -> dict[str, Any]:
    """Weights and optimizer state after the same steps on 1, on 2, and on 1 -> 2 -> 1 workers: one hash."""
    arguments = ["--worker", "consistent", "--device", device, "--epochs", "20" if brief else "60"]
    hashes: dict[str, str] = {}
    out: dict[str, Any] = {}
    for kind in ("1", "2", "1->2->1"):
        with running(Path(__file__), arguments) as job:
            if kind == "2":
                job.client.resize(2)
            elif kind == "1->2->1":
                job.grow_and_shrink(20)
            text = job.finish()
            hashes[kind] = re.findall(r"hash (\w+)", text)[0]
            out[kind] = {"hash": hashes[kind], **job.changes()}
    out["one_hash"] = len(set(hashes.values())) == 1
    return out


def consistent_worker(device: str, epochs: int) -> None:
    """A CNN with batch norm, dropout, momentum and clipping, in consistent mode."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import swell

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    data = TensorDataset(torch.randn(512, 1, 16, 16), torch.randint(0, 10, (512,)))
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(32, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 49, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = swell.elastic(model, optimizer, mode="consistent", logical_ranks=4, clip_norm=1.0)
    loader = job.loader(data, batch_size=64)
    for _ in job.epochs(epochs):
        for x, y in loader:
            time.sleep(0.01)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                logits = model(x.to(device))
            job.step(nn.functional.cross_entropy(logits.float(), y.to(device)))
    tensors = [*model.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())]
    raw = b"".join(t.detach().cpu().contiguous().numpy().tobytes() for t in tensors)
    if job.is_leader:
        print("hash", hashlib.sha256(raw).hexdigest()[:16], "steps", job.steps, flush=True)


def overhead(device: str, brief: bool) -> dict[str, Any]:
    """Steps of an elastic job with one worker against a plain loop, in alternating blocks of one process."""
    out: dict[str, Any] = {}
    # The first two keep the processor busy with launching kernels, the third one the GPU with computing.
    long = {"small": (256, 4, 64), "large": (768, 12, 32), "large_batch": (768, 12, 256)}
    sizes = {"tiny": (64, 1, 8)} if brief else long
    for name, (width, layers, batch) in sizes.items():
        arguments = ["--worker", "overhead", "--device", device]
        arguments += ["--width", str(width), "--layers", str(layers), "--batch", str(batch)]
        with running(Path(__file__), arguments) as job:
            out[name] = json.loads(re.findall(r"overhead (\{.*\})", job.finish())[0])
    return out


def overhead_worker(device: str, width: int, layers: int, batch: int) -> None:
    """Both loops on the same data, each with its own copy of a small GPT, in bf16."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import swell

    sys.path.insert(0, str(EXAMPLES))
    import tiny_gpt

    context, blocks, steps = 256, 40, 20
    text = torch.randint(0, len(tiny_gpt.ALPHABET), (batch * steps, context + 1))
    data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())

    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = tiny_gpt.GPT(context, width, layers).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(x.to(device))
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), y.to(device).flatten())

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    def timed(block: Callable[[], None]) -> float:
        wait()
        begin = time.perf_counter()
        block()
        wait()
        return (time.perf_counter() - begin) / steps

    plain_model, plain_optimizer = build()
    plain_loader = DataLoader(data, batch_size=batch, shuffle=True)

    def plain() -> None:
        for x, y in plain_loader:
            plain_optimizer.zero_grad()
            loss_of(plain_model, x, y).backward()
            plain_optimizer.step()

    model, optimizer = build()
    job = swell.elastic(model, optimizer, checkpoint_every_s=None)
    loader = job.loader(data, batch_size=batch)
    pairs: list[tuple[float, float]] = []

    def elastic() -> None:
        for x, y in loader:
            job.step(loss_of(model, x, y))

    for epoch in job.epochs(blocks + 2):
        order = (plain, elastic) if epoch % 2 else (elastic, plain)
        took = {block: timed(block) for block in order}
        if epoch >= 2:
            pairs.append((took[plain], took[elastic]))
    parameters = sum(p.numel() for p in model.parameters())
    result = {
        "parameters": parameters,
        "plain_ms": round(statistics.median(p for p, _ in pairs) * 1e3, 3),
        "elastic_ms": round(statistics.median(e for _, e in pairs) * 1e3, 3),
        "ratio": round(statistics.median(e / p for p, e in pairs), 4),
        "ratios": [round(e / p, 4) for p, e in pairs],
    }
    print("overhead", json.dumps(result), flush=True)


PARTS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "overhead": overhead,
    "consistent": consistent,
    "examples": examples,
    "auto": auto,
}


def main() -> int:
    """Measure the parts asked for, or be one of the processes they start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--brief", action="store_true", help="to try the benchmark itself, without a GPU")
    for hidden in ("--launch", "--worker"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--epochs", "--width", "--layers", "--batch"):
        parser.add_argument(hidden, type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        return launch(Path(args.launch))
    if args.worker == "consistent":
        consistent_worker(args.device, args.epochs)
        return 0
    if args.worker == "overhead":
        overhead_worker(args.device, args.width, args.layers, args.batch)
        return 0

    import torch

    sys.path.insert(0, str(ROOT / "src"))
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for part in args.parts.split(","):
        begin = time.perf_counter()
        try:
            result[part] = PARTS[part](args.device, args.brief)
        except Exception as error:  # the other parts are still worth knowing
            result[part] = {"error": f"{type(error).__name__}: {error}"}
        result[part]["seconds"] = round(time.perf_counter() - begin, 1)
        print(f"{part}: {json.dumps(result[part])}", file=sys.stderr, flush=True)
    print(json.dumps(result, indent=1))
    return 1 if any("error" in result[part] for part in args.parts.split(",")) else 0


if __name__ == "__main__":
    sys.exit(main())
