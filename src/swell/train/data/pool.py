"""Processes that fetch batches ahead of the training loop.

A DataLoader's processes follow a fixed order; these fetch the batches requested. When a switch changes a
worker's part, batches that are no longer needed are forgotten and the new ones are requested. A batch is
identified by its sample indices, so a batch that was fetched for the old part is used if the new part has it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import secrets
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from swell.train.agent.errors import TrainError
from swell.train.data.samples import MapDataset, fetch, seed_all

Task = tuple[tuple[int, ...], int | None]
"""Identifies a batch: its samples, and the seed of their augmentation."""


def _serve(
    dataset: MapDataset,
    collate: Callable[[list[Any]], Any],
    tasks: Any,
    results: Any,
    parent: int,
    seed: int,
) -> None:
    torch.set_num_threads(1)
    seed_all(seed)  # no two processes of any worker augment with the same numbers
    while True:
        try:
            task = tasks.get(timeout=5.0)
        except queue.Empty:
            if multiprocessing.parent_process() is None or _orphaned(parent):
                return
            continue
        if task is None:
            return
        try:
            results.put((task, fetch(dataset, task[0], collate, task[1]), None))
        except Exception:
            results.put((task, None, traceback.format_exc()))


def _orphaned(parent: int) -> bool:
    import os

    return os.getppid() != parent


class LoaderPool:
    """A few processes, the batches requested from them, and the batches that have arrived."""

    def __init__(self, dataset: MapDataset, collate: Callable[[list[Any]], Any], processes: int) -> None:
        import os

        context = torch.multiprocessing.get_context("fork")
        self._tasks = context.Queue()
        self._results = context.Queue()
        self._requested: set[Task] = set()
        self._wanted: set[Task] = set()
        self._come: dict[Task, Any] = {}
        self.size = processes
        self._processes = [
            context.Process(
                target=_serve,
                args=(dataset, collate, self._tasks, self._results, os.getpid(), secrets.randbits(62)),
                name=f"swell-loader-{i}",
                daemon=True,
            )
            for i in range(processes)
        ]
        for process in self._processes:
            process.start()

    def plan(self, batches: list[list[int]], seed: int | None) -> None:
        """Set the batches to fetch, in this order; any other batch is dropped when it arrives."""
        tasks = [(tuple(indices), seed) for indices in batches]
        self._wanted = set(tasks)
        for task in [t for t in self._come if t not in self._wanted]:
            del self._come[task]
        for task in tasks:
            if task not in self._requested and task not in self._come:
                self._requested.add(task)
                self._tasks.put(task)

    def get(self, indices: list[int], seed: int | None) -> Any:
        """One batch; waits for it if it has not arrived."""
        task: Task = (tuple(indices), seed)
        if task not in self._requested and task not in self._come:
            self._requested.add(task)
            self._tasks.put(task)
        self._wanted.add(task)
        while task not in self._come:
            self._receive()
        return self._come.pop(task)

    def _receive(self) -> None:
        try:
            task, batch, error = self._results.get(timeout=1.0)
        except queue.Empty:
            dead = [p for p in self._processes if not p.is_alive()]
            if dead:
                raise TrainError(
                    f"{len(dead)} of {self.size} loader processes died (exit code "
                    f"{dead[0].exitcode}); out of "
                    "memory is the usual reason: use fewer num_workers"
                ) from None
            return
        self._requested.discard(task)
        if error is not None:
            raise TrainError(f"the data set failed in a loader process:\n{error}")
        if task in self._wanted:
            self._come[task] = batch

    def close(self) -> None:
        """End the processes."""
        for _ in self._processes:
            with contextlib.suppress(ValueError, OSError):
                self._tasks.put(None)
        for process in self._processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join(1.0)
        for pipe in (self._tasks, self._results):
            pipe.cancel_join_thread()
            pipe.close()
