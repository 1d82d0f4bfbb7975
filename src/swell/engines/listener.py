"""What jobs say of themselves, on its way from their coordinators to the control plane.

Every message is checked at the border. What fails there, or is more than a job may say, counts against that
job and disturbs no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from swell.domain import Cluster
from swell.engines import clock
from swell.engines.base import Report, drain
from swell.engines.border import BadMessage, read_beat, read_event
from swell.engines.job_state import Outcome, Said
from swell.engines.supervised_job import SupervisedJob
from swell.train.agent.polling import readable
from swell.train.agent.protocol import Exited
from swell.train.agent.wire import Message


class Listener:
    """Reads the messages of jobs, and keeps their reports until the control plane takes them."""

    def __init__(self, cluster: Callable[[], Cluster], lock: AbstractContextManager[object]) -> None:
        """`lock` is held for every change of a job's state."""
        self._cluster, self._lock = cluster, lock
        self._reports: deque[Report] = deque(maxlen=100_000)
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something new for the control plane."""

    def reports(self) -> Iterator[Report]:
        """What jobs reported since the last call."""
        return drain(self._reports)

    def read(self, job: SupervisedJob) -> None:
        """Take in the messages of a job that have arrived."""
        for message in job.line.pending():
            try:
                if message.get("type") == "report":
                    self._take_report(job, message.get("report"))
                elif message.get("type") == "event":
                    self._take_event(job, message)
            except BadMessage as error:
                job.complain(f"sent something that is not a message of a job: {error}")

    def read_last(self, job: SupervisedJob) -> None:
        """Take in the last messages of a job whose supervisor has ended, until its connection is closed."""
        while job.line.connection is not None and readable([job.line.connection], 0.0):
            self.read(job)

    def take_outcome(self, job: SupervisedJob, outcome: Outcome | None) -> Outcome | None:
        """Hand on the last report of a job that has ended, before anybody sees the end; returns `outcome`.

        A job may end before anybody has connected to it, so its supervisor keeps that report.
        """
        if outcome is not None and outcome.report:
            try:
                beat = read_beat(outcome.report)
            except BadMessage as error:
                job.complain(f"left a last report that is none: {error}")
            else:
                if beat.rank == 0 and beat.progress != job.progress:
                    self._hand_on(job, "progress", beat.progress)
        return outcome

    def report(self, job: SupervisedJob, said: list[Said]) -> None:
        """Hand on to the control plane what a job said, or what is to be said of it."""
        for kind, data in said:
            if not job.allowance.take():
                job.complain("reports more than the platform listens to; the rest is dropped")
                continue
            if kind in ("started", "resized"):
                job.state.logged = data["gpus"]
            self._hand_on(job, kind, data)

    def _hand_on(self, job: SupervisedJob, kind: str, data: dict[str, Any]) -> None:
        if kind == "progress":
            job.progress = data
        self._reports.append(Report(job_id=job.job_id, time_s=clock.now_s(), kind=kind, data=data))
        self.wake()

    def _take_event(self, job: SupervisedJob, message: Message) -> None:
        event = read_event(message, len(self._cluster().node_of_gpu))
        with self._lock:
            said = job.state.happened(event)
        if isinstance(event, Exited):
            self.wake()  # a service may wait for the slot
        self.report(job, said)

    def _take_report(self, job: SupervisedJob, raw: object) -> None:
        beat = read_beat(raw)
        if beat.rank != 0 or not job.state.trains:
            return
        job.state.progressed()
        self.report(job, [("progress", beat.progress)])
        if beat.timing is not None:
            cluster = self._cluster()
            there = tuple(slot for slot in job.state.wanted if slot < len(cluster.node_of_gpu))
            nodes = max(len(cluster.nodes_of(there)), 1)
            self.report(job, [("timing", beat.timing | {"nodes": nodes})])
        if beat.noise is not None:
            self.report(job, [("noise", beat.noise)])
