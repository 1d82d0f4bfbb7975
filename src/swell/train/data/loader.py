"""Data: one permutation per epoch, one committed cursor, every sample exactly once.

A loader never decides anything on its own. Which samples a worker gets in a step follows from the replicated
state (pass over the data, cursor, batch size) and the generation (rank, size). Samples that were prefetched
for another assignment are dropped and fetched again. No sample is lost or repeated, because the cursor moves
only when a step commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils.data import default_collate

from swell.train.agent.errors import UsageError
from swell.train.data import plan
from swell.train.data.plan import Range
from swell.train.data.samples import MapDataset, Samples


class Trainer(Protocol):
    """The part of a job that a loader uses."""

    @property
    def mode(self) -> str:
        """The batch mode of the job."""

    def enough(self) -> bool:
        """Whether training is over, even in the middle of a pass."""

    def batches(self, loader: ElasticLoader) -> Iterator[Any]:
        """This worker's batches of a pass over the loader."""


@dataclass(slots=True)
class Share:
    """One worker's part of one step: what is still to compute and what its gradients cover."""

    size: int
    """Samples in the whole step."""
    pending: list[tuple[int, Range]]
    """(logical rank or -1, range within the step), in order."""
    covered: list[Range] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """Logical ranks among what is covered."""
    current: tuple[int, Range] | None = None
    """The micro-batch that the script has and has not stepped on yet, or None."""
    loss: Any = None
    """This worker's part of the step's mean loss (a number or a tensor); None in a step that needs none."""

    def take(self) -> tuple[int, Range]:
        """The next micro-batch, to be handed to the script."""
        self.current = self.pending.pop(0)
        return self.current

    @property
    def samples(self) -> int:
        """How many samples this worker's gradients cover."""
        return sum(high - low for low, high in self.covered)


class ElasticLoader(Samples):
    """Batches of a map-style data set for this worker; iterate it in every epoch like a DataLoader."""

    streaming = False
    """True if step headers must list the samples, because the others cannot derive which ones were used."""

    def __init__(
        self,
        trainer: Trainer,
        name: str,
        dataset: MapDataset,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        micro_batch: int | None,
        num_workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        train: bool,
        seed: int,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UsageError(
                f"dataset of loader {name!r}: a {type(dataset).__name__} has no length or no index; cut it "
                "into shards (files, ranges) and use job.stream(shards, read, batch_size)"
            )
        if batch_size < 1:
            raise UsageError(f"batch_size: got {batch_size}, must be at least 1")
        if micro_batch is not None and micro_batch < 1:
            raise UsageError(f"micro_batch: got {micro_batch}, must be at least 1")
        if num_workers < 0:
            raise UsageError(f"num_workers: got {num_workers}, must be at least 0")
        if len(dataset) < 1:
            raise UsageError(f"dataset of loader {name!r}: it is empty; give it at least one sample")
        if train and drop_last and batch_size > len(dataset):
            raise UsageError(
                f"batch_size: got {batch_size}, more than the {len(dataset)} samples, and "
                "drop_last leaves no step"
            )
        self.trainer = trainer
        self.name = name
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.micro_batch = micro_batch
        self.room: int | None = None
        """The largest batch that fits this worker's memory, once a larger one has failed; else None."""
        self.train = train
        self.seed = seed
        self.keyed = train and trainer.mode == "consistent"
        self.collate = collate_fn or default_collate
        self.passes = 0
        self.cursor = 0
        self.share: Share | None = None
        self._taken_over = False
        self._num_workers = num_workers

    def __len__(self) -> int:
        """Steps of one pass at the present batch size (the same on every worker)."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[Any]:
        return self.trainer.batches(self)

    @property
    def piece(self) -> int | None:
        """The most samples that are computed at once; None for no limit."""
        bounds = [bound for bound in (self.micro_batch, self.room) if bound is not None]
        return min(bounds, default=None)

    # ------------------------------------------------------------------ replicated position

    def state(self) -> dict[str, Any]:
        """The position that travels with the job's state."""
        return {"passes": self.passes, "cursor": self.cursor, "batch_size": self.batch_size}

    def load(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave."""
        self.passes, self.cursor = int(state["passes"]), int(state["cursor"])
        self.batch_size = int(state["batch_size"])
        self.share = None
        self._taken_over = True

    def window(self) -> int:
        """Samples in the next step; 0 at the end of the pass."""
        left = len(self.dataset) - self.cursor
        if left <= 0 or (self.drop_last and left < self.batch_size) or self.trainer.enough():
            return 0
        return min(self.batch_size, left)

    def advance(self, samples: int) -> None:
        """Move the cursor, after a step with `samples` samples was committed."""
        self.cursor += samples
        self.share = None

    def begin(self) -> None:
        """Called when the script starts to iterate. A pass that was left at its very end (`zip` does so) is
        over, unless this worker joined the job at exactly that position."""
        if self.window() == 0 and not self._taken_over:
            self.turn()
        self._taken_over = False

    def turn(self) -> None:
        """Begin the next pass."""
        self.passes, self.cursor, self.share = self.passes + 1, 0, None

    # ------------------------------------------------------------------ a step

    def batch(self, share: Share) -> Any:
        """The micro-batch that was just taken from `share`."""
        assert share.current is not None
        return self.fetch(self.indices(share.current[1]))

    def rehearsal(self) -> Any:
        """A batch of a usual size to warm up with; its samples do not count as used."""
        size = max(1, min(self.window() or self.batch_size, len(self.dataset)))
        (low, high) = plan.parts(size, 2)[1] if size > 1 else (0, 1)
        high = min(high, low + (self.piece or high))
        return self.fetch(self.indices((low, high)) or [0])

    @property
    def rehearsal_samples(self) -> int:
        """The most samples that `rehearsal` gives."""
        usual = -(-self.batch_size // 2)
        return min(usual, self.piece or usual)

    def rewind(self) -> None:
        """Hand out the samples of the present step again."""

    def header(self) -> dict[str, Any]:
        """Information on this worker's samples for the others; empty if it follows from the cursor."""
        return {}

    def committed_by(self, headers: Sequence[dict[str, Any]]) -> None:
        """Called when a step took effect, with the headers of all workers."""
