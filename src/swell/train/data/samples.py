"""The samples of a loader: their order in each pass, and how they are fetched and collated."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

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
            from swell.train.data.pool import LoaderPool

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
