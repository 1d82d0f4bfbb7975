"""A queue of data shards for iterable and streaming data sets, after ElasticDL (its dynamic data sharding).

A shard is a piece of the stream that can be read again from its start: a file, a range of rows, a seed.
Workers lease shards, read them in order and report samples only when the step that used them commits. So the
queue stores for each shard how many of its samples are in the model. The next worker that leases the shard
skips exactly those:

    pending --lease--> leased --commit(finished)--> done          all done: next_epoch() shuffles anew
       ^                  |
       +------ lost ------+        keeping the committed offset

This is a pure state machine: no clock, no I/O, no randomness except the seeded shuffle. The same calls in the
same order give the same queue on every worker, so it may live in a master or be replicated with the training
state. A lease has a token that is never used twice (except after a restart of the whole job from a
checkpoint, when no worker of the earlier run can reach the queue). A worker that was given up for dead and
wakes up again holds an old token, and its reports are refused. So each committed sample counts exactly once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class StaleLease(ValueError):
    """The lease is no longer valid: its shard went back to the queue or is done."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read one shard of one epoch, from `offset` on."""

    token: int
    holder: str
    epoch: int
    shard: int
    offset: int
    """Samples of the shard that are already in the model, to be skipped."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """The part of a lease that one committed step used."""

    token: int
    samples: int
    finished: bool = False
    """The shard had no further sample."""

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples: got {self.samples}, must be at least 0")


class ShardQueue:
    """Which shards of the epoch wait, are being read (by which worker, how far), and are done."""

    # Invariant: the shards of _pending, _leases and _done are disjoint and together range(shards).
    __slots__ = ("_done", "_leases", "_next_token", "_pending", "_seed", "_shards", "_shuffle", "epoch")

    def __init__(self, shards: int, *, seed: int = 0, shuffle: bool = True, epoch: int = 0) -> None:
        if shards < 1:
            raise ValueError(f"shards: got {shards}, must be at least 1")
        self._shards = shards
        self._seed = seed
        self._shuffle = shuffle
        self._next_token = 0
        self._leases: dict[int, Lease] = {}
        self._pending: deque[tuple[int, int]] = deque()
        self._done: dict[int, int] = {}
        self.epoch = epoch
        self._fill()

    def _fill(self) -> None:
        order = list(range(self._shards))
        if self._shuffle:
            random.Random(f"{self._seed}:{self.epoch}").shuffle(order)
        self._pending = deque((shard, 0) for shard in order)
        self._done = {}

    def lease(self, holder: str) -> Lease | None:
        """The next waiting shard, or None when all are done or being read by others.

        None is not the end of the epoch: a shard comes back when its reader is lost. See `epoch_done`.
        """
        if not self._pending:
            return None
        shard, offset = self._pending.popleft()
        lease = Lease(self._next_token, holder, self.epoch, shard, offset)
        self._next_token += 1
        self._leases[lease.token] = lease
        return lease

    def commit(self, consumed: Sequence[Consumed]) -> None:
        """Record what a committed step took; records nothing if one of the leases is stale."""
        finished: set[int] = set()
        for entry in consumed:
            if entry.token not in self._leases or (entry.token in finished and entry.samples):
                raise StaleLease(
                    f"lease {entry.token} is not held any more; drop what was read under it and lease again"
                )
            if entry.finished:
                finished.add(entry.token)
        for entry in consumed:
            lease = self._leases.get(entry.token)
            if lease is None:
                continue  # finished by an earlier entry of this very step
            lease = Lease(lease.token, lease.holder, lease.epoch, lease.shard, lease.offset + entry.samples)
            if entry.finished:
                del self._leases[entry.token]
                self._done[lease.shard] = lease.offset
            else:
                self._leases[entry.token] = lease

    def lost(self, holder: str) -> list[int]:
        """Put the unfinished shards of a worker that left or died back, first in line; returns them."""
        return self._give_back([lease for lease in self._leases.values() if lease.holder == holder])

    def retain(self, holders: Collection[str]) -> list[int]:
        """Put back the shards of all workers that are not in `holders`, after a change of membership."""
        return self._give_back([lease for lease in self._leases.values() if lease.holder not in holders])

    def _give_back(self, leases: list[Lease]) -> list[int]:
        for lease in sorted(leases, key=lambda lease: lease.token, reverse=True):
            del self._leases[lease.token]
            self._pending.appendleft((lease.shard, lease.offset))
        return sorted(lease.shard for lease in leases)

    def held_by(self, holder: str) -> list[Lease]:
        """The leases of a worker, oldest first, with what is committed so far as their offset."""
        return [lease for lease in self._leases.values() if lease.holder == holder]

    @property
    def epoch_done(self) -> bool:
        """Whether every sample of the epoch is in a committed step."""
        return len(self._done) == self._shards

    @property
    def committed(self) -> int:
        """Samples of this epoch in committed steps."""
        held = sum(lease.offset for lease in self._leases.values())
        return sum(self._done.values()) + held + sum(offset for _, offset in self._pending)

    @property
    def waiting(self) -> int:
        """Shards that can be leased now."""
        return len(self._pending)

    def next_epoch(self) -> None:
        """Start the next epoch with all shards waiting, in a new order."""
        if not self.epoch_done:
            left = self._shards - len(self._done)
            raise RuntimeError(f"epoch {self.epoch} still has {left} of {self._shards} shards to finish")
        self.epoch += 1
        self._fill()

    def state_dict(self) -> dict[str, Any]:
        """Plain lists and numbers that `load_state_dict` takes; leases included."""
        return {
            "shards": self._shards,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self.epoch,
            "next_token": self._next_token,
            "pending": [list(entry) for entry in self._pending],
            "leases": [[e.token, e.holder, e.epoch, e.shard, e.offset] for e in self._leases.values()],
            "done": [list(entry) for entry in self._done.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`; refuses one of another number of shards."""
        if state["shards"] != self._shards:
            raise ValueError(
                f"shards: the saved queue has {state['shards']}, this data set {self._shards}; "
                "resume with the data set that the job began with"
            )
        self._seed = state["seed"]
        self._shuffle = bool(state["shuffle"])
        self.epoch = int(state["epoch"])
        self._next_token = int(state["next_token"])
        self._pending = deque((int(shard), int(offset)) for shard, offset in state["pending"])
        leases = [Lease(*entry) for entry in state["leases"]]
        self._leases = {lease.token: lease for lease in leases}
        self._done = {int(shard): int(size) for shard, size in state["done"]}
