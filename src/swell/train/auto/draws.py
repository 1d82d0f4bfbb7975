"""What a script draws from its DataLoaders: this worker's part, whole batches, or samples without effect."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from swell.train.auto import confinement
from swell.train.auto.dropout import Dropout
from swell.train.auto.output import tell_of_parts
from swell.train.auto.passes import Pass
from swell.train.auto.position import Position
from swell.train.auto.reduction import NEITHER
from swell.train.data.pool import LoaderPool
from swell.train.data.samples import fetch, key
from swell.train.sync.link import Link

_UNTRAINED = 3
"""A training pass in which so many batches in a row were not trained on is no training pass after all."""
_MOST_IN_FLIGHT = 512


class Draws(Position):
    """Hands out batches; `Observer` adds what happens in a step."""

    def __init__(self, link: Link, whole_iter: Callable[[Any], Iterator[Any]]) -> None:
        super().__init__(link)
        self.alone = False
        """True if the script cannot be shared among workers and not be followed: it runs as it is."""
        self.left = False
        self.pid = os.getpid()
        self._whole_iter = whole_iter
        self._pools: weakref.WeakKeyDictionary[DataLoader[Any], LoaderPool] = weakref.WeakKeyDictionary()
        self._odd = confinement.NO_LOADER
        self._agreed = 0
        self._most_in_flight = 0
        self.dropout = Dropout()
        """Off while this worker tries what kind of loss the script has."""
        self._told = False
        """True once this worker, as the leader of several, has said what the script's numbers cover."""

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The script begins to iterate `loader`."""
        if self.alone or os.getpid() != self.pid:
            return self._whole_iter(loader)
        trains = self._trains.get(loader)
        if not torch.is_grad_enabled() or trains is False:
            return self._evaluation(loader)
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            streams = isinstance(loader.dataset, IterableDataset)
            self._odd = confinement.ITERABLE if streams else confinement.UNBATCHED
            return self._whole_iter(loader)
        self.seed = self.seed or torch.initial_seed() & (2**53 - 1)
        return Pass(loader, self._passes, key(self.seed, self._passes), self.draw, training=bool(trains))

    def _evaluation(self, loader: DataLoader[Any]) -> Iterator[Any]:
        for batch in self._whole_iter(loader):
            yield batch
            if self.forwarding:
                return

    def draw(self, here: Pass) -> Any:
        """The next batch of `here` for this worker."""
        if here.over:
            raise StopIteration
        if self.alone or not here.training:
            return self._whole(here)
        job = self.job
        assert job is not None
        if here.drawn == 0:
            others = [p for p in self._active if p is not here and p.training and p.main is None]
            together = next((p for p in others if p.drawn == 1 and p.loader is not here.loader), None)
            self._begin_pass(here, follows=together)
        if job.forwarding:
            idle = self._forward(here)
            here.touched = True
            if idle is not None:
                return self._fetch(here, idle)
        elif len(here.flight) >= self._most_in_flight + _UNTRAINED:
            here.to_evaluation()
            return self._whole(here)
        elif not self._ahead and here.main is None:
            self._boundary()
        here.touched = True
        samples = self._cut(here, job.rank, job.world)
        if samples is None:
            here.over = True
            raise StopIteration
        if here.loader.num_workers:
            pool = self._pool(here.loader)
            ahead = here.upcoming(job.rank, job.world, 2 * here.loader.num_workers)
            pool.plan([samples, *ahead], None)
        return self._fetch(here, samples)

    def _cut(self, here: Pass, rank: int, world: int) -> list[Any] | None:
        """Draw a batch; returns this worker's samples of it, or None if nothing is left."""
        self.dropout.set(off=world > 1 and rank > 0 and self.reduction.kind is None)
        if world == 1:
            all_of_it = here.take_whole()
            return None if all_of_it is None else all_of_it.window
        if here.at_end():
            return None
        if self.reduction.kind in (None, NEITHER):
            whole = here.take_whole(counts=rank == 0)
            assert whole is not None
            whole.undivided = True
            if rank and here.main is None:
                whole.probe, samples = self.reduction.samples(whole.window, whole.index, self._per_step)
                return samples
            return whole.window
        if rank == 0 and not self._told:
            self._told = True
            tell_of_parts(self.link.directory.path)
        drawn = here.take(rank, world)
        return drawn.window[drawn.part[0] : drawn.part[1]]

    def _whole(self, here: Pass) -> Any:
        """A whole batch, in a pass that is not (or not yet) a training pass."""
        drawn = None if self.forwarding and here.drawn else here.take_whole()
        if drawn is None:
            if here.drawn and not self.forwarding:
                self._trains.setdefault(here.loader, False)
            here.over = True
            here.flight.clear()
            raise StopIteration
        if not torch.is_grad_enabled() or len(here.flight) > _MOST_IN_FLIGHT:
            here.flight.popleft()
        here.touched = True
        if here not in self._active:
            self._active = [p for p in self._active if p.training or p.loader is not here.loader]
            self._active.append(here)
        return self._fetch(here, drawn.window)

    def _fetch(self, here: Pass, indices: list[Any]) -> Any:
        if here.loader.num_workers:
            return self._pool(here.loader).get(indices, None)
        return fetch(here.loader.dataset, indices, here.loader.collate_fn, None)  # type: ignore[arg-type]

    def _pool(self, loader: DataLoader[Any]) -> LoaderPool:
        if loader not in self._pools:
            assert loader.collate_fn is not None
            made = LoaderPool(loader.dataset, loader.collate_fn, loader.num_workers)  # type: ignore[arg-type]
            self._pools[loader] = made
        return self._pools[loader]

    def _boundary(self) -> None:
        """Between two steps: change membership if all agreed to."""
        agreed, self._agreed = self._agreed, 0
        if self._dirty or (not self._ahead and any(p.flight for p in self._active if p.training)):
            self._counts = self._counts or self._dirty
            if agreed:
                self.link.release()
            return
        assert self.job is not None
        try:
            self.job.boundary(agreed)
        except SystemExit:
            self.left = True
            raise
