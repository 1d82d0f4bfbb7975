"""How far a job is, and what is reported of it with every heartbeat (docs/how/runtime.md)."""

from __future__ import annotations

import atexit
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swell.train.data.loader import ElasticLoader
from swell.train.learner import Learner
from swell.train.sync.control import Link
from swell.train.sync.generation import Crew
from swell.train.sync.reducer import Reduced

SMOOTHING = 0.02
"""Weight of a new step in the running means: times and losses are means over about fifty steps."""

FEWEST_LOSSES = 10
"""A target loss counts as reached only after the losses of this many steps were averaged."""


OWN_S = 2.0
"""The mean of a worker's own time covers about the last two seconds, so that a change shows soon."""

LEAST_LINK_BYTES = 64 << 10
"""The time of a link counts if a member sends at least this much in a step."""

MOST_LINKS = 32
"""Links in a report."""

MOST_OWN = 3.0
"""A step counts for at most so many times the mean: what is done now and then (evaluate, save) is no pace."""


class StepTimes:
    """Mean time of a step and of its exchange, for the present workers and batch."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.sync_s = 0.0
        self.own_s = 0.0
        """Mean time without waiting for the others or for the exchange."""
        self._of: tuple[int, ...] = ()
        self.steps = 0
        """How many steps the means cover."""

    def add(self, configuration: tuple[int, ...], step_s: float, sync_s: float, own_s: float = 0.0) -> bool:
        """Record a step; False for the first of a configuration, whose time includes the change."""
        if configuration != self._of:
            self._of, self.steps = configuration, 0
            return False
        self.steps += 1
        # Later steps count more, so that the first ones, which may be slow, are soon forgotten.
        weight = max(2.0 / (self.steps + 1), SMOOTHING)
        self.step_s += weight * (step_s - self.step_s)
        self.sync_s += weight * (sync_s - self.sync_s)
        own_s = min(own_s, MOST_OWN * self.own_s) if self.own_s > 0 else max(own_s, 0.0)
        self.own_s += max(1.0 / self.steps, min(step_s / OWN_S, 0.25)) * (own_s - self.own_s)
        return True

    @property
    def known(self) -> bool:
        """Whether there is a mean for the present configuration."""
        return self.steps > 0


class LinkTimes:
    """How long what members on other hosts send is on its way, averaged like a worker's own time.

    The time counts from the first bytes of a message to its last, so waiting for a member that still computes
    is no part of it.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._means: dict[str, tuple[float, float]] = {}
        """By member: bytes and seconds of a step."""

    def add(self, generation: int, arrivals: Mapping[str, tuple[int, float]], step_s: float) -> None:
        """Record what arrived in a step."""
        if generation != self._generation:
            self._generation, self._means = generation, {}
        weight = min(step_s / OWN_S, 0.25)
        for name, (count, seconds) in arrivals.items():
            mean, mean_s = self._means.get(name, (float(count), seconds))
            self._means[name] = (mean + weight * (count - mean), mean_s + weight * (seconds - mean_s))

    def report(self) -> dict[str, Any]:
        """For a report: by member the seconds for a megabyte, and the longest time of a step. Empty if little
        was sent, which says nothing of a link."""
        large = {name: pair for name, pair in self._means.items() if pair[0] >= LEAST_LINK_BYTES}
        if not large:
            return {}
        rates = {name: round(1e6 * seconds / count, 6) for name, (count, seconds) in large.items()}
        if len(rates) > MOST_LINKS:  # of many links the slowest and the fastest tell which are slow
            order = sorted(rates, key=lambda name: rates[name])
            kept = [*order[: MOST_LINKS // 2], *order[-MOST_LINKS // 2 :]]
            rates = {name: rates[name] for name in kept}
        return {"links": rates, "link_s": round(max(seconds for _, seconds in large.values()), 6)}


def memory_bytes(device: torch.device) -> int:
    """The most memory this worker ever held: on its GPU, or in the process if it has no GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class SmoothedLoss:
    """The loss of the job, averaged over its last steps.

    With each step every worker sees the losses of all workers and adds them in the same order, so all of them
    hold the same number. It is part of the job's state.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.steps = 0
        """Steps that were averaged."""

    def add(self, loss: float) -> None:
        """Record the mean loss of one step's batch."""
        self.steps += 1
        weight = max(1.0 / self.steps, SMOOTHING)
        self.value = loss if self.value is None else self.value + weight * (loss - self.value)

    def reached(self, target: float) -> bool:
        """Whether the loss is at most `target`, once enough steps were averaged."""
        return self.value is not None and self.steps >= FEWEST_LOSSES and self.value <= target

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes."""
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state written by `state_dict`."""
        self.value = None if state["value"] is None else float(state["value"])
        self.steps = int(state["steps"])


def step_loss(headers: Sequence[Mapping[str, Any]], size: int) -> float | None:
    """The mean loss of a step of `size` samples from the workers' parts; None if a part is missing."""
    parts = [header for header in headers if header["n"]]
    if not parts or any("loss" not in header for header in parts):
        return None
    total: float = sum(header["loss"] for header in parts)
    return total * size / sum(header["n"] for header in parts)


def timing(
    pace: StepTimes, batch_size: int, largest_piece: int | None, workers: int, nodes: int
) -> dict[str, Any]:
    """How fast a job that keeps its batch is, how it splits the batch, and within which limits.

    `largest_piece`: the most samples computed at once, None for all of a worker's part.
    """
    local = -(-batch_size // workers)
    accumulation = -(-local // min(largest_piece or local, local)) - 1
    out: dict[str, Any] = {
        "batch_size": batch_size,
        "workers": workers,
        "nodes": nodes,
        "local_batch": -(-local // (accumulation + 1)),
        "accumulation": accumulation,
        "limits": {  # like BatchLimits.as_dict but faster, because every step makes one
            "init_batch": batch_size,
            "max_batch": batch_size,
            "min_local": 1,
            "max_local": min(largest_piece or batch_size, batch_size),
        },
    }
    if pace.known:
        out |= {"step_s": round(pace.step_s, 6), "sync_s": round(pace.sync_s, 6), "steps": pace.steps}
    return out


# ---------------------------------------------------------------------- how far the job is


@dataclass(slots=True, kw_only=True)
class Progress:
    """The position of a job and the end that its script has set."""

    epoch: int = 0
    steps: int = 0
    """Committed optimizer steps."""
    loss: SmoothedLoss = field(default_factory=SmoothedLoss)
    epochs: int | None = None
    """Number of epochs in the script (`job.epochs`)."""
    total_steps: int | None = None
    """Number of steps in the script (`job.loop`)."""
    by: str = "data"
    """Unit of an epoch: 'data' (a pass over it), or 'progress' (that of a pass at the tuned batch)."""
    until_loss: float | None = None
    """Training ends earlier once the job's loss is at most this."""

    @property
    def reached(self) -> bool:
        """Whether the target loss is reached; the same on every worker."""
        return self.until_loss is not None and self.loss.reached(self.until_loss)


# ---------------------------------------------------------------------- heartbeats
# What a heartbeat says about a worker's last step (docs/how/runtime.md).


class Reporter:
    """Makes the reports of one worker, which its link sends with the heartbeats."""

    def __init__(self, learner: Learner, progress: Progress, crew: Crew, link: Link | None) -> None:
        self._learner = learner
        self._progress = progress
        self._crew = crew
        self._link = link
        self._last_s = time.perf_counter()
        self.pace = StepTimes()
        self._links = LinkTimes()
        self.metrics: dict[str, float] = {}
        """Figures from `job.log`. Replaced, never changed: the link's thread may be sending them."""

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
        """Report a step with the next heartbeat; returns how long the step took."""
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
            "memory_bytes": memory_bytes(learner.flat.device),
        }
        self._links.add(mesh.number, mesh.take_arrivals(), step_s)
        out |= self._links.report()
        if loader is not None:
            now_with = (mesh.number, loader.batch_size, loader.piece or 0)
            self.pace.add(now_with, step_s, reduced.sync_s, step_s - reduced.wait_s - reduced.sync_s)
            piece = loader.piece if learner.ranks is None else -(-loader.batch_size // learner.logical)
            out |= timing(self.pace, loader.batch_size, piece, mesh.size, crew.nodes)
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
