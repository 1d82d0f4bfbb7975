"""Our step and plain DDP's in the same two processes, in turns, so that both see the same machine.

swell run --workers 2 benchmarks/runtime/overhead_script.py --mode fixed --out DIRECTORY
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swell

WIDTHS = {
    "0.4M": (256, 512, 512),
    "10M": (512, 2048, 2048, 2048),
    "60M": (2048, 4096, 4096, 4096, 4096),
}
"""Layer widths: 0.4, 9.5 and 59 million parameters."""
BATCH = 96


def build(size: str) -> nn.Module:
    """The model of both contestants."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(WIDTHS[size]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTHS[size][-1], 10))


def ddp_step(size: str, micro: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """One step of plain DDP with `micro` accumulated micro-batches."""
    model = build(size)
    wrapped: nn.Module = model
    if dist.get_world_size() > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss = nn.CrossEntropyLoss()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        for part in range(micro):
            a, b = x[part::micro], y[part::micro]
            last = part == micro - 1 or not isinstance(wrapped, DistributedDataParallel)
            with contextlib.nullcontext() if last else wrapped.no_sync():  # type: ignore[operator]
                (loss(wrapped(a), b) / micro).backward()
        optimizer.step()

    return step


def timeline(reduced: Any) -> list[list[Any]]:
    """What happened in a step: `[what, begin_ms, end_ms]` from the start of its last backward."""
    zero = reduced.began_s or reduced.complete_s
    spans = [("backward", zero, reduced.complete_s), *reduced.spans]
    return [[what, round((a - zero) * 1e3, 2), round((b - zero) * 1e3, 2)] for what, a, b in spans]


def main() -> None:
    """Alternate blocks of steps; rank 0 writes the times of both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="fixed")
    parser.add_argument("--size", choices=list(WIDTHS), default="10M")
    parser.add_argument("--hosts", help="the network whose hosts the workers move to")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--block-steps", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.hosts:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from benchmarks.runtime import network

        network.move(options.hosts, 2)
    model = build(options.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    extra = {"max_batch": BATCH} if options.mode == "adaptive" else {}
    job = swell.elastic(
        model, optimizer, mode=options.mode, logical_ranks=4, checkpoint_every_s=None, **extra
    )
    x = torch.randn(96_000 // 8, WIDTHS[options.size][0])
    y = torch.randint(0, 10, (len(x),))
    batches = torch.utils.data.TensorDataset(x, y)
    loader = job.loader(batches, batch_size=BATCH)
    loss = nn.CrossEntropyLoss()
    ours: list[float] = []
    theirs: list[float] = []
    ours_cpu: list[float] = []
    theirs_cpu: list[float] = []
    for _ in job.epochs(1_000):
        drawn = iter(loader)
        a, b = next(drawn)  # entering the loop made this worker a member
        if not theirs:
            store = dist.FileStore(str(options.out / f"store{job.world}"), job.world)
            dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world)
            per_worker = 4 // job.world if options.mode == "consistent" else 1
            plain = ddp_step(options.size, per_worker)
            rows = BATCH // job.world
            fixed = x[:rows].clone(), y[:rows].clone()
        pending = (a, b)
        while len(theirs) < options.blocks * options.block_steps:
            for _ in range(options.block_steps):
                begin, cpu = time.perf_counter(), time.process_time()
                done = False
                while not done:
                    done = job.step(loss(model(pending[0]), pending[1]))
                    following = next(drawn, None)
                    if following is None:
                        break
                    pending = following
                ours.append(time.perf_counter() - begin)
                ours_cpu.append(time.process_time() - cpu)
                if following is None:
                    break
            if following is None:
                ours.pop()
                ours_cpu.pop()
                break
            for _ in range(options.block_steps):
                begin, cpu = time.perf_counter(), time.process_time()
                plain(*fixed)
                theirs.append(time.perf_counter() - begin)
                theirs_cpu.append(time.process_time() - cpu)
        else:
            if job.is_leader:
                times = {"ours": ours, "theirs": theirs, "ours_cpu": ours_cpu, "theirs_cpu": theirs_cpu}
                found = job._crew.reducer.result
                said = times | {"timeline": timeline(found) if found is not None else []}
                writing = options.out / "result.writing"
                writing.write_text(json.dumps(said))
                writing.rename(options.out / "result.json")
            dist.destroy_process_group()
            return
    os._exit(3)


if __name__ == "__main__":
    main()
