"""What a heartbeat says about a worker's last step (docs/how/runtime.md); `reporting` has the means."""

from __future__ import annotations

import atexit
import time
from typing import Any

from swell.train import reporting
from swell.train.data.loader import ElasticLoader
from swell.train.learner import Learner
from swell.train.progress import Progress
from swell.train.sync.control import Link
from swell.train.sync.generation import Crew
from swell.train.sync.reducer import Reduced


class Reporter:
    """Makes the reports of one worker, which its link sends with the heartbeats."""

    def __init__(self, learner: Learner, progress: Progress, crew: Crew, link: Link | None) -> None:
        self._learner = learner
        self._progress = progress
        self._crew = crew
        self._link = link
        self._last_s = time.perf_counter()
        self.pace = reporting.Pace()
        self._links = reporting.LinkTimes()
        self.metrics: dict[str, float] = {}
        """What the script gave to `job.log`. Replaced, never changed: the link's thread may be sending it."""

    def log(self, metrics: dict[str, float], *, member: bool) -> None:
        """Add metrics to all reports from now on; those of a `member` also to the present one.

        A worker's last report is sent when its process ends, so metrics of a finished training arrive too.
        """
        first, self.metrics = not self.metrics, self.metrics | metrics
        link = self._link
        if link is None or not member:
            return
        if first:
            atexit.register(link.last_report)
        link.report = (link.report or self._place()) | {"metrics": self.metrics}

    def ended_at(self, epoch: int) -> None:
        """Note in the present report that training is over after so many epochs."""
        if self._link is not None and self._link.report:
            self._link.report = self._link.report | {"epoch": epoch}

    def _place(self) -> dict[str, Any]:
        """The part of a report that does not depend on a step."""
        mesh, steps = self._crew.mesh, self._progress.steps
        return {
            "step": steps,
            "epoch": self._progress.epoch,
            "generation": mesh.number,
            "rank": mesh.rank,
            "world": mesh.size,
            "done": steps,
        }

    def lap(self) -> float:
        """The seconds since the last step, when one is complete."""
        now_s = time.perf_counter()
        step_s, self._last_s = now_s - self._last_s, now_s
        return step_s

    def after_step(self, reduced: Reduced, loader: ElasticLoader) -> float:
        """Have the next heartbeat tell of a step; returns how long it took."""
        step_s = self.lap()
        if self._link is not None:
            self._link.step = self._progress.steps
            self._link.report = self.report(reduced, loader, step_s)
        return step_s

    def report(self, reduced: Reduced, loader: ElasticLoader | None, step_s: float) -> dict[str, Any]:
        """The report of a step that took `step_s`; with its loader also the speed and the job's progress."""
        learner, crew, mesh = self._learner, self._crew, self._crew.mesh
        out = self._place() | {
            "step_s": round(step_s, 6),
            "wait_s": round(reduced.wait_s, 6),
            "sync_s": round(reduced.sync_s, 6),
            "sums": crew.reducer.way,
            "mode": learner.mode,
            "loss": self._progress.loss.value,
            "lr": float(learner.optimizer.param_groups[0]["lr"]),
            "metrics": self.metrics,
            "memory_bytes": reporting.memory_bytes(learner.flat.device),
        }
        self._links.add(mesh.number, mesh.take_arrivals(), step_s)
        out |= self._links.report()
        if loader is not None:
            now_with = (mesh.number, loader.batch_size, loader.piece or 0)
            self.pace.add(now_with, step_s, reduced.sync_s, step_s - reduced.wait_s - reduced.sync_s)
            piece = loader.piece if learner.ranks is None else -(-loader.batch_size // learner.logical)
            out |= reporting.timing(self.pace, loader.batch_size, piece, mesh.size, crew.nodes)
            if self.pace.known and 0 < mesh.size == len(reduced.headers):
                out |= {"own_s": round(self.pace.own_s, 6), "samples": reduced.headers[mesh.rank]["n"]}
            out |= self._position(loader)
        if learner.adaptive is not None:
            out |= learner.adaptive.beat()
        return out

    def _position(self, loader: ElasticLoader) -> dict[str, float | None]:
        """The job's progress and its total, in steps at the tuned batch."""
        progress, adaptive = self._progress, self._learner.adaptive
        out: dict[str, float | None]
        if adaptive is None:
            whole = progress.total_steps
            if whole is None and progress.epochs is not None and not loader.streaming:
                whole = progress.epochs * len(loader)
            out = {"done": progress.steps, "of": whole}
        else:
            passes = progress.epoch + loader.cursor / len(loader.dataset)
            out = adaptive.progress(progress.epochs, passes if progress.by == "data" else None)
        if progress.until_loss is not None:  # the number of epochs is the most it may take, not its length
            out |= {"target_loss": progress.until_loss, "at_most": out["of"], "of": None}
        return out
