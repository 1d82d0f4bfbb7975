"""torchft's step and plain DDP's in the same two replicas, in turns, so that both see the same machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Optimizer

from benchmarks.runtime.anchors.model import FOLDER
from benchmarks.runtime.anchors.torchft_script import manage
from benchmarks.runtime.overhead_script import BATCH, WIDTHS, build, ddp_step

SIZE, BLOCKS, STEPS = "10M", 7, 6


def main() -> None:
    """Alternate blocks of steps; the first replica writes the times of both."""
    torch.set_num_threads(1)
    name = os.environ["REPLICA"]
    rank = int(name.removeprefix("replica"))
    model = build(SIZE)
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    manager = manage(model, plain)
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    dist.init_process_group("gloo", store=dist.FileStore(str(FOLDER / "store"), 2), rank=rank, world_size=2)
    x = torch.randn(BATCH // 2, WIDTHS[SIZE][0])
    y = torch.randint(0, 10, (len(x),))
    ddp = ddp_step(SIZE, 1)

    def torchft() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    blocks: dict[str, list[list[float]]] = {"theirs": [], "ddp": []}
    contestants: dict[str, Callable[[], None]] = {"theirs": torchft, "ddp": lambda: ddp(x, y)}
    for _ in range(BLOCKS):
        for what, step in contestants.items():
            blocks[what].append([_timed(step) for _ in range(STEPS)])
    dist.barrier()
    if rank == 0:
        writing = FOLDER / "times.writing"
        writing.write_text(json.dumps(blocks))
        writing.rename(FOLDER / "times.json")
    time.sleep(60)  # the benchmark ends both replicas; one that ended earlier would be taken for a failure


def _timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
