"""The conductor listens to jobs, lets the policy decide, and makes the engine follow, one turn at a time.

    reports and processes -> lifecycle (pure: inputs in, record and instructions out) -> store -> engine
    records and knowledge -> scheduler (policy, board) -> moves -> lifecycle

Every change of a job goes through its state machine, is written to the store with its events in one
transaction, and is carried out only then. So the control plane can be killed at any moment: after a restart
it reads the store, asks the engine what runs, and goes on where it was. Jobs do not notice.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from swell.board import Move
from swell.control import lifecycle, promises, teams, views
from swell.control.book import Book
from swell.control.errors import StoreUnavailable
from swell.control.knowledge import Knowledge, Trials
from swell.control.lifecycle import AskAgain, EndStray, FeedInput, Reconciler
from swell.control.limits import NO_LIMITS
from swell.control.model import JobRecord, Phase
from swell.control.renting import Renting
from swell.control.reservations import Reservations
from swell.control.scheduler import Scheduler
from swell.control.slow_nodes import SlowNodes
from swell.control.store import Store
from swell.domain import Cluster, Event, EventKind, InputError, Node, SwellError
from swell.domain.events import TIME_LIMIT
from swell.engines import Engine, EngineReport, Launch, Observed, RunState
from swell.policies import DEFAULT, is_ours

# Which of a job's progress reports go into the event log: a bounded number, evenly spread over its life.
#
# Jobs report twice a second. The log takes one report every `FIRST_LOGGED_S` seconds; once a job has
# `MOST_LOGGED` of them every second one is deleted and the spacing doubles. So a curve is fine for a job of a
# minute, and a job of a month has no more than `MOST_LOGGED` points. The first report of an epoch need not
# wait for all of that time, because a sweep may wait for it. The last report before a job's end goes into the
# log in any case.


FIRST_LOGGED_S = 2.0
"""Seconds between two reports in the log at first."""
AT_EPOCH = 0.25
"""The part of that time after which the first report of another epoch goes into the log."""
MOST_LOGGED = 600
"""Most reports of one job in the log."""


@dataclass(slots=True)
class _Kept:
    count: int
    spacing_s: float
    last_s: float = float("-inf")
    epoch: object = None
    """The epoch of the last report in the log."""


class ProgressLog:
    """Decides which progress reports are written to the log, and thins those that are there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, _Kept] = {}
        self._newest: dict[str, Event] = {}
        """By job: the newest report that is not in the log."""

    def heard(self, event: Event) -> None:
        """Take a job's newest report."""
        assert event.job_id is not None
        self._newest[event.job_id] = event

    def due(self, ended: Collection[str]) -> dict[str, Event]:
        """The reports that belong in the log, by job: one now and then, and the last of jobs that ended."""
        return {
            job_id: event
            for job_id, event in self._newest.items()
            if job_id in ended or self._is_due(event, self._of(job_id))
        }

    def _is_due(self, event: Event, kept: _Kept) -> bool:
        part = AT_EPOCH if event.data.get("epoch") != kept.epoch else 1.0
        return event.time_s - kept.last_s >= kept.spacing_s * part

    def _of(self, job_id: str) -> _Kept:
        kept = self._jobs.get(job_id)
        if kept is None:
            # The log may hold reports from before a restart of the control plane.
            count, span_s = self._store.tally(job_id, EventKind.PROGRESS)
            kept = self._jobs[job_id] = _Kept(count, max(FIRST_LOGGED_S, span_s / max(count, 1)))
        return kept

    def written(self, job_id: str, now_s: float) -> None:
        """Count a report that was written to the log, and thin the log if it is full."""
        kept = self._of(job_id)
        written = self._newest.pop(job_id, None)
        kept.count, kept.last_s = kept.count + 1, now_s
        kept.epoch = None if written is None else written.data.get("epoch")
        if kept.count >= MOST_LOGGED:
            self._store.thin(job_id, EventKind.PROGRESS)
            kept.count -= kept.count // 2
            kept.spacing_s *= 2

    def forget(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
        self._newest.pop(job_id, None)


log = logging.getLogger(__name__)

_OVER = (RunState.FINISHED, RunState.FAILED, RunState.STOPPED)
NOT_BOTH = (
    "reservations and rented nodes do not go together: an autoscaler counts no slots of services; remove the "
    "reservations ('swell reserve rm'), or leave out --autoscale"
)
_CURVES = ("epoch", "batch_size", "loss", "target_loss", "lr", "metrics")
"""Fields of a progress report that are written to the log, besides `done` and `of`."""


@dataclass(slots=True)
class TurnFigures:
    """Counters for monitoring."""

    decisions: int = 0
    decision_s: float = 0.0
    spared: int = 0
    """Errors about single jobs that were kept from disturbing the others."""


class Conductor:
    """Keeps the engine in step with what the policy decides. Its caller holds the control plane's lock."""

    def __init__(self, book: Book, engine: Engine, home: Path) -> None:
        self.book = book
        self.engine = engine
        self.figures = TurnFigures()
        self.drained: set[str] = set()
        """Names of the nodes that a person has drained: they get no jobs."""
        self.slow_nodes = SlowNodes()
        self.avoided: frozenset[str] = frozenset()
        """Names of the slow nodes that are kept out of use now."""
        self.end_unknown = False
        """Whether jobs that run here and are not in the store are ended; else they are left alone."""
        self.limits = NO_LIMITS
        """What one user may have, and how long a job may run."""
        self.strays: set[str] = set()
        """Jobs that run here and that the store does not know."""
        self._spared: dict[str, str] = {}
        """By job: the last error about it that was kept from disturbing the others."""
        self.renting: Renting | None = None
        """The rented nodes, if nodes are rented."""
        self.scheduler: Scheduler
        self._home = home
        self.reconciler = Reconciler()
        self.reservations = Reservations(book)
        self._progress = ProgressLog(book.store)
        self._starting: dict[str, float] = {}
        """By job: when it was given slots. Removed at the job's first progress report after that."""
        self._told_of: dict[str, str] | None = None
        """The failure of a policy that is in the event log."""
        self._owed: dict[str, Move] = {}
        """By job: a move that the board has entered and the job's record has not. Empty after a turn that
        succeeded; after one that failed (the disk was full, say) the next turn carries these moves out."""

    def come_up(self, policy: str, interval_s: float | None, now_s: float) -> None:
        """Read from the store which nodes are drained, which jobs there are, and what they hold."""
        store = self.book.store
        self.drained = set(json.loads(store.setting("drained") or "[]"))
        try:
            self.slow_nodes = SlowNodes(json.loads(store.setting("slow_nodes") or "{}"))
        except (ValueError, TypeError, AttributeError) as error:
            log.error("which nodes were slow cannot be read: %r", error)
        if self.renting is not None:
            self.renting.come_up()
        try:
            self.scheduler = Scheduler(self.book, policy, self.cluster(), interval_s, self.limits)
        except InputError as error:
            if is_ours(policy):
                raise
            self.scheduler = Scheduler(self.book, DEFAULT, self.cluster(), interval_s, self.limits)
            self.scheduler.failed_policy = {"policy": policy, "by": DEFAULT, "reason": str(error)}
        self.book.type_figure = lambda placement: self.scheduler.board.base.type_figure(placement)
        if found := teams.stored(store):
            self.scheduler.set_teams(found, now_s)
        if self.renting is not None:
            self.scheduler.renting = self.renting
            self.scheduler.profiling.start_limit_s += self.renting.start_s
        for record in sorted(store.jobs(over=False, limit=1_000_000), key=lambda r: r.submitted_s):
            self.reconciler.came_up(record.job_id)
            self.book.add(record)
            if not self.scheduler.add(record, now_s):
                self.feed(record, lifecycle.Granted((), "the slots it had are gone"), now_s)
            if record.promise.pending and record.request.deadline_s is not None:
                self.scheduler.profiling.ask(record, now_s)
        self.reservations.come_up(self.scheduler, now_s)
        if self.renting is not None and self.reservations.calendar:
            raise SwellError(NOT_BOTH)
        self._announce_nodes(now_s)

    def turn(self, now_s: float) -> None:
        """Listen, follow the nodes, reconcile, and decide if a decision is due."""
        # Look at the jobs before reading their reports, so that all reports of a job seen as over are read.
        observed = self.engine.observe()
        self._listen(now_s, {job_id for job_id, job in observed.items() if job.state in _OVER})
        self._avoid_slow_nodes(now_s)
        self._follow_nodes(now_s)
        self.reservations.follow(now_s)
        self.engine.reserve(self.reservations.slots)
        for difference in self.reconciler.differences(self.book.records, observed, now_s):
            match difference:
                case EndStray(job_id):
                    self._end_stray(job_id)
                case AskAgain(job_id):
                    record = self.book.records[job_id]
                    self.engine.apply(self.launch(record), record.wanted)
                case FeedInput(job_id, given):
                    with self._sparing_others(job_id):
                        self.feed(self.book.records[job_id], given, now_s)
        self._end_overdue(now_s)
        self._profile(now_s)
        self._try_more_workers(now_s)
        if self.renting is not None:
            self._rent(self.renting, observed, now_s)
        if self.scheduler.rhythm.due_s <= now_s:
            self._decide(now_s)
        self._grant_owed(now_s)
        if self.scheduler.failed_policy is not self._told_of:
            self._told_of = self.scheduler.failed_policy
            if self._told_of is not None:
                self.book.write([], [Event(now_s, EventKind.POLICY_REPLACED, data=dict(self._told_of))])
        for job_id, text in self.reservations.dangers(now_s):
            self.feed(self.book.records[job_id], lifecycle.Noticed(text), now_s)
        if self.reservations.waiting:
            self.reservations.note_yielded(self.engine.observe().values(), now_s)

    # -- listening ---------------------------------------------------------------------------------------

    def _listen(self, now_s: float, ended: Collection[str]) -> None:
        """Take in what jobs reported; the progress of all jobs is written in one transaction."""
        for report in self.engine.reports():
            record, knowledge = self.book.records.get(report.job_id), self.book.known.get(report.job_id)
            if record is None or knowledge is None:
                continue
            with self._sparing_others(record.job_id):
                event = self._hear(record, knowledge, report, now_s)
                if event is not None:
                    self._progress.heard(event)
        progress = self._progress.due(ended)
        records = [self.book.records[job_id] for job_id in progress]
        self.book.write(records, list(progress.values()))
        for record in records:
            self._progress.written(record.job_id, progress[record.job_id].time_s)
            self.book.remember(record, now_s)

    def _hear(
        self, record: JobRecord, knowledge: Knowledge, report: EngineReport, now_s: float
    ) -> Event | None:
        """Take in one report; returns the event of a progress report."""
        match report.kind:
            case "progress":
                return self._progressed(record, knowledge, report, now_s)
            case "timing" | "noise":
                if report.kind == "timing" and record.held:
                    kinds = self.scheduler.board.base.types_of(record.held)
                    if len(kinds) > 1 and self.scheduler.tells_types_apart:
                        return None  # it is moving from one type to another, and shows neither
                    # Workers wait for the slowest of them, so a job on several types shows that one.
                    knowledge.runs_on(min(kinds, key=self.book.ledger.relative_speed))
                if knowledge.take(report.kind, report.time_s, report.data):
                    self.book.showed(knowledge)
                    self.scheduler.rhythm.ask(now_s)
            case "started":
                gpus = tuple(int(slot) for slot in report.data["gpus"])
                pause_s = float(report.data.get("pause_s", knowledge.startup_s))
                self.feed(record, lifecycle.Started(gpus, pause_s), report.time_s)
            case "resized":
                self._switched(record, knowledge, report, now_s)
            case "worker_lost":
                worker, reason = str(report.data["worker"]), str(report.data["reason"])
                self.feed(record, lifecycle.WorkerLost(worker, reason), report.time_s)
            case "slow":
                self._slow_worker(record, int(report.data["slot"]), float(report.data["times"]), now_s)
            case "unstartable":
                self._unstartable(record, int(report.data["slot"]), str(report.data["cause"]), now_s)
            case "noticed":
                self.feed(record, lifecycle.Noticed(str(report.data["text"])), report.time_s)
            case "confined":
                most, reason = int(report.data["workers"]), str(report.data["reason"])
                self.scheduler.profiling.bound(record.job_id, most)
                self.feed(record, lifecycle.JobConfined(most, reason), report.time_s)
            case "checkpoint":
                self.feed(record, lifecycle.CheckpointSaved(int(report.data["step"])), report.time_s)
        return None

    @contextlib.contextmanager
    def _sparing_others(self, job_id: str) -> Iterator[None]:
        """Have an error about one job disturb no other; an error of the store is everybody's and passes."""
        try:
            yield
        except StoreUnavailable:
            raise
        except Exception as error:
            self.figures.spared += 1
            if self._spared.get(job_id) != repr(error):
                self._spared[job_id] = repr(error)
                log.exception("job %s: what it reported could not be used", job_id)

    def _end_stray(self, job_id: str) -> None:
        """End a job that runs although it is over. A job that the store does not know is left alone.

        Such a job means that the store is not the one the job was accepted into: the wrong --store, or an old
        backup. Ending it would destroy work that somebody else's store still promises.
        """
        if job_id in self.strays:
            return
        phase = self.book.store.phase(job_id)
        if self.end_unknown or (phase is not None and phase.over):
            self.engine.end(job_id)
            return
        self.strays.add(job_id)
        why = "its record cannot be read" if phase is not None else "the store does not know it"
        log.error("job %s runs here, but %s: it is left alone (see 'swell doctor')", job_id, why)

    def _end_overdue(self, now_s: float) -> None:
        """End jobs that have run for longer than they may."""
        for record in list(self.book.records.values()):
            limit_s = min(record.request.time_limit_s or math.inf, self.limits.run_s or math.inf)
            if record.started_s is not None and now_s - record.started_s > limit_s:
                self.feed(record, lifecycle.CancelAsked(f"{TIME_LIMIT} of {limit_s:g} s"), now_s)

    def _progressed(
        self, record: JobRecord, knowledge: Knowledge, report: EngineReport, now_s: float
    ) -> Event:
        data = report.data
        of = None if data.get("of") is None else float(data["of"])
        given = lifecycle.Progressed(float(data["done"]), of, data.get("batch_size"))
        if knowledge.take("progress", report.time_s, data):
            self.scheduler.rhythm.ask(now_s)
        started_s = self._starting.pop(record.job_id, None)
        if started_s is not None:
            knowledge.startup_s = max(report.time_s - started_s, 0.1)
            self.scheduler.roster.trains_from(record.job_id, report.time_s, now_s)
        # Progress goes to disk only now and then, with its event; a new length goes at once, because
        # promises depend on it.
        self.feed(record, given, now_s, save=of is not None and record.of != of)
        extra = {name: data[name] for name in _CURVES if data.get(name) is not None}
        extra |= knowledge.noise_figures(data.get("batch_size"))
        figures = {"done": given.done, "of": of, "workers": len(record.held)} | extra
        return Event(report.time_s, EventKind.PROGRESS, job_id=record.job_id, data=figures)

    def _switched(self, record: JobRecord, knowledge: Knowledge, report: EngineReport, now_s: float) -> None:
        pause_s = float(report.data.get("pause_s", 0.0))
        if pause_s > 0:
            knowledge.pause_s = max(pause_s, 0.05)
        until_s = float(report.data.get("until_s", report.time_s))
        if record.job_id not in self._starting:
            self.scheduler.roster.trains_from(record.job_id, until_s, now_s)
        gpus = tuple(int(slot) for slot in report.data.get("gpus", record.wanted))
        self.feed(record, lifecycle.JobSwitched(gpus, pause_s), report.time_s)

    # -- nodes -------------------------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        """The engine's nodes; drained ones, and slow ones that are avoided, count as not up."""
        return self._without(self.drained | self.avoided)

    def _without(self, away: Collection[str]) -> Cluster:
        """The engine's nodes; those with these names count as not up."""
        cluster = self.engine.cluster()
        if self.renting is not None:
            cluster = self.renting.usable(cluster, self.drained)
        nodes = tuple(replace(n, up=n.up and n.name not in away) for n in cluster.nodes)
        return Cluster(nodes, cluster.held)

    def _slow_worker(self, record: JobRecord, slot: int, times: float, now_s: float) -> None:
        """A worker of a job was slower than its others: note the node, and tell people if it is slow."""
        base = self.scheduler.board.base
        if slot not in (*record.held, *record.wanted):
            return
        node = base.nodes[int(base.node_of_gpu[slot])]
        found = self.slow_nodes.heard(node.name, times, now_s)
        self._keep_slow_nodes()
        if found is not None:
            # All users see the events of nodes, so the job is not named.
            data = {"gpus": node.gpus, "times": times, "until_s": found.until_s}
            self.book.write([], [Event(now_s, EventKind.NODE_SLOW, node=node.name, data=data)])

    def _unstartable(self, record: JobRecord, slot: int, cause: str, now_s: float) -> None:
        """A worker of a job could not be started: note the node, which is avoided then."""
        base = self.scheduler.board.base
        if slot not in (*record.held, *record.wanted):
            return
        node = base.nodes[int(base.node_of_gpu[slot])]
        self.slow_nodes.unstartable(node.name, cause, record.job_id, now_s)
        self._keep_slow_nodes()

    def _keep_slow_nodes(self) -> None:
        self.book.store.set_setting("slow_nodes", json.dumps(self.slow_nodes.to_json()))

    def _avoid_slow_nodes(self, now_s: float) -> None:
        """Keep nodes out of use on which workers cannot be started, and slow ones while the others have room
        for the least that the jobs need."""
        if self.slow_nodes.gone({node.name for node in self.engine.cluster().nodes if node.up}):
            self._keep_slow_nodes()
        if not self.slow_nodes.slow(now_s):
            self.avoided = frozenset()
            return
        needed = sum(
            record.request.workers if self.scheduler.policy.knows == "nothing" else record.request.min_workers
            for record in self.book.active()
        )
        avoided = self.slow_nodes.avoided(self._without(self.drained), needed, now_s)
        if avoided - self.avoided and self.scheduler.endangered_without(avoided, now_s):
            needed_anyway = self.slow_nodes.usable(avoided - self.avoided)
            self.slow_nodes.use_anyway(needed_anyway)
            avoided -= needed_anyway
        self.avoided = avoided

    def _rent(self, renting: Renting, observed: Mapping[str, Observed], now_s: float) -> None:
        """Rent as many nodes as the jobs are worth, and take jobs off nodes that are let go."""
        jobs = frozenset(
            r.job_id for r in self.book.records.values() if r.phase in (Phase.QUEUED, Phase.RUNNING)
        )
        due = renting.due(jobs, now_s)
        occupied = {slot for record in self.book.records.values() for slot in record.wanted}
        occupied.update(slot for move in self._owed.values() for slot in move.after)
        alive = (job for job in observed.values() if job.state not in _OVER)
        occupied.update(slot for job in alive for slot in job.placement)
        cluster = self.engine.cluster()
        if due:
            self.book.write([], renting.look(self.scheduler.promising(now_s), cluster, jobs, occupied))
        renting.request(cluster, occupied)
        self._follow_nodes(now_s)

    def _announce_nodes(self, now_s: float) -> None:
        """Log the nodes that came, went or changed since the last control plane ran."""
        store = self.book.store
        nodes = self._known_nodes()
        events = views.node_changes(json.loads(store.setting("nodes") or "{}"), nodes, now_s)
        if events:
            with store.transaction():
                store.set_setting("nodes", json.dumps(nodes))
                self.book.write([], events)

    def _known_nodes(self) -> dict[str, list[int | str]]:
        """Figures of the nodes that the log has as part of the cluster: not those not rented now.

        `per_gpu` is left out where it is 1: control planes of earlier versions read this too.
        """
        rented = self.renting.names if self.renting is not None else frozenset()
        known = [n for n in self.cluster().nodes if n.up or n.name not in rented]
        return {n.name: list(n.figures.values())[: 2 if n.per_gpu == 1 else 3] for n in known}

    def _follow_nodes(self, now_s: float) -> None:
        before, cluster = self.scheduler.board.base, self.cluster()
        if cluster == before:
            return
        events, reasons = [], []
        for i, node in enumerate(cluster.nodes):
            was = before.nodes[i].up if i < len(before.nodes) else False
            if node.up != was:
                kind = EventKind.NODE_JOINED if node.up else EventKind.NODE_LOST
                why = self._why_changed(node)
                data = node.figures | ({"reason": why} if why else {})
                events.append(Event(now_s, kind, node=node.name, data=data))
            if was and not node.up:
                reasons.append(f"node {node.name} was {(why or 'lost').partition(':')[0]}")
        taken = cluster.held - before.held
        names = [cluster.nodes[i].name for i in sorted(cluster.nodes_of(tuple(taken)))]
        reasons += [f"another user of the cluster has slots of node {name}" for name in names]
        self.scheduler.set_cluster(cluster, now_s, ", ".join(reasons))
        with self.book.store.transaction():
            if events and self.renting is not None:
                self.book.store.set_setting("nodes", json.dumps(self._known_nodes()))
            self.book.write([], events)

    def _why_changed(self, node: Node) -> str:
        """Why a node came or went, if a person or the autoscaler wanted it."""
        if node.name in self.drained:
            return "drained"
        if node.name in self.avoided and (trouble := self.slow_nodes.trouble(node.name)):
            return f"avoided: no worker can be started there, {trouble}"
        if node.name in self.avoided:
            return "slow: its workers were slow again after they were replaced"
        if self.renting is None or node.name not in self.renting.names:
            return ""
        if node.up:
            return self.renting.why
        return f"let go: {self.renting.why}" if node.name in self.renting.leaving else ""

    # -- deciding ----------------------------------------------------------------------------------------

    def _profile(self, now_s: float) -> None:
        """Take the profiling runs further, and answer the jobs that have been measured."""
        over, changed = self.scheduler.profiling.advance(self.book, now_s)
        if changed:
            self.scheduler.rhythm.ask(now_s, urgent=True)
        for job_id in over:
            record, knowledge = self.book.records[job_id], self.book.known[job_id]
            self.book.remember(record, now_s)
            answer, asked = promises.after_profiling(record, knowledge, self.scheduler, now_s)
            if asked is not None:
                self.scheduler.accepted(asked)
            self.feed(record, lifecycle.Answered(answer), now_s)

    def _try_more_workers(self, now_s: float) -> None:
        """Have jobs try, now and then, on idle slots, what a belief keeps them from."""
        for record in self.book.records.values():
            trials = self.book.known[record.job_id].speed.trials
            before, held = trials.workers, len(record.held)
            if record.phase is Phase.RUNNING and held == len(record.wanted) and not before:
                self._begin_trial(record, trials, now_s)
            elif before:
                trials.under_way(held, now_s)
            if trials.workers != before:
                self.scheduler.rhythm.ask(now_s)

    def _begin_trial(self, record: JobRecord, trials: Trials, now_s: float) -> None:
        held, knowledge, scheduler = len(record.held), self.book.known[record.job_id], self.scheduler
        promised = record.request.deadline_s is not None or record.job_id in scheduler.profiling.runs
        if promised or held not in trials.measured or not trials.due(now_s):
            return
        most, replica = scheduler.cluster.capacity, record.request.workers_per_replica
        free = int(scheduler.board.placer.occupancy.free.sum())
        bound = min(2 * held, held + free, most, record.max_workers or most) // replica * replica
        rates = knowledge.speed.curve(most, scheduler.cluster.gpus_per_node)
        trials.begin(rates, held, bound, now_s)

    def _decide(self, now_s: float) -> None:
        began_s = time.perf_counter()
        self._owed |= dict(self.scheduler.decide(now_s))
        self.figures.decision_s += time.perf_counter() - began_s
        self.figures.decisions += 1

    def _grant_owed(self, now_s: float) -> None:
        # Jobs that shrink go first, so that slots are free before another job is told to use them.
        for job_id, move in sorted(self._owed.items(), key=lambda item: _growth(item[1])):
            record = self.book.records[job_id]
            if move.after and not record.wanted:
                self._starting[job_id] = now_s
            self.feed(record, lifecycle.Granted(move.after, move.reason), now_s)
            del self._owed[job_id]

    # -- one job -----------------------------------------------------------------------------------------

    def feed(self, record: JobRecord, given: lifecycle.Input, now_s: float, *, save: bool = True) -> None:
        """Feed a job's state machine, have the new record written, then carry out the instructions."""
        changed, instructions = self.book.feed(record, given, now_s, save=save)
        for one in instructions:
            match one:
                case lifecycle.Apply():
                    self.engine.apply(self.launch(changed), changed.wanted)
                case lifecycle.EndJob():
                    self.engine.end(changed.job_id)
                case lifecycle.Reschedule():
                    self.scheduler.rhythm.ask(now_s)
        if changed.phase.over:
            self.book.remember(changed, now_s)
            self.forget(changed.job_id, now_s)
        elif record.wanted and not changed.wanted and changed.job_id in self.scheduler.roster.rows:
            # The board must know who has the slots before the next decision.
            self.scheduler.roster.released(changed.job_id, now_s)

    def forget(self, job_id: str, now_s: float) -> None:
        """Drop a job that is over from memory; the store keeps it."""
        self.scheduler.remove(job_id, now_s)
        self.book.remove(job_id)
        self.reconciler.forget(job_id)
        self._progress.forget(job_id)
        self._starting.pop(job_id, None)
        self._owed.pop(job_id, None)
        self._spared.pop(job_id, None)

    def job_dir(self, job_id: str) -> Path:
        """Where a job's files are."""
        return self._home / "jobs" / job_id

    def launch(self, record: JobRecord) -> Launch:
        """All that the engine needs to run a job."""
        request = record.request
        most = record.max_workers or max(sum(n.gpus for n in self.scheduler.cluster.nodes), 1)
        job_dir = self.job_dir(record.job_id)
        return Launch(
            job_id=record.job_id, request=request, job_dir=job_dir, max_workers=most, owner=record.owner
        )

    def stats(self, trouble: str) -> dict[str, float]:
        """Figures for monitoring."""
        return views.stats(self.book, self.scheduler) | {
            "decisions": float(self.figures.decisions),
            "decision_seconds": self.figures.decision_s,
            "strays": float(len(self.strays)),
            "spared_errors": float(self.figures.spared),
            "trouble": float(bool(trouble)),
        }


def _growth(move: Move) -> int:
    """How many slots a move adds; negative if it gives some back."""
    return len(move.after) - len(move.before)
