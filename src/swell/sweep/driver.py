"""Runs the trials of a sweep on the platform.

Each trial is a best-effort job, so that it grows as others wait, are given up or end. The driver only asks,
reports and tells: the study is on disk and the jobs are the platform's. A driver that is killed and started
again finds every trial where it is; the key of a submission keeps a trial from becoming two jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from swell.api.client import Client
from swell.api.schemas import EventView
from swell.control.model import Phase
from swell.domain.errors import SwellError
from swell.sweep.spec import Sweep, Value
from swell.sweep.study import Study, Trial, Verdict

_WAIT_S = 0.1
"""How long to wait for news of the trials, if there is none: slots are idle while a verdict is due."""
_LOOKS = 20
"""How often to look for news before the verdicts are worked out again all the same."""


Notify = Callable[[str, Trial], None]
"""Called with what happened (started, pruned, complete, fail) and the trial."""


def arguments(parameters: Mapping[str, Value]) -> list[str]:
    """Hyper-parameters as a script's arguments: `--name value`, and for a switch `--name` or nothing."""
    words: list[str] = []
    for name, value in parameters.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        else:
            words += [f"--{name}", repr(value) if isinstance(value, float) else str(value)]
    return words


class Driver:
    """Keeps a number of trials going until all have ended."""

    def __init__(
        self,
        client: Client,
        study: Study,
        sweep: Sweep,
        script: str,
        options: Mapping[str, Any],
        *,
        parallel: int,
        notify: Notify = lambda what, trial: None,
    ) -> None:
        self._client = client
        self._study = study
        self._sweep = sweep
        self._script = script
        self._options = dict(options)
        self._parallel = parallel
        self._notify = notify
        self._running: dict[str, int] = {}
        """Trial by job."""
        self._latest: dict[str, float] = {}
        """By job: the metric as it was reported last."""
        self._waiting: set[str] = set()
        """Jobs that were paused because their trials wait for others."""
        self._since = 0

    def run(self) -> None:
        """Make all trials; returns when the last one has ended."""
        for trial in self._study.trials():
            if trial.state == "running":
                self._start(trial)
        if self._running:  # of a driver that was killed
            self._catch_up()
            for job in [self._client.job(job_id) for job_id in self._running]:
                if job.over:  # its last events may have been deleted meanwhile
                    self._end(job.job_id, job.phase.value)
                elif job.phase is Phase.PAUSED:
                    self._waiting.add(job.job_id)
        while True:
            self._follow_verdicts()
            if not self._running:
                return
            for _ in range(_LOOKS):
                if self._catch_up():
                    break
                time.sleep(_WAIT_S)

    def _follow_verdicts(self) -> None:
        """Let trials go on, end, or wait, and start others in the place of those that wait.

        A trial that is to have a slot is resumed or submitted before another one gives its slot up. Otherwise
        the platform would let a third one grow onto that slot, and take it back at once. No more trials than
        may run at a time are resumed: the platform would let them take turns, and each turn costs a start.
        """
        verdicts = self._study.verdicts()
        given_up, arrived = [], []
        for job_id, number in self._running.items():
            verdict = verdicts.get(number, Verdict.GO)
            if verdict is Verdict.GIVE_UP:
                given_up.append(job_id)
            elif verdict is Verdict.WAIT and job_id not in self._waiting:
                arrived.append(job_id)
        self._waiting.update(given_up, arrived)
        for job_id in [job_id for job_id in self._running if job_id in self._waiting]:
            if self._room and verdicts.get(self._running[job_id], Verdict.GO) is Verdict.GO:
                self._order(self._client.resume, job_id)
                self._waiting.discard(job_id)
        for job_id in given_up:
            if self._order(self._client.cancel, job_id):
                self._end(job_id, "pruned")
        self._fill()
        for job_id in arrived:
            self._order(self._client.pause, job_id)

    def _order(self, order: Callable[[str], Any], job_id: str) -> bool:
        """Give the platform an order for a job; False if the job is already over, as its events will show."""
        try:
            order(job_id)
        except SwellError:
            if not self._client.job(job_id).over:
                raise
            return False
        return True

    @property
    def _room(self) -> bool:
        """Whether fewer trials are under way than may be at a time."""
        return len(self._running) - len(self._waiting) < self._parallel

    def _fill(self) -> None:
        """Start trials until enough are running or all have been started."""
        while self._room and len(self._study.trials()) < self._sweep.trials:
            trial = self._study.ask()
            self._start(trial)
            self._notify("started", trial)

    def _start(self, trial: Trial) -> None:
        """Submit a trial's job, or find the one that a killed driver submitted."""
        name = f"{self._options.get('name', 'sweep')}-{trial.number}"
        options = self._options | {
            "name": name,
            "args": [*self._options.get("args", ()), *arguments(trial.parameters)],
        }
        job = self._client.submit(
            self._script, idempotency_key=f"sweep-{self._study.key}-{trial.number}", **options
        )
        self._study.started(trial.number, job.job_id)
        self._running[job.job_id] = trial.number

    def _catch_up(self) -> int:
        """Take in what has happened since; returns the number of events of our trials."""
        ours = 0
        for event in self._client.events(since=self._since, follow=False):
            self._since = event.seq
            if event.job_id in self._running:
                ours += 1
                self._take(event, event.job_id)
        return ours

    def _take(self, event: EventView, job_id: str) -> None:
        if event.kind == "progress":
            value, epoch = measured(event.data, self._sweep.metric), event.data.get("epoch")
            if value is None:
                return
            self._latest[job_id] = value
            if not isinstance(epoch, int) or epoch < 1:
                return
            self._study.report(self._running[job_id], epoch, value)
        elif event.kind in ("finished", "failed", "cancelled", "rejected"):
            self._end(job_id, event.kind)

    def _end(self, job_id: str, how: str) -> None:
        number = self._running.pop(job_id)
        self._waiting.discard(job_id)
        if how == "cancelled" and self._study.verdicts().get(number) is Verdict.GIVE_UP:
            how = "pruned"  # by an earlier driver, which was killed before it could record that
        state = {"finished": "complete", "pruned": "pruned"}.get(how, "fail")
        self._study.tell(number, state, self._latest.pop(job_id, None))
        trial = next(t for t in self._study.trials() if t.number == number)
        self._notify(trial.state, trial)


def measured(data: Mapping[str, Any], metric: str) -> float | None:
    """The metric in the data of a progress event; None if it is not there."""
    metrics = data.get("metrics")
    value = metrics.get(metric) if isinstance(metrics, Mapping) else None
    if value is None and metric == "loss":
        value = data.get("loss")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
