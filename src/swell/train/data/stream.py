"""Streaming data through the queue of shards: each sample of a pass in exactly one committed step.

    def read(path):                      # the same samples in the same order on every worker
        with open(path) as file:
            for line in file:
                yield parse(line)

    loader = job.stream(paths, read, batch_size=128)

Every worker holds the same `ShardQueue`. The header of a step has what a worker took from its leases and how
many more shards it wants; at the commit every worker applies all headers in rank order. Leases are given only
there, so a pass begins with a round without samples. A worker whose shards are empty takes part in the step
with fewer samples, or none; the mean over samples stays exact, because the sum is rescaled by the samples
that workers really had. A dead worker's name is missing from the next headers: its shards go back to the
queue, with the offset of what was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from swell.train.agent.errors import UsageError
from swell.train.data.ahead import Ahead
from swell.train.data.loader import ElasticLoader, Share, Trainer
from swell.train.data.shards import Consumed, Lease, ShardQueue

Read = Callable[[Any], Iterable[Any]]


class _Reader:
    """One leased shard, read one sample ahead so that its end is known with its last sample."""

    def __init__(self, samples: Iterable[Any], lease: Lease) -> None:
        self._iterator: Iterator[Any] = iter(samples)
        skipped = sum(1 for _ in islice(self._iterator, lease.offset))
        if skipped < lease.offset:
            raise UsageError(
                f"shard {lease.shard}: {lease.offset} of its samples are in the model, but read() now "
                f"gives only {skipped}; it must give the same samples in the same order every time"
            )
        self.taken = 0
        self.finished = False
        self._next: Any = None
        self._advance()

    def _advance(self) -> None:
        try:
            self._next = next(self._iterator)
        except StopIteration:
            self._next, self.finished = None, True

    def take(self) -> Any:
        """The next sample; only while not `finished`."""
        sample = self._next
        self._advance()
        self.taken += 1
        return sample


class StreamLoader(ElasticLoader):
    """Batches of a stream that is cut into shards; iterate it in every epoch like a DataLoader."""

    streaming = True

    def __init__(
        self,
        trainer: Trainer,
        name: str,
        shards: Sequence[Any],
        read: Read,
        *,
        worker: str,
        batch_size: int,
        micro_batch: int | None,
        shuffle: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        seed: int,
        prefetch: int = 0,
    ) -> None:
        if prefetch < 0:
            raise UsageError(f"prefetch: got {prefetch}, must be at least 0")
        super().__init__(
            trainer,
            name,
            shards,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=False,
            micro_batch=micro_batch,
            num_workers=0,
            collate_fn=collate_fn,
            train=True,
            seed=seed,
        )
        self._read = read
        self._worker = worker
        self._queue = ShardQueue(len(shards), seed=seed, shuffle=shuffle)
        self._readers: dict[int, _Reader] = {}
        self._prefetch = prefetch
        self._opened: dict[int, Iterable[Any]] = {}
        """By lease: shards that a thread reads already but no batch has used yet."""

    def __len__(self) -> int:
        raise TypeError("a stream does not know its length; count steps while it runs")

    @property
    def committed(self) -> int:
        """Samples of the present pass that are in committed steps."""
        return self._queue.committed

    # ------------------------------------------------------------------ replicated position

    def state(self) -> dict[str, Any]:
        """The position that travels with the job's state."""
        return {"passes": self.passes, "batch_size": self.batch_size, "queue": self._queue.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` gave."""
        self.passes, self.batch_size = int(state["passes"]), int(state["batch_size"])
        self._queue.load_state_dict(state["queue"])
        self._readers, self._opened, self.share = {}, {}, None
        self._taken_over = True

    def window(self) -> int:
        """Places for samples in the next step; 0 at the end of the pass."""
        self.rewind()  # in case a step was dropped
        return 0 if self._queue.epoch_done else self.batch_size

    def advance(self, samples: int) -> None:
        """Do nothing: the queue keeps the position of a stream."""
        self.share = None

    def turn(self) -> None:
        """Begin the next pass."""
        self._queue.next_epoch()
        self._readers, self._opened = {}, {}
        self.passes, self.share = self.passes + 1, None

    # ------------------------------------------------------------------ one step

    def rehearsal(self) -> Any:
        """A batch to warm up with; nothing is leased."""
        wanted = self.rehearsal_samples
        for shard in self.dataset:  # type: ignore[attr-defined]
            samples = list(islice(iter(self._read(shard)), wanted))
            if samples:
                return self.collate(samples)
        raise UsageError(f"stream {self.name!r}: none of its {len(self.dataset)} shards has a sample")

    def batch(self, share: Share) -> Any:
        """Samples for the places just taken (fewer if shards end); None if this worker has none left."""
        assert share.current is not None
        rank, (low, high) = share.current
        samples: list[Any] = []
        for lease in self._queue.held_by(self._worker):
            reader = self._reader(lease)
            while len(samples) < high - low and not reader.finished:
                samples.append(reader.take())
        if not samples:
            share.current = None
            return None
        share.current = (rank, (low, low + len(samples)))
        return self.collate(samples)

    def _reader(self, lease: Lease) -> _Reader:
        reader = self._readers.get(lease.token)
        if reader is None:
            samples = self._opened.pop(lease.token, None) or self._open(lease)
            reader = self._readers[lease.token] = _Reader(samples, lease)
        return reader

    def _open(self, lease: Lease) -> Iterable[Any]:
        samples = self._read(self.dataset[lease.shard])
        return Ahead(samples, self._prefetch) if self._prefetch else samples

    def rewind(self) -> None:
        """Hand out the samples of the present step again."""
        self._readers = {token: reader for token, reader in self._readers.items() if not reader.taken}

    def header(self) -> dict[str, Any]:
        """The items this worker took since the last commit, and how many further shards it wants."""
        held = self._queue.held_by(self._worker)
        used = [
            [lease.token, reader.taken, reader.finished]
            for lease in held
            if (reader := self._readers.get(lease.token)) is not None and (reader.taken or reader.finished)
        ]
        finished = sum(1 for _, _, over in used if over)
        # Enough shards for this step and one more, so that the end of a shard does not cut a batch short.
        return {"worker": self._worker, "used": used, "want": max(2, finished + 1) - (len(held) - finished)}

    def committed_by(self, headers: Sequence[dict[str, Any]]) -> None:
        """Apply all workers' headers in rank order after a step took effect; the same on every worker."""
        self._queue.commit([Consumed(int(t), int(n), bool(f)) for h in headers for t, n, f in h["used"]])
        self._queue.retain({str(h["worker"]) for h in headers})
        wants = [(str(h["worker"]), int(h["want"])) for h in headers]
        for turn in range(max((want for _, want in wants), default=0)):
            for worker, want in wants:  # in turns, so that one worker does not get all the last shards
                if turn < want:
                    self._queue.lease(worker)
        held = {lease.token for lease in self._queue.held_by(self._worker)}
        self._readers = {token: reader for token, reader in self._readers.items() if token in held}
        for reader in self._readers.values():
            reader.taken = 0
        if self._prefetch:
            self._open_next()

    def _open_next(self) -> None:
        """Begin to read the leased shards that come next."""
        fresh = [e for e in self._queue.held_by(self._worker) if e.token not in self._readers]
        self._opened = {e.token: self._opened.get(e.token) or self._open(e) for e in fresh}
