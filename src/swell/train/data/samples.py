"""The samples of a loader: their order in each pass, and how they are fetched and collated."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import queue
import random
import secrets
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.multiprocessing

from swell.train.agent.errors import TrainError
from swell.train.data.plan import Range


class MapDataset(Protocol):
    """A data set with a length and items by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def key(*parts: object) -> int:
    """A 63-bit seed from any values: the same on every machine, unrelated for different values."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(value: int) -> None:
    """Seed python, numpy and torch (all devices)."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)  # noqa: NPY002 - scripts use the legacy generator
    torch.manual_seed(value)


def permutation(size: int, seed: int, passes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order of pass number `passes` over `size` samples."""
    order: np.ndarray[Any, np.dtype[np.int64]] = np.random.default_rng(key(seed, passes)).permutation(size)
    return order


def fetch(
    dataset: MapDataset, indices: Sequence[int], collate: Callable[[list[Any]], Any], seed: int | None
) -> Any:
    """One collated batch. With a seed, each sample's random augmentation depends on the sample alone."""
    if seed is None:
        at_once = getattr(dataset, "__getitems__", None)  # as torch does: some data sets are faster so
        return collate(at_once(indices) if at_once else [dataset[i] for i in indices])
    samples = []
    for index in indices:
        seed_all(key(seed, index))
        samples.append(dataset[index])
    return collate(samples)


class Samples:
    """A loader's access to its data set; `ElasticLoader` sets the fields."""

    dataset: MapDataset
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    keyed: bool
    """Random augmentation depends only on seed, pass and sample, not on the worker that fetches it."""
    collate: Callable[[list[Any]], Any]
    passes: int
    cursor: int
    _num_workers: int
    _pool: Any = None
    """The loader's processes, once there are any."""
    _order: tuple[int, np.ndarray[Any, np.dtype[np.int64]]] | None = None
    """The pass that was shuffled last, and its order."""

    def indices(self, position: Range) -> list[int]:
        """The data set's indices for a range within the current step."""
        return self._at(self.cursor, position)

    def _at(self, cursor: int, position: Range) -> list[int]:
        """The indices for a range of the step at `cursor`; an empty one has a sample that does not count."""
        low, high = position if position[0] < position[1] else (max(position[0] - 1, 0), max(position[0], 1))
        return self._slice(cursor + low, cursor + high)

    def _slice(self, low: int, high: int) -> list[int]:
        if not self.shuffle:
            return list(range(low, high))
        if self._order is None or self._order[0] != self.passes:
            self._order = (self.passes, permutation(len(self.dataset), self.seed, self.passes))
        picked: list[int] = self._order[1][low:high].tolist()
        return picked

    def fetch(self, indices: list[int]) -> Any:
        """One batch, by the loader's processes if it has any."""
        seed = key(self.seed, self.passes, "augment") if self.keyed else None
        if self._num_workers:
            return self.pool().get(indices, seed)
        return fetch(self.dataset, indices, self.collate, seed)

    def look_ahead(self, positions: Callable[[int], list[tuple[int, Range]]]) -> None:
        """Let the loader's processes fetch what comes next; anything else they fetch is dropped.

        `positions` gives this worker's micro-batches of a step of a given size, if nothing changes.
        """
        if not self._num_workers:
            return
        out: list[list[int]] = []
        cursor = self.cursor
        for _ in range(1 + 2 * self._num_workers):
            left = len(self.dataset) - cursor
            if left <= 0 or (self.drop_last and left < self.batch_size):
                break
            window = min(self.batch_size, left)
            out += [self._at(cursor, position) for _, position in positions(window)]
            cursor += window
        seed = key(self.seed, self.passes, "augment") if self.keyed else None
        self.pool().plan(out, seed)

    def pool(self) -> Any:
        """The loader's processes, started when first needed."""
        if self._pool is None:
            self._pool = LoaderPool(self.dataset, self.collate, self._num_workers)
        return self._pool

    def evaluation(self, batches: Sequence[Range]) -> list[list[int]]:
        """These batches of one pass without training."""
        return [self._slice(low, high) for low, high in batches]

    def close(self) -> None:
        """End the loader's processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


# ---------------------------------------------------------------------- loader processes
# Processes that fetch batches ahead of the training loop.
#
# A DataLoader's processes follow a fixed order; these fetch the batches requested. When a switch changes a
# worker's part, batches that are no longer needed are forgotten and the new ones are requested. A batch is
# identified by its sample indices, so a batch that was fetched for the old part is used if the new part has
# it.


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
