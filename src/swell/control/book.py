"""The book of active jobs: their records and what is known of them, written through to the store.

Every change goes through the state machine, is on disk with its events before anybody hears of it, and comes
back as instructions for whoever carries them out.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from swell.control import lifecycle
from swell.control.knowledge import Knowledge, fingerprint
from swell.control.model import JobRecord, JobRequest, Phase
from swell.control.store import Store
from swell.domain import Event, EventKind

_ENDS = (EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED, EventKind.REJECTED)

Recall = Callable[[JobRequest], Knowledge]
"""What is known of a job before it has been seen."""
Subscriber = Callable[[int, Event], None]


class Book:
    """Jobs that are not over. Those that are stay in the store and leave memory."""

    def __init__(self, store: Store, recall: Recall | None = None) -> None:
        """`recall` says what is known of a job before it has been seen; by default the store's history."""
        self.store = store
        self._recall = recall or self._from_history
        self.records: dict[str, JobRecord] = {}
        self.known: dict[str, Knowledge] = {}
        self._subscribers: dict[int, Subscriber] = {}

    def add(self, record: JobRecord, knowledge: Knowledge | None = None) -> None:
        """Take in a job, with what earlier jobs of its kind taught."""
        self.records[record.job_id] = record
        self.known[record.job_id] = knowledge or self.knowledge_of(record)

    def knowledge_of(self, record: JobRecord) -> Knowledge:
        """What is known of a job before it has been seen: what jobs of its kind taught. Pure."""
        knowledge = self._recall(record.request)
        if record.of is not None:
            knowledge.of = record.of
        return knowledge

    def recall(self, job_id: str) -> None:
        """Begin again with what jobs of the same kind taught meanwhile."""
        mark, record = self.known[job_id].fingerprint, self.records[job_id]
        self.known[job_id] = Knowledge.from_history(mark, self.store.recall(mark))
        self.known[job_id].of = record.of if record.of is not None else self.known[job_id].of

    def remove(self, job_id: str) -> None:
        """Let a job go."""
        self.records.pop(job_id, None)
        self.known.pop(job_id, None)

    def feed(
        self, record: JobRecord, given: lifecycle.Input, now_s: float, *, save: bool = True
    ) -> tuple[JobRecord, list[lifecycle.Instruction]]:
        """Feed the state machine and write what came out; the instructions are the caller's."""
        changed, instructions = lifecycle.step(record, given, now_s)
        events = [self._told(one.event) for one in instructions if isinstance(one, lifecycle.Log)]
        if (changed != record and save) or events:
            self.write([changed], events)
        self.records[record.job_id] = changed
        return changed, instructions

    def write(self, records: Sequence[JobRecord], events: Sequence[Event]) -> None:
        """Write changed jobs and what happened in one transaction, and tell whoever listens."""
        if records or events:
            self.publish(self.store.save(records, events), events)

    def _from_history(self, request: JobRequest) -> Knowledge:
        mark = fingerprint(request)
        return Knowledge.from_history(mark, self.store.recall(mark))

    def _told(self, event: Event) -> Event:
        """The event of a job's end with what its run taught: all that a replay needs is in the log."""
        knowledge = self.known.get(event.job_id or "")
        if knowledge is None or event.kind not in _ENDS:
            return event
        return replace(event, data=dict(event.data) | knowledge.figures())

    def remember(self, record: JobRecord, now_s: float) -> None:
        """Keep what an ended job taught for the next of its kind."""
        knowledge = self.known.get(record.job_id)
        if knowledge is not None and record.phase is Phase.FINISHED:
            knowledge.finished(now_s)
            knowledge.of = knowledge.of or record.done or None  # it may never have said how long it is
        if knowledge is not None and knowledge.belief is not None and knowledge.belief.known:
            self.store.remember(knowledge.fingerprint, now_s, knowledge.to_json())

    def active(self) -> list[JobRecord]:
        """Jobs that want slots now."""
        queued, running = Phase.QUEUED, Phase.RUNNING  # members are looked up once: there may be thousands
        return [r for r in self.records.values() if r.phase is queued or r.phase is running]

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Be told of every event once it is on disk; call the result to stop."""
        key = secrets.randbits(62)
        self._subscribers[key] = callback
        return lambda: self._subscribers.pop(key, None) and None

    @property
    def subscribers(self) -> int:
        """How many listen."""
        return len(self._subscribers)

    def publish(self, seqs: Sequence[int], events: Sequence[Event]) -> None:
        """Tell whoever listens."""
        for seq, event in zip(seqs, events, strict=True):
            for callback in list(self._subscribers.values()):
                # A subscriber that fails is its own trouble, not the job's.
                with contextlib.suppress(Exception):
                    callback(seq, event)
