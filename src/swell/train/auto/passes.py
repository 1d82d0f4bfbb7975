"""One iteration over a script's DataLoader, with a known order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from swell.train.auto import script as auto_script


class Pass:
    """The batches of one pass; `auto.Watch` decides which of their samples this worker computes."""

    def __init__(
        self, loader: DataLoader[Any], ordinal: int, seed: int, draw: Callable[[Pass], Any], *, training: bool
    ) -> None:
        self.loader = loader
        self.ordinal = ordinal
        """The number of this training pass, or the number it would have if it were one."""
        self.training = training
        self.batches: list[list[int]] = auto_script.batches(loader, seed)
        self.index = 0
        self.carry: list[int] = []
        """Samples of a worker that died, which come again with the next batch."""
        self.window: list[int] = []
        """The samples of the present batch, for all workers together."""
        self.part = (0, 0)
        self.counts = True
        """True if no other worker computes the same samples."""
        self.missing: list[int] = []
        self.reduced = False
        """True if the gradients of the present batch have been averaged over all workers."""
        self.drawn = 0
        self.over = False
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._draw(self)

    def __len__(self) -> int:
        return len(self.batches)

    def reorder(self, seed: int) -> None:
        """Change to the order of another seed (the leader's)."""
        self.batches = auto_script.batches(self.loader, seed)

    def position(self) -> dict[str, Any]:
        """The position in this pass, for newcomers and checkpoints."""
        return {"pass": self.ordinal, "batch": self.index, "carry": list(self.carry)}

    def go_to(self, position: dict[str, Any]) -> None:
        """Go to the position of another worker's pass."""
        self.index, self.carry = int(position["batch"]), [int(i) for i in position["carry"]]
        self.window, self.missing, self.reduced = [], [], False

    def advance(self) -> None:
        """Go on to the next batch if the present one is done."""
        if self.window and self.reduced:
            self.index += 1
            self.carry, self.window, self.missing, self.reduced = self.missing, [], [], False

    def at_end(self) -> bool:
        """Whether nothing is left."""
        return self.index >= len(self.batches) and not self.carry

    def take(self, rank: int, world: int) -> list[int]:
        """Draw the next batch; returns this worker's samples of it."""
        fresh = self.batches[self.index] if self.index < len(self.batches) else []
        self.window = self.carry + fresh
        self.part, self.counts = auto_script.part(len(self.window), rank, world)
        self.drawn += 1
        return self.window[self.part[0] : self.part[1]]

    def take_whole(self) -> list[int]:
        """Draw the next batch with all its samples."""
        self.window = self.batches[self.index]
        self.part, self.counts, self.reduced = (0, len(self.window)), True, False
        self.drawn += 1
        return self.window

    def idle(self) -> list[int]:
        """Some samples to compute without effect."""
        self.drawn += 1
        self.window = []
        return self.batches[0][: max(2, len(self.batches[0]) // 2)]

    def upcoming(self, rank: int, world: int, count: int) -> list[list[int]]:
        """The samples this worker needs now and in the next batches, if membership does not change."""
        coming = [self.window, *self.batches[self.index + 1 : self.index + count]]
        cut = [(b, auto_script.part(len(b), rank, world)[0]) for b in coming]
        return [b[low:high] for b, (low, high) in cut]

    def to_evaluation(self) -> None:
        """Make this an evaluation pass: the script gets all samples that it has not had yet."""
        low, high = self.part
        rest = self.window[:low] + self.window[high:]
        self.batches = [*([rest] if rest else []), *self.batches[self.index + 1 :]]
        self.training, self.index, self.window = False, 0, []
