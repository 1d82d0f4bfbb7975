"""The control plane's loop: it listens, decides, and makes the engine follow.

Everything that changes a job goes through one lock and one state machine (`lifecycle`), is written to the
store with its events in one transaction, and only then carried out. So the plane can be killed at any moment:
on restart it reads the store, asks the engine what runs, and goes on where it was. Jobs do not notice.

The loop wakes when something happened (a submission, a report, a process that ended, a node that left) and at
an interval. All that happened meanwhile becomes one decision.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from swell.control import lifecycle, promises, views
from swell.control.book import Book
from swell.control.model import JobRecord, Phase
from swell.control.scheduler import Scheduler
from swell.control.store import Store
from swell.domain import Cluster, Event, EventKind, Placement, SwellError
from swell.engines import Engine, Launch, Observed, Report

log = logging.getLogger(__name__)

GATHER_S = 0.02
"""A burst is given this long to arrive before it becomes one decision."""
MOST_GATHER_S = 0.5
"""With many jobs a decision takes a while; then people's requests get at least three times as long."""
PROGRESS_EVERY_S = 5.0
"""How often a job's progress is written down."""
PROBE_STEPS = 3
PROBE_LIMIT_S = 30.0
"""Longest that a profiling run stays at one size once it trains."""
PROBE_START_S = 120.0
"""Longest that a job may take to get slots and train its first step before it is refused unseen."""
LOST_AFTER_S = 3.0
"""A job that should run and that the engine does not know for this long has vanished."""


class Loop:
    """Keeps the engine in step with what the policy decides. Whatever it does, it does under `_lock`."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        home: Path,
        policy: str = "elasticflow",
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.engine = engine
        self.home = home
        self.interval_s = interval_s
        self.clock = clock
        self._default_policy = policy
        self._lock = threading.RLock()
        self._awake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._book = Book(store)
        self._observed: dict[str, Observed] = {}
        self._missing_since: dict[str, float] = {}
        self._granted_at: dict[str, float] = {}
        self._unconfirmed: set[str] = set()
        """Jobs that ran when the last plane ended and have not been looked for yet."""
        self._hurt: dict[str, Placement] = {}
        """What is left to jobs that lost slots with a node, until the next decision."""
        self._saved_at: dict[str, float] = {}
        self._decide = True
        self._decide_at_s = np.inf
        self._drained: set[str] = set()
        self.decisions = 0
        self.decision_s = 0.0
        self.trouble = ""
        """What keeps the plane from working, if anything does (the store is full, say)."""

    # -- starting and stopping ---------------------------------------------------------------------------

    def start(self) -> None:
        """Read the store, find the jobs that run, and begin to listen."""
        self.engine.start(self.wake)
        with self._lock:
            self._drained = set(json.loads(self.store.setting("drained") or "[]"))
            policy = self.store.setting("policy") or self._default_policy
            self._scheduler = Scheduler(policy, self._cluster())
            for record in sorted(self.store.jobs(over=False, limit=1_000_000), key=lambda r: r.submitted_s):
                self._unconfirmed.add(record.job_id)
                if not self._add(record):
                    lost = lifecycle.Granted((), "the slots it had are no more")
                    self._happen(record, lost, self.clock())
                if record.promise.pending and record.request.deadline_s is not None:
                    self._scheduler.probe(record, self.clock())
            self._announce_nodes()
        self._thread = threading.Thread(target=self._loop, name="swell-control", daemon=True)
        self._thread.start()
        self.wake()

    def _announce_nodes(self) -> None:
        """Write down which nodes there are, where they are not those of the last time."""
        nodes = {n.name: [n.gpus, n.gpu_type] for n in self.engine.cluster().nodes}
        events = views.node_changes(json.loads(self.store.setting("nodes") or "{}"), nodes, self.clock())
        if events:
            with self.store.transaction():
                self.store.set_setting("nodes", json.dumps(nodes))
                self._book.publish(self.store.save([], events), events)

    def stop(self) -> None:
        """Stop listening and deciding. Jobs go on."""
        self._stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(timeout=30.0)
        self.engine.close()

    def wake(self) -> None:
        """Something happened."""
        self._awake.set()

    def _loop(self) -> None:
        turn_s = 0.0
        while not self._stopping.is_set():
            wait_s = min(self.interval_s, max(self._decide_at_s - self.clock(), 0.0))
            if self._awake.wait(timeout=wait_s):
                self._stopping.wait(min(max(GATHER_S, 3 * turn_s), MOST_GATHER_S))
            self._awake.clear()
            if self._stopping.is_set():
                return
            try:
                began_s = time.perf_counter()
                self.turn()
                turn_s = time.perf_counter() - began_s
                self.trouble = ""
            except SwellError as error:
                # The store may be full or the database away: nothing was changed, so try again.
                self.trouble = str(error)
                self._decide = True
                self._stopping.wait(1.0)
            except Exception as error:
                # A mistake of ours. Jobs train on; whoever looks must see that nothing is decided.
                log.exception("a turn of the control plane failed")
                self.trouble = f"internal error: {error!r}; see the server's log"
                self._decide = True
                self._stopping.wait(1.0)

    def turn(self) -> None:
        """One turn of the loop: listen, follow the nodes, reconcile, decide if anything calls for it."""
        with self._lock:
            now_s = self.clock()
            # Looked at before its reports are read: whoever is over by now has said all it had to say.
            self._observed = self.engine.observe()
            for report in self.engine.reports():
                self._report(report, now_s)
            self._follow_nodes(now_s)
            self._reconcile(now_s)
            self._advance_probes(now_s)
            if self._decide or now_s >= self._decide_at_s:
                self._decide = False
                self._allocate(now_s)

    # -- the loop's parts --------------------------------------------------------------------------------

    def _report(self, report: Report, now_s: float) -> None:
        record, knowledge = self._book.records.get(report.job_id), self._book.known.get(report.job_id)
        if record is None or knowledge is None:
            return
        data = dict(report.data)
        if report.kind == "progress":
            of = None if data.get("of") is None else float(data["of"])
            happening = lifecycle.Progressed(float(data["done"]), of, data.get("batch_size"))
            if of is not None:
                knowledge.of = of
            knowledge.progressed(report.time_s, happening.done)
            started_s = self._granted_at.pop(report.job_id, None)
            if started_s is not None:
                knowledge.startup_s = max(report.time_s - started_s, 0.1)
            due = now_s - self._saved_at.get(report.job_id, 0.0) >= PROGRESS_EVERY_S
            self._happen(record, happening, now_s, save=due or record.of != of)
            if due:
                self._saved_at[report.job_id] = now_s
                self._book.remember(record, now_s)
        elif report.kind == "timing":
            if knowledge.timing(data):
                self._decide = True
        elif report.kind == "noise" and knowledge.belief is not None:
            knowledge.belief.observe_gradients(float(data["sqr"]), float(data["var"]))
        elif report.kind == "resized":
            pause_s = float(data.get("pause_s", 0.0))
            knowledge.pause_s = max(pause_s, 0.05)
            self._happen(record, lifecycle.Switched(pause_s), now_s)

    def _follow_nodes(self, now_s: float) -> None:
        before = self._scheduler.cluster
        cluster = self._cluster()
        if cluster == before:
            return
        events = []
        for i, node in enumerate(cluster.nodes):
            was = before.nodes[i].up if i < len(before.nodes) else False
            if node.up != was:
                kind = EventKind.NODE_JOINED if node.up else EventKind.NODE_LOST
                why = {"reason": "drained"} if node.name in self._drained else {}
                data = {"gpus": node.gpus, "gpu_type": node.gpu_type} | why
                events.append(Event(now_s, kind, node=node.name, data=data))
        # Told to the jobs with the decision that follows: most find other slots in it.
        self._hurt |= self._scheduler.set_cluster(cluster, now_s)
        self._decide = True
        if events:
            self._book.publish(self.store.save([], events), events)

    def _reconcile(self, now_s: float) -> None:
        """Compare what should run with what does, and set right what differs."""
        for job_id, observed in self._observed.items():
            record = self._book.records.get(job_id)
            if record is not None:
                self._happen(record, lifecycle.Seen(observed), now_s)
            else:
                self.engine.end(job_id)
        for job_id, record in list(self._book.records.items()):
            if record.phase is not Phase.RUNNING or job_id in self._observed:
                self._missing_since.pop(job_id, None)
                self._unconfirmed.discard(job_id)
                continue
            if job_id in self._unconfirmed:  # decided by a plane that was killed before it could say so
                self._unconfirmed.discard(job_id)
                self.engine.apply(self._launch(record), record.wanted)
                continue
            since_s = self._missing_since.setdefault(job_id, now_s)
            if now_s - since_s >= LOST_AFTER_S:
                del self._missing_since[job_id]
                self._happen(record, lifecycle.Vanished(), now_s)

    def _advance_probes(self, now_s: float) -> None:
        for job_id, probe in list(self._scheduler.probes.items()):
            knowledge, record = self._book.known[job_id], self._book.records[job_id]
            if record.phase not in (Phase.QUEUED, Phase.RUNNING):
                continue
            if not probe.sizes and knowledge.source == "none":
                self._book.recall(job_id)  # another job of its kind may have been seen meanwhile
            if knowledge.seen:
                seen = sum(n for (_, workers, _), n in knowledge.seen.items() if workers == probe.size)
                if seen < PROBE_STEPS and now_s - probe.since_s < PROBE_LIMIT_S:
                    continue
                over = self._scheduler.probe_step_over(job_id, now_s)
            else:
                probe.since_s = now_s
                over = self._book.known[job_id].known or now_s - probe.asked_s > PROBE_START_S
            self._decide = True
            if over:
                self._scheduler.probes.pop(job_id, None)
                self._book.remember(record, now_s)
                answer = promises.after_profiling(record, self._book, self._scheduler, now_s)
                self._happen(record, lifecycle.Answered(answer), now_s)

    def _allocate(self, now_s: float) -> None:
        started = time.perf_counter()
        changed, wake_s = self._scheduler.decide(self._book.records, self._book.known, now_s)
        hurt, self._hurt = self._hurt, {}
        changed = {job_id: held for job_id, held in hurt.items() if job_id in self._book.records} | changed
        self.decision_s += time.perf_counter() - started
        self.decisions += 1
        interval_s = self._scheduler.policy.interval_s
        self._decide_at_s = min(wake_s, now_s + interval_s if interval_s else np.inf)
        # Whoever shrinks goes first, so that slots are free before somebody is told to use them.
        order = sorted(
            changed.items(), key=lambda item: len(item[1]) - len(self._book.records[item[0]].wanted)
        )
        for job_id, placement in order:
            self._grant(self._book.records[job_id], placement, now_s)

    def _grant(self, record: JobRecord, placement: Placement, now_s: float) -> None:
        if placement and not record.wanted:
            self._granted_at[record.job_id] = now_s
        self._happen(record, lifecycle.Granted(placement), now_s)

    # -- keeping the books -------------------------------------------------------------------------------

    def _happen(
        self, record: JobRecord, happening: lifecycle.Happening, now_s: float, *, save: bool = True
    ) -> None:
        """Feed the state machine, have it written, then carry out what it says."""
        changed, instructions = self._book.happen(record, happening, now_s, save=save)
        for one in instructions:
            if isinstance(one, lifecycle.Apply):
                self.engine.apply(self._launch(changed), changed.wanted)
            elif isinstance(one, lifecycle.End):
                self.engine.end(changed.job_id)
            elif isinstance(one, lifecycle.Reschedule):
                self._decide = True
        if changed.phase.over:
            self._book.remember(changed, now_s)
            self._forget(changed.job_id)

    def _add(self, record: JobRecord) -> bool:
        self._book.add(record)
        return self._scheduler.add(record)

    def _forget(self, job_id: str) -> None:
        """The job is over: it stays in the store and leaves memory."""
        self._scheduler.remove(job_id)
        self._book.remove(job_id)
        for times in (self._missing_since, self._granted_at, self._saved_at):
            times.pop(job_id, None)

    def _cluster(self) -> Cluster:
        """The engine's nodes, less the drained ones."""
        cluster = self.engine.cluster()
        nodes = tuple(replace(n, up=n.up and n.name not in self._drained) for n in cluster.nodes)
        return Cluster(nodes, cluster.held)

    def _job_dir(self, job_id: str) -> Path:
        return self.home / "jobs" / job_id

    def _launch(self, record: JobRecord) -> Launch:
        request = record.request
        most = request.max_workers or max(sum(n.gpus for n in self._scheduler.cluster.nodes), 1)
        job_dir = self._job_dir(record.job_id)
        return Launch(job_id=record.job_id, request=request, job_dir=job_dir, max_workers=most)
