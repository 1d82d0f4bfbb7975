"""Samples of a script's loaders, through loader processes where the script asked for some."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from swell.train.data.pool import LoaderPool
from swell.train.data.samples import fetch

_TOKENIZERS = "TOKENIZERS_PARALLELISM"


class Pools:
    """The loader processes of each loader, as many as its `num_workers`."""

    def __init__(self) -> None:
        self._pools: weakref.WeakKeyDictionary[DataLoader[Any], LoaderPool] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakKeyDictionary[DataLoader[Any], Any] = weakref.WeakKeyDictionary()
        """By loader: a batch that was loaded once, in place of those that are computed without effect."""

    def get(self, loader: DataLoader[Any], indices: list[Any], seed: int | None = None) -> Any:
        """These samples of `loader`, as one batch; loader processes draw random numbers by `seed`."""
        if loader.num_workers:
            return self._pool(loader).get(indices, seed)
        return fetch(loader.dataset, indices, loader.collate_fn, None)  # type: ignore[arg-type]

    def idle(self, loader: DataLoader[Any], indices: list[Any]) -> Any:
        """A batch in place of one that is computed without effect: the first one, loaded once."""
        if loader not in self._idle:
            self._idle[loader] = self.get(loader, indices)
        return copy.deepcopy(self._idle[loader])  # the script may change it

    def plan(self, loader: DataLoader[Any], batches: list[list[Any]], seed: int | None) -> None:
        """Begin to load batches that will be asked for."""
        self._pool(loader).plan(batches, seed)

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            pool.close()

    def _pool(self, loader: DataLoader[Any]) -> LoaderPool:
        if loader not in self._pools:
            assert loader.collate_fn is not None
            with _quiet_tokenizers():
                made = LoaderPool(loader.dataset, loader.collate_fn, loader.num_workers)  # type: ignore[arg-type]
            self._pools[loader] = made
        return self._pools[loader]


@contextlib.contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Processes that are forked here use one thread to tokenize, and do not warn of it."""
    chosen = os.environ.get(_TOKENIZERS)
    os.environ[_TOKENIZERS] = chosen or "false"
    try:
        yield
    finally:
        if chosen is None:
            del os.environ[_TOKENIZERS]
