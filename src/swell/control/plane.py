"""The control plane: the calls behind the HTTP API and the commands.

Its conductor keeps the cluster in order, and its loop gives the conductor a turn when one is needed. Calls
and turns share one lock.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swell.control import lifecycle, promises, teams, views
from swell.control.book import Book, Recall, Subscriber
from swell.control.conductor import NOT_BOTH, Conductor
from swell.control.errors import Conflict, NotFound, NotLeading, StoreUnavailable, TooMany
from swell.control.intake import Intake, Ticket
from swell.control.knowledge import MAX_SCRIPT_BYTES
from swell.control.limits import NO_LIMITS, Gate, Limits
from swell.control.loop import Loop
from swell.control.model import Estimate, JobRecord, JobRequest, Phase, Promise
from swell.control.renting import AutoscalerState, Renting
from swell.control.reservations import YIELD_POLL_S, ReservationState
from swell.control.retention import Done, Keep, Retention
from swell.control.series import series
from swell.control.store import Store
from swell.control.teams import TeamState
from swell.control.views import NodeView
from swell.domain import Event, EventKind, InputError, Reservation, Team
from swell.engines import Engine
from swell.engines.accounts import no_script
from swell.engines.clock import now_s
from swell.engines.parts import Part
from swell.policies import DEFAULT, make_policy

__all__ = ["ControlPlane", "NodeView"]

KEEP = Keep()
FIRST_HOUSEKEEPING_S = 60.0
HOUSEKEEPING_S = 3600.0
"""Seconds between two looks for what need not be kept any more."""
FEW_SUBMISSIONS = 4
"""Up to this many submissions at a time get an estimate by looking ahead; more get a rougher one."""


@dataclass(frozen=True, slots=True)
class _Submission:
    request: JobRequest
    owner: str
    key: str | None


class ControlPlane:
    """Takes jobs in, answers questions about them, and does what people ask. Methods are thread-safe."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        home: Path,
        policy: str = DEFAULT,
        interval_s: float = 5.0,
        round_s: float | None = None,
        clock: Callable[[], float] = now_s,
        recall: Recall | None = None,
        limits: Limits = NO_LIMITS,
        keep: Keep = KEEP,
        end_unknown: bool = False,
        renting: Renting | None = None,
    ) -> None:
        """`interval_s`: seconds between two turns if nothing happens. `round_s`: the length of the policy's
        rounds, in place of its own. `recall`: returns what is known of a job before it runs, in place of the
        store's history. `keep`: what is kept of jobs that are over. `end_unknown`: end jobs that run here and
        that the store does not know. `renting`: nodes that are rented as the queue is worth them."""
        self.store = store
        self.engine = engine
        self.home = home
        self.clock = clock
        self._default_policy = policy
        self._interval_s = interval_s
        self._round_s = round_s
        self._lock = threading.RLock()
        self._book = Book(store, recall)
        self._conductor = Conductor(self._book, engine, home)
        self._conductor.end_unknown, self._conductor.limits = end_unknown, limits
        self._renting = self._conductor.renting = renting
        self._gate = Gate(limits)
        self._loop = Loop(self.turn, self._wait_s, lambda: self._conductor.reservations.waiting)
        self._watchdog = Part("watchdog", self._watch)
        self._retention = Retention(store, home, keep)
        self._housekeeper = Part("housekeeper", self._keep_house)
        self._intake: Intake[_Submission, JobRecord] = Intake(self._take_in)

    def come_up(self) -> None:
        """Read the store and find the jobs that run, without the loop: the caller takes the turns."""
        held = {r.job_id: r.held for r in self.store.jobs(over=False, limit=1_000_000) if r.held}
        self.engine.start(self.wake, held)
        with self._lock:
            policy = self.store.setting("policy") or self._default_policy
            self._conductor.come_up(policy, self._round_s, self.clock())

    def start(self) -> None:
        """Come up and begin to take turns."""
        self.come_up()
        self._loop.start()
        self._watchdog.start()
        self._housekeeper.start()

    def stop(self) -> None:
        """Stop listening and deciding. Jobs go on."""
        self._watchdog.stop(5.0)
        self._housekeeper.stop(30.0)
        self._loop.stop()
        self.engine.close()

    def wake(self) -> None:
        """Have a turn taken soon, because something happened."""
        self._loop.wake()

    def turn(self) -> None:
        """One turn: listen, reconcile, decide if a decision is due."""
        with self._lock:
            if not self.store.leads:
                raise NotLeading()
            self._conductor.turn(self.clock())

    @property
    def trouble(self) -> str:
        """Why the last turn failed, or which part of the platform does not work; empty if all is well."""
        return self._loop.trouble or "; ".join(self.health().values())

    def health(self) -> dict[str, str]:
        """By name, the parts that do not do their work, and why. A thread that has ended is started again."""
        found = {part.name: part.look() for part in self._parts()}
        return {name: text for name, text in found.items() if text}

    def _parts(self) -> list[Part]:
        return [self._loop.part, self._watchdog, self._housekeeper, *self.engine.parts()]

    def _watch(self) -> None:
        """Look after the other threads, so that one that has ended works again although nobody asks."""
        while not self._watchdog.stopping.wait(1.0):
            self._watchdog.beat()
            self.health()

    def _keep_house(self) -> None:
        """Delete from time to time what need not be kept any more."""
        next_s = time.monotonic() + FIRST_HOUSEKEEPING_S
        while not self._housekeeper.stopping.wait(1.0):
            self._housekeeper.beat()
            if time.monotonic() < next_s or not self.store.leads:
                continue
            self._housekeeper.beat(busy=True)
            with contextlib.suppress(StoreUnavailable):
                self._retention.run(self.clock(), beat=lambda: self._housekeeper.beat(busy=True))
            next_s = time.monotonic() + HOUSEKEEPING_S

    def collect(self, keep_s: float | None, keep_bytes: int | None, *, dry: bool) -> Done:
        """Delete now what need not be kept, or say what (`dry`). None: as the platform was told to keep."""
        keep = self._retention.keep
        keep = replace(
            keep,
            for_s=keep.for_s if keep_s is None else keep_s,
            most_bytes=keep.most_bytes if keep_bytes is None else keep_bytes,
        )
        return self._retention.run(self.clock(), keep, dry=dry)

    @property
    def due_s(self) -> float:
        """When a turn is due if nothing happens before: for the policy or the autoscaler, or because reserved
        hours change."""
        calendar_s = self._conductor.reservations.next_change_s(self.clock())
        look_s = math.inf if self._renting is None else self._renting.look_s
        return min(self._conductor.scheduler.rhythm.due_s, calendar_s, look_s)

    def _wait_s(self) -> float:
        most_s = YIELD_POLL_S if self._conductor.reservations.waiting else self._interval_s
        return min(most_s, max(self.due_s - self.clock(), 0.0))

    # -- submissions -------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, owner: str, idempotency_key: str | None = None) -> JobRecord:
        """Take a job in, or refuse its deadline. The returned record is on disk."""
        self._check(request, owner)
        return self._intake(_Submission(request, owner, idempotency_key))

    def _take_in(self, tickets: Sequence[Ticket[_Submission, JobRecord]]) -> None:
        """Serve submissions that came at about the same time, in one transaction."""
        accepted: list[tuple[JobRecord, Sequence[int], Sequence[Event]]] = []
        quick = len(tickets) > FEW_SUBMISSIONS
        with self._lock:
            try:
                with self.store.transaction():
                    for ticket in tickets:
                        try:
                            ticket.answer = self._accept(ticket.submission, accepted, quick)
                        except (InputError, TooMany) as error:
                            ticket.refusal = error
            except BaseException:
                for record, _, _ in accepted:
                    self._conductor.forget(record.job_id, self.clock())
                raise
            for record, seqs, events in accepted:
                self._book.publish(seqs, events)
                if record.promise.pending and not record.phase.over:
                    self._conductor.scheduler.profiling.ask(record, record.submitted_s)
            self.wake()

    def _accept(
        self,
        submission: _Submission,
        accepted: list[tuple[JobRecord, Sequence[int], Sequence[Event]]],
        quick: bool,
    ) -> JobRecord:
        """Write a new job to the store; if its owner has used the key before, return that job instead."""
        if submission.key is not None:
            earlier = self.store.by_key(submission.owner, submission.key)
            if earlier is not None:
                return self._book.records.get(earlier.job_id, earlier)
        scheduler = self._conductor.scheduler
        active = sum(record.owner == submission.owner for record in self._book.records.values())
        self._gate.submission(submission.owner, active, self.clock())
        record = self._new_record(submission.request, submission.owner)
        knowledge = self._book.knowledge_of(record)
        answer, asked = promises.promise(record, knowledge, scheduler, record.submitted_s, quick=quick)
        record = replace(record, promise=answer)
        if not answer.admitted:
            record = replace(record, phase=Phase.REFUSED, ended_s=record.submitted_s, reason=answer.reason)
        events = views.submission(record, knowledge, scheduler)
        seqs = self.store.accept(record, submission.key, events)
        accepted.append((record, seqs, events))
        if answer.admitted:
            self._book.add(record, knowledge)
            scheduler.add(record, record.submitted_s)
            if asked is not None:
                scheduler.accepted(asked)
        return record

    def quote(self, request: JobRequest, owner: str) -> Promise:
        """The promise that submitting this request would give. Changes nothing."""
        self._check(request, owner)
        with self._lock:
            record = self._new_record(request, owner)
            knowledge = self._book.knowledge_of(record)
            return promises.promise(record, knowledge, self._conductor.scheduler, record.submitted_s)[0]

    # -- jobs --------------------------------------------------------------------------------------------

    def jobs(
        self,
        owner: str | None = None,
        phase: Phase | None = None,
        limit: int = 1000,
        before: JobRecord | None = None,
    ) -> list[JobRecord]:
        """Jobs, newest first; `before`, the last job of a page, asks for the next page."""
        with self._lock:
            live = teams.with_reasons(self._book.records.values(), self._conductor.scheduler)
        found = {
            r.job_id: r
            for r in live
            if (owner is None or r.owner == owner)
            and (phase is None or r.phase is phase)
            and (before is None or _age(r) < _age(before))
        }
        if phase is None or phase.over:
            ended = self.store.jobs(owner=owner, over=True, phase=phase, before=before, limit=limit)
            found |= {r.job_id: r for r in ended}
        return sorted(found.values(), key=_age, reverse=True)[:limit]

    def job(self, job_id: str) -> JobRecord:
        """One job."""
        with self._lock:
            record = self._book.records.get(job_id) or self.store.job(job_id)
        if record is None:
            raise NotFound(f"there is no job '{job_id}'; 'swell queue --all' lists the jobs")
        return record

    def cancel(self, job_id: str, by: str = "its owner") -> JobRecord:
        """End a job."""
        return self._ask(job_id, lifecycle.CancelAsked(by))

    def pause(self, job_id: str) -> JobRecord:
        """Have a job give its slots back until it is resumed; its state is saved first."""
        return self._ask(job_id, lifecycle.PauseAsked())

    def resume(self, job_id: str) -> JobRecord:
        """Let a paused job go on."""
        return self._ask(job_id, lifecycle.ResumeAsked())

    def scale(self, job_id: str, min_workers: int, max_workers: int | None) -> JobRecord:
        """Bound a job's workers by hand."""
        with self._lock:
            self._conductor.scheduler.check_fits(min_workers)
            return self._ask(job_id, lifecycle.BoundsAsked(min_workers, max_workers))

    def _ask(self, job_id: str, given: lifecycle.Input) -> JobRecord:
        with self._lock:
            record = self._book.records.get(job_id)
            if record is None:
                # The job is over or does not exist: `job` or the state machine refuses, unless the request
                # asks for what is so already.
                return lifecycle.step(self.job(job_id), given, self.clock())[0]
            self._conductor.feed(record, given, self.clock())
            self.wake()
            return self._book.records.get(job_id) or self.job(job_id)

    def nodes(self) -> list[NodeView]:
        """The nodes and how many of their slots are in use."""
        with self._lock:
            drained, records = self._conductor.drained, self._book.records.values()
            cluster = self.engine.cluster().without(self._conductor.scheduler.cluster.held)
            slow, avoided = self._conductor.slow_nodes.slow(self.clock()), self._conductor.avoided
            return views.nodes(cluster, drained, records, self._renting, slow, avoided)

    def autoscaler(self) -> AutoscalerState | None:
        """How many nodes are rented, how many should be, and why; None if no nodes are rented."""
        with self._lock:
            return None if self._renting is None else self._renting.state()

    def drain(self, node: str) -> None:
        """Move all jobs off a node, and give it none until it is undrained."""
        self._set_drained(node, True)

    def undrain(self, node: str) -> None:
        """Use a drained node again."""
        self._set_drained(node, False)

    def _set_drained(self, node: str, drained: bool) -> None:
        with self._lock:
            names = [n.name for n in self.engine.cluster().nodes]
            if node not in names:
                raise NotFound(f"there is no node '{node}'; nodes: {', '.join(names)}")
            before = self._conductor.drained
            changed = before | {node} if drained else before - {node}
            self.store.set_setting("drained", json.dumps(sorted(changed)))
            self._conductor.drained = changed
            if not drained:  # whoever says that the node is well again knows better than what was measured
                self._conductor.slow_nodes.forget(node)
                slow = self._conductor.slow_nodes.to_json()
                self.store.set_setting("slow_nodes", json.dumps(slow))
            self.wake()

    def reservations(self) -> list[ReservationState]:
        """What is reserved for services, and the slots that they have now."""
        with self._lock:
            return self._conductor.reservations.states(self.clock())

    def reserve(self, asked: Reservation, by: str, *, force: bool = False) -> ReservationState:
        """Reserve capacity for a service, or change a reservation. Refused if it would break a promise."""
        if self._renting is not None:
            raise Conflict(NOT_BOTH)
        with self._lock:
            made = self._conductor.reservations.make(asked, self.clock(), by=by, force=force)
            text = f"its promised finish is in danger: slots are reserved for {asked.name}"
            for job_id in made.endangered:
                self._conductor.feed(self._book.records[job_id], lifecycle.Noticed(text), self.clock())
            self.wake()
            return made

    def unreserve(self, name: str, by: str) -> ReservationState:
        """Remove a reservation."""
        with self._lock:
            removed = self._conductor.reservations.remove(name, self.clock(), by=by)
            self.wake()
            return removed

    def demand(self, name: str, gpus: int) -> ReservationState:
        """Give the service that a reservation follows this many slots from now on."""
        with self._lock:
            noted = self._conductor.reservations.demand(name, gpus, self.clock())
            self.wake()
            return noted

    def teams(self) -> list[TeamState]:
        """The teams, and how many slots each has now."""
        with self._lock:
            return teams.states(self._conductor.scheduler)

    def set_team(self, asked: Team, *, force: bool = False) -> TeamState:
        """Make a team, or change it. Refused if it would break a promise."""
        with self._lock:
            made = teams.change(self._conductor.scheduler, self.store, asked, self.clock(), force=force)
            self.wake()
            return made

    def remove_team(self, name: str, *, force: bool = False) -> TeamState:
        """Remove a team. Refused if it would break a promise."""
        with self._lock:
            gone = teams.remove(self._conductor.scheduler, self.store, name, self.clock(), force=force)
            self.wake()
            return gone

    def policy(self) -> str:
        """The present policy, with its options, as it was given."""
        with self._lock:
            return self._conductor.scheduler.policy_text

    def set_policy(self, text: str) -> None:
        """Decide by another policy from now on, also after a restart."""
        make_policy(text)
        with self._lock:
            self.store.set_setting("policy", text)
            self._conductor.scheduler.set_policy(text, self.clock())
            self.wake()

    def events(
        self, since_seq: int = 0, job_id: str | None = None, limit: int = 1000
    ) -> list[tuple[int, Event]]:
        """Events with a number above `since_seq`, oldest first."""
        return self.store.events(since_seq, job_id=job_id, limit=limit)

    def changes(self, kinds: Sequence[EventKind], since_s: float, limit: int) -> list[Event]:
        """Events of some kinds from a moment on, oldest first; only the newest if there are over `limit`."""
        return self.store.changes(kinds, since_s, limit)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback`, which must not block, with every event on disk; call the result to stop that."""
        with self._lock:
            return self._book.subscribe(callback)

    def logs(self, job_id: str, offset: int = 0, limit: int = 65536) -> tuple[bytes, int]:
        """A job's output from an offset, and the offset to go on from."""
        self.job(job_id)
        return self.engine.logs(job_id, self._conductor.job_dir(job_id), offset=offset, limit=limit)

    def explain(self, job_id: str) -> dict[str, Any]:
        """Why a job runs or waits, when it will be done, and the slots it has had."""
        events = [event for _, event in self.store.events(job_id=job_id, limit=10_000)]
        with self._lock:
            record = self.job(job_id)
            now_s, scheduler = self.clock(), self._conductor.scheduler
            behind_s = self._conductor.reconciler.behind_s(job_id, now_s)
            return views.explain(record, scheduler, events, now_s, behind_s, self.trouble)

    def series(self, job_id: str) -> dict[str, Any]:
        """A job's curves: progress, loss, metrics and slots over time."""
        self.job(job_id)
        return series([event for _, event in self.store.events(job_id=job_id, limit=10_000)])

    def stats(self) -> Mapping[str, Any]:
        """Figures for monitoring."""
        with self._lock:
            parts = {part.name: float(not part.trouble) for part in self._parts()}
            return self._conductor.stats(self.trouble) | {"part_up": parts}

    def _check(self, request: JobRequest, owner: str) -> None:
        script = Path(request.workdir, request.script)
        if not os.path.isfile(script):  # noqa: PTH113 - a name too long for the file system is not there
            raise no_script(script)
        self.engine.check(self._conductor.launch(self._new_record(request, owner)))
        if request.command and not os.access(script, os.X_OK):
            raise InputError(
                f"script: '{script}' cannot be run; make it executable (chmod +x), or name first the "
                "program that runs it, such as: sh train.sh",
                field="script",
            )
        if script.stat().st_size > MAX_SCRIPT_BYTES and not request.command:
            raise InputError(
                f"script: '{script}' has {script.stat().st_size} bytes, allowed are {MAX_SCRIPT_BYTES}",
                field="script",
            )
        if request.deadline_s is not None and request.deadline_s <= self.clock():
            raise InputError(
                "deadline_s must be in the future: give a later one, or none for best effort",
                field="deadline_s",
            )
        self._conductor.scheduler.check_fits(request.min_workers)

    def _new_record(self, request: JobRequest, owner: str) -> JobRecord:
        return JobRecord(
            job_id=f"{request.name}-{secrets.token_hex(5)}",
            owner=owner,
            request=request,
            submitted_s=self.clock(),
            phase=Phase.QUEUED,
            promise=Promise(admitted=True, pending=True, estimate=Estimate(finish_s=None)),
        )


def _age(record: JobRecord) -> tuple[float, str]:
    """The key by which jobs are sorted in lists."""
    return record.submitted_s, record.job_id
