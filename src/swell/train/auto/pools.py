"""Samples of a script's loaders, through loader processes where the script asked for some."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader

from swell.train.data.pool import LoaderPool
from swell.train.data.samples import fetch


class Pools:
    """The loader processes of each loader, as many as its `num_workers`."""

    def __init__(self) -> None:
        self._pools: weakref.WeakKeyDictionary[DataLoader[Any], LoaderPool] = weakref.WeakKeyDictionary()

    def get(self, loader: DataLoader[Any], indices: list[Any]) -> Any:
        """These samples of `loader`, as one batch."""
        if loader.num_workers:
            return self._pool(loader).get(indices, None)
        return fetch(loader.dataset, indices, loader.collate_fn, None)  # type: ignore[arg-type]

    def plan(self, loader: DataLoader[Any], batches: list[list[Any]]) -> None:
        """Begin to load batches that will be asked for."""
        self._pool(loader).plan(batches, None)

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            pool.close()

    def _pool(self, loader: DataLoader[Any]) -> LoaderPool:
        if loader not in self._pools:
            assert loader.collate_fn is not None
            made = LoaderPool(loader.dataset, loader.collate_fn, loader.num_workers)  # type: ignore[arg-type]
            self._pools[loader] = made
        return self._pools[loader]
