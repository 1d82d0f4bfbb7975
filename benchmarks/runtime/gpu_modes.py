"""One worker in several modes, in turn within one process: seconds per step and peak memory of each.

Started by `gpu_large`. A step of a small model waits for the processor that launches its kernels, which
others use too. So blocks of steps of a plain loop and of each mode alternate, and the ratio of two
neighbouring blocks counts. A block has sixteen steps: adaptive mode takes norms in some of each sixteen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

BLOCK = 16
PLAIN, FIXED, ADAPTIVE = "plain", "fixed", "adaptive"
Task = tuple[Any, Any, Any, int, Callable[[Any], Any]]
"""A model, its optimizer, its data, the samples in a step, and the loss of a batch."""


def plain(task: Task) -> Iterator[None]:
    """A loop without swell; each step is one item."""
    import torch

    _, optimizer, data, batch, loss_of = task
    while True:
        for (tokens,) in torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True):
            optimizer.zero_grad()
            loss_of(tokens).backward()
            optimizer.step()
            yield


def elastic(task: Task, mode: str) -> Iterator[None]:
    """The same in a job of one worker. The batch cannot change, whatever its times look like."""
    import swell

    model, optimizer, data, batch, loss_of = task
    fixed = {"max_batch": batch, "min_local": batch} if mode == ADAPTIVE else {}
    job = swell.elastic(model, optimizer, mode=mode, checkpoint_every_s=None, **fixed)
    loader = job.loader(data, batch_size=batch)
    for _ in job.epochs(10**6, **({"by": "data"} if mode == ADAPTIVE else {})):
        for (tokens,) in loader:
            job.step(loss_of(tokens))
            yield


def in_turn(make: Callable[[], Task], modes: list[str], rounds: int, device: str) -> dict[str, Any]:
    """Train in all modes; the first of them is what the others are compared with."""
    import torch

    on_gpu = torch.device(device).type == "cuda"
    loops: dict[str, Iterator[None]] = {}
    found: dict[str, Any] = {}
    _block(plain(make()), on_gpu)  # what the device's libraries allocate once counts for no mode
    for mode in modes:
        before = _start_peak() if on_gpu else 0
        task = make()
        loops[mode] = plain(task) if mode == PLAIN else elastic(task, mode)
        _block(loops[mode], on_gpu)  # allocates everything
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
        count = sum(p.numel() for p in task[0].parameters())
        found[mode] = {"parameters": count, "peak_gb": round(peak / 1e9, 3), "blocks_s": []}
    for _ in range(rounds):
        for mode in modes:
            found[mode]["blocks_s"].append(_block(loops[mode], on_gpu))
    first = found[modes[0]]
    for figures in found.values():
        ratios = [own / other for own, other in zip(figures["blocks_s"], first["blocks_s"])]
        figures["step_s"] = round(statistics.median(figures["blocks_s"]), 5)
        figures["step_ratio"] = round(statistics.median(ratios), 4)
        figures["step_ratios"] = [round(ratio, 3) for ratio in ratios]
        figures["memory_ratio"] = (
            round(figures["peak_gb"] / first["peak_gb"], 4) if first["peak_gb"] else None
        )
        figures["blocks_s"] = [round(block, 5) for block in figures["blocks_s"]]
    return found


def _start_peak() -> int:
    """From now on the peak is counted anew; returns the bytes in use."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _block(loop: Iterator[None], on_gpu: bool) -> float:
    """Mean seconds of a step over one block."""
    import torch

    begin_s = time.perf_counter()
    for _ in range(BLOCK):
        next(loop)
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin_s) / BLOCK
