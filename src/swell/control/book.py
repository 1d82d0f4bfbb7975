"""The book of active jobs: their records and what is known of them, written through to the store.

Every change of a job goes through the state machine and is written to the store with its events before
subscribers hear of it. What has to be done then comes back to the caller as instructions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swell.control import lifecycle
from swell.control.knowledge import Knowledge
from swell.control.model import JobRecord, JobRequest, Phase
from swell.control.store import Store
from swell.domain import Event, EventKind, InputError, Placement
from swell.perf.gpu_types import RatioLedger, Seen

# Which jobs are of one kind: those with the same script and the same arguments.
#
# What a job taught is kept under the fingerprint of its kind, so the second run of a script starts with the
# curve of the first (docs/how/history.md). Jobs with the same script and other arguments are kin: what one of
# them taught is good for an estimate of another, and for nothing else.


MAX_SCRIPT_BYTES = 4 << 20
"""Largest training script. A script is read whenever a job is submitted, while others wait."""


def fingerprints(request: JobRequest) -> tuple[str, str]:
    """The fingerprint of a job's kind, and that of its kin: the same script, whatever the arguments."""
    digest = hashlib.sha256(_content(request, request.script) or request.script.encode())
    how: list[Any] = [list(request.args), request.auto]
    if request.command:
        # What `python train.py` does is in its first argument that is a file.
        inside = (_content(request, word) for word in request.args if not word.startswith("-"))
        digest.update(next((content for content in inside if content), b""))
        how.append("command")
    kin = digest.copy()
    kin.update(json.dumps(["kin", *how[1:]]).encode())
    digest.update(json.dumps(how).encode())
    return digest.hexdigest()[:32], kin.hexdigest()[:32]


def _content(request: JobRequest, path: str) -> bytes:
    """The beginning of a file in a job's working directory; nothing if there is no such file."""
    try:
        with open(Path(request.workdir, path), "rb", opener=_without_waiting) as file:
            return file.read(MAX_SCRIPT_BYTES)
    except (OSError, ValueError):
        return b""


def _without_waiting(path: str, flags: int) -> int:
    """Open a file, but do not wait if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


log = logging.getLogger(__name__)

_ENDS = (EventKind.FINISHED, EventKind.FAILED, EventKind.CANCELLED, EventKind.REJECTED)

LEDGER = "gpu_types"
"""The store's setting with what kinds of jobs have shown on each GPU type."""
MOST_KINDS = 200
"""How many kinds of jobs count for the ratios between GPU types: those that showed something last."""

Recall = Callable[[JobRequest], Knowledge]
"""Returns what is known of a job before it runs, given its request."""
Subscriber = Callable[[int, Event], None]


class Book:
    """The jobs that are not over. A job that is over leaves memory and stays in the store."""

    def __init__(self, store: Store, recall: Recall | None = None) -> None:
        """`recall` returns what is known of a job before it runs; by default it reads the store's history."""
        self.store = store
        self._recall = recall or self._from_history
        self.ledger = _read_ledger(store.setting(LEDGER))
        """How GPU types compare, as all jobs have shown."""
        self._ledger_changed = False
        self.type_figure: Callable[[Placement], dict[str, str]] = lambda placement: {}
        """What events say of the GPU types of a job's slots."""
        self.records: dict[str, JobRecord] = {}
        self.known: dict[str, Knowledge] = {}
        self._subscribers: dict[int, Subscriber] = {}
        self._failing: set[int] = set()
        """Subscribers that failed at the last event, which the log says once."""

    def add(self, record: JobRecord, knowledge: Knowledge | None = None) -> None:
        """Take a job into the book, by default with what earlier jobs of its kind taught."""
        self.records[record.job_id] = record
        self.known[record.job_id] = knowledge or self.knowledge_of(record)

    def knowledge_of(self, record: JobRecord) -> Knowledge:
        """What is known of a job before it runs: what earlier jobs of its kind taught. Changes nothing."""
        knowledge = self._recall(record.request)
        if record.of is not None:
            knowledge.length.of = record.of
        return knowledge

    def recall(self, job_id: str) -> None:
        """Read the history again for a job that has not run: others of its kind may have ended meanwhile."""
        before, record = self.known[job_id], self.records[job_id]
        knowledge = self.known[job_id] = self._recalled(before.fingerprint, before.kin_mark)
        if record.of is not None:
            knowledge.length.of = record.of

    def remove(self, job_id: str) -> None:
        """Take a job out of the book; the store keeps it."""
        self.records.pop(job_id, None)
        self.known.pop(job_id, None)

    def feed(
        self, record: JobRecord, given: lifecycle.Input, now_s: float, *, save: bool = True
    ) -> tuple[JobRecord, list[lifecycle.Instruction]]:
        """Feed a job's state machine and write the new record; the caller carries out the instructions."""
        changed, instructions = lifecycle.step(record, given, now_s)
        events = [
            self._with_figures(one.event) for one in instructions if isinstance(one, lifecycle.LogEvent)
        ]
        if (changed != record and save) or events:
            self.write([changed], events)
        self.records[record.job_id] = changed
        return changed, instructions

    def write(self, records: Sequence[JobRecord], events: Sequence[Event]) -> None:
        """Write changed jobs and events in one transaction, then tell the subscribers."""
        if records or events:
            self.publish(self.store.save(records, events), events)

    def _from_history(self, request: JobRequest) -> Knowledge:
        return self._recalled(*fingerprints(request))

    def _recalled(self, mark: str, kin_mark: str) -> Knowledge:
        """What earlier jobs of a kind taught, or else their kin."""
        knowledge = self._read(mark)
        knowledge.kin_mark = kin_mark
        if kin_mark and not knowledge.known:
            knowledge.kin = self._read(kin_mark)
            knowledge.kin.source = "kin"
        return knowledge

    def _read(self, mark: str) -> Knowledge:
        """What is kept under a fingerprint; nothing if what is written there makes no sense."""
        try:
            knowledge = Knowledge.from_history(mark, self.store.recall(mark))
        except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
            log.error("the history of %s cannot be used: %r", mark, error)
            knowledge = Knowledge(mark)
        knowledge.speed.ledger = self.ledger
        return knowledge

    def _with_figures(self, event: Event) -> Event:
        """Add what a job taught to the event of its end, so that the log alone is enough for a replay.

        To the events of a start and of a resize, add the GPU type where there are several.
        """
        if event.kind in (EventKind.ALLOCATED, EventKind.RESIZED):
            return replace(event, data=dict(event.data) | self.type_figure(event.data["gpus"]))
        knowledge = self.known.get(event.job_id or "")
        if knowledge is None or event.kind not in _ENDS:
            return event
        return replace(event, data=dict(event.data) | knowledge.figures())

    def showed(self, knowledge: Knowledge) -> None:
        """Take what a job has shown on its GPU type into the ratios between types."""
        belief, kind = knowledge.speed.belief, knowledge.speed.gpu_type
        if kind and belief is not None and self.ledger.note(knowledge.fingerprint, kind, belief):
            self.ledger.learn()
            self._ledger_changed = True

    def remember(self, record: JobRecord, now_s: float) -> None:
        """Write what a job has taught so far into the history, for the next job of its kind."""
        knowledge = self.known.get(record.job_id)
        if knowledge is not None and record.phase is Phase.FINISHED:
            knowledge.finished(now_s)
            length = knowledge.length
            length.of = length.of or record.done or None  # the job may never have reported its length
        if knowledge is not None and knowledge.speed.known:
            self.store.remember(knowledge.fingerprint, now_s, knowledge.to_json())
            if knowledge.kin_mark and record.phase is Phase.FINISHED:
                self.store.remember(knowledge.kin_mark, now_s, knowledge.to_json())
        if self._ledger_changed:
            self.store.set_setting(LEDGER, json.dumps([one.to_json() for one in self.ledger.seen]))
            self._ledger_changed = False

    def active(self) -> list[JobRecord]:
        """Jobs that want slots now."""
        queued, running = Phase.QUEUED, Phase.RUNNING  # members are looked up once: there may be thousands
        return [r for r in self.records.values() if r.phase is queued or r.phase is running]

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback` with every event once it is on disk; call the result to end the subscription."""
        key = secrets.randbits(62)
        self._subscribers[key] = callback

        def end() -> None:
            self._subscribers.pop(key, None)
            self._failing.discard(key)

        return end

    @property
    def subscribers(self) -> int:
        """How many subscribers there are."""
        return len(self._subscribers)

    def publish(self, seqs: Sequence[int], events: Sequence[Event]) -> None:
        """Pass events that are on disk, with their numbers, to the subscribers."""
        for seq, event in zip(seqs, events, strict=True):
            for key, callback in list(self._subscribers.items()):
                try:
                    callback(seq, event)
                except Exception:  # it must disturb neither the job nor the other subscribers
                    if key not in self._failing:
                        log.exception("a subscriber failed at event %d; it is called again for the next", seq)
                    self._failing.add(key)
                else:
                    self._failing.discard(key)


def _read_ledger(written: str | None) -> RatioLedger:
    """What was learnt of GPU types before; nothing if what is written makes no sense."""
    try:
        seen = [Seen.from_json(one) for one in json.loads(written or "[]")]
        return RatioLedger(seen, MOST_KINDS)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        log.error("what was learnt of GPU types cannot be used: %r", error)
        return RatioLedger(most_kinds=MOST_KINDS)
