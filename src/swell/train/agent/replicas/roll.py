"""What is known of each worker of a job of replicas, where the membership knows only replicas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swell.train.agent.membership import Worker
from swell.train.agent.protocol import Status


@dataclass(slots=True)
class Roll:
    """The workers of all replicas, one by one."""

    each: dict[str, Worker] = field(default_factory=dict)
    """Every worker process; its status is that of its replica."""
    ready_in: dict[str, int] = field(default_factory=dict)
    """By prepared worker: the epoch that it waits in."""
    through: set[str] = field(default_factory=set)
    """Workers that left the training loop."""
    ended: set[str] = field(default_factory=set)
    """Workers whose process ended as it should, while others of their replica still run."""
    answers: dict[str, set[str]] = field(default_factory=dict)
    """By worker that answered the present check: the replicas that it cannot reach."""

    def worker(self, name: str, now_s: float) -> Worker:
        """What is known of this worker, from now on if it is new."""
        return self.each.setdefault(name, Worker(name, Status.STARTING, now_s))

    def forget(self, workers: Iterable[str]) -> None:
        """These workers are no more."""
        for name in workers:
            self.ready_in.pop(name, None)
            self.answers.pop(name, None)
            self.through.discard(name)
            self.ended.discard(name)
