"""This worker's part of the present step, and what happens to it when a member dies."""

from __future__ import annotations

from swell.train.data import plan
from swell.train.data.loader import ElasticLoader, Share
from swell.train.data.plan import Range
from swell.train.modes.ranks import PartialSums
from swell.train.replicas import cutting


class Shares:
    """The loaders drawn from in this step and this worker's share of each."""

    def __init__(self, logical: int | None, sums: PartialSums, workers: int = 1) -> None:
        """`workers`: how many share a replica."""
        self._logical = logical
        self._workers = workers
        self._sums = sums
        self.drawn: list[ElasticLoader] = []
        self.others: dict[str, list[Range]] = {}
        """By loader: samples of the coming step for which members kept gradients from before a death."""

    def draw(self, loader: ElasticLoader, rank: int, world: int) -> Share | None:
        """This worker's share of the step, made when first asked for; None at the end of the pass."""
        if loader.share is None:
            size = loader.window()
            if size == 0:
                loader.turn()
                return None
            loader.share = self._make(loader, size, rank, world)
            loader.look_ahead(lambda window: self.positions(loader, window, rank, world))
        if loader not in self.drawn:
            self.drawn.append(loader)
        if loader.share.current is not None:  # the script drew the next batch without stepping: no gradient
            self.cover()
        return loader.share

    def positions(self, loader: ElasticLoader, size: int, rank: int, world: int) -> list[tuple[int, Range]]:
        """A worker's micro-batches of a step of `size` samples, as (logical rank or -1, range)."""
        if self._logical is not None:
            cut = plan.parts(size, self._logical)
            low, high = plan.blocks(self._logical, world)[rank]
            return [(r, cut[r]) for r in range(low, high) if cut[r][0] < cut[r][1]]
        return self._batches(loader, [(0, size)], rank, world)

    def _batches(
        self, loader: ElasticLoader, ranges: list[Range], rank: int, world: int
    ) -> list[tuple[int, Range]]:
        """This worker's micro-batches of these samples, which all members share."""
        replica, position = divmod(rank, self._workers)
        mine = plan.divide(ranges, world // self._workers)[replica]
        return [(-1, r) for r in cutting.batches(mine, loader.piece, self._workers, position)]

    def cover(self) -> None:
        """Record that the batches handed out last are in the gradients now."""
        for loader in self.drawn:
            if loader.share is not None and loader.share.current is not None:
                rank, position = loader.share.current
                loader.share.covered.append(position)
                loader.share.ranks.append(rank)
                loader.share.current = None

    def begin_again(self, loader: ElasticLoader) -> None:
        """Compute all of this worker's share again, in pieces of the loader's present size."""
        share = loader.share
        assert share is not None and share.current is not None
        ranges = sorted([*share.covered, share.current[1], *(position for _, position in share.pending)])
        share.covered, share.ranks, share.current, share.loss = [], [], None, None
        share.pending = [(-1, r) for r in plan.micro(ranges, loader.piece)]
        loader.rewind()

    def complete(self) -> bool:
        """Whether this worker has done its share of the step."""
        return bool(self.drawn) and all(ld.share is not None and not ld.share.pending for ld in self.drawn)

    def commit(self) -> None:
        """Move the loaders' cursors, after the step took effect."""
        for loader in self.drawn:
            assert loader.share is not None
            loader.advance(loader.share.size)
        self.drawn = []

    def coverage(self) -> dict[str, list[Range]]:
        """The samples that this worker's gradients cover, if those can be kept after a death."""
        if not self._divisible:
            return {}
        return {ld.name: list(ld.share.covered) for ld in self.drawn if ld.share is not None}

    @property
    def _divisible(self) -> bool:
        """Whether a dead member's samples can be handed out to the others within the step.

        They cannot with logical ranks (the tree depends on the number of workers) or with several loaders at
        once (their shares would have to be cut alike): then the step begins again.
        """
        return len(self.drawn) <= 1 and self._logical is None

    def settle(self, covered: dict[str, list[Range]], rank: int, world: int) -> None:
        """Hand out again the samples that no member has gradients for; a step in progress goes on."""
        self.others = dict(covered)
        if not self._divisible:
            for loader in self.drawn:
                loader.share = None
            self.drawn = []
            self._sums.forget()
        for loader in self.drawn:
            share = loader.share
            if share is not None:
                held = self.others.pop(loader.name, [])
                share.pending = self._batches(loader, plan.missing(share.size, held), rank, world)

    def _make(self, loader: ElasticLoader, size: int, rank: int, world: int) -> Share:
        held = self.others.pop(loader.name, None)
        if held:
            return Share(size, self._batches(loader, plan.missing(size, held), rank, world))
        if self._logical is not None:
            low, high = plan.blocks(self._logical, world)[rank]
            self._sums.start(plan.program(low, high, size, self._logical))
        return Share(size, self.positions(loader, size, rank, world))
