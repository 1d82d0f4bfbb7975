"""What happens in a step of an unmodified script, seen from outside.

This follows CoDDL (NSDI'21, section 3), which does the same for its users' graphs. Here the job is a Python
script, which is observed at three places only:

- `DataLoader.__iter__`: a pass in which gradients are computed is a *training pass*. Each worker gets its
  part of every batch, so the global batch is the script's own. Other passes (evaluation) run whole.
- the end of `loss.backward()`: gradients are averaged over the workers, weighted by samples. Whatever the
  script does then (clipping, GradScaler, logging) sees what one device would see.
- `optimizer.step()` (torch's global step hooks): counts steps; the first step shows what is trained.

Membership changes when the script asks for its next batch and no gradient is pending, because then none of
its state is in the middle of a change; or after an optimizer's step, if the script draws batches ahead. The
samples of a worker that dies during a step come again with the next batch.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from swell.train.agent.errors import LEFT, RESPAWN
from swell.train.auto import confinement, layout
from swell.train.auto import script as auto_script
from swell.train.auto.draws import Draws
from swell.train.auto.job import ALONE, ScriptJob
from swell.train.auto.passes import Drawn, Pass
from swell.train.auto.reduction import NEITHER, SUM
from swell.train.data import plan
from swell.train.data.plan import Tree
from swell.train.sync.link import STOP, Link
from swell.train.sync.mesh import Header

_LEAST_STEPS = 2
"""Where batches are drawn ahead, newcomers join after so many steps of a pass: they made one too."""


class Observer(Draws):
    """Observes what the script does and makes it one worker of a job."""

    def __init__(self, link: Link, whole_iter: Callable[[Any], Iterator[Any]], *, leads: bool) -> None:
        super().__init__(link, whole_iter)
        self._leads = leads
        """Whether this worker's output counts before it has come to its first step."""
        self.made: list[weakref.ref[torch.optim.Optimizer]] = []
        """All optimizers that the script has made."""
        self._backwards = 0
        self._in_step = 0
        """Backward passes since the optimizer's step was called, with a closure."""
        self._loss: Tensor | None = None
        self._lone = confinement.Count()
        self._last = ALONE

    # ------------------------------------------------------------------ gradients

    def before_backward(self, roots: Any, gradients: Any) -> Any:
        """The script computes gradients of `roots`; returns the gradients to begin with.

        The sum over a worker's part is made as large as the sum over the whole batch would be, because the
        parts are averaged.
        """
        if self.job is None or gradients is not None or self.alone:
            return gradients
        losses = (roots,) if isinstance(roots, Tensor) else tuple(roots)
        for loss in losses:
            if loss.numel() != 1:
                return gradients
        self._loss = losses[0]
        if self.reduction.kind != SUM:
            return gradients
        head = next((p.flight[0] for p in self._active if p.training and p.flight), None)
        head = head or (self._current[0] if self._current else None)
        if head is None or not head.samples or head.is_whole or self.job.forwarding:
            return gradients
        factor = len(head.window) / (head.part[1] - head.part[0])
        scaled = [torch.full_like(loss, factor) for loss in losses]
        return scaled[0] if isinstance(roots, Tensor) else scaled

    def after_backward(self) -> None:
        """The gradients have been computed."""
        if self.alone:
            if not any(ref() is not None for ref in self.made):  # by hand, so this is all there is of a step
                self._lone.step(self.link)
            self._stop_if_asked()
            return
        self._dirty = True
        self._backwards += 1
        self._in_step += 1
        job = self.job
        if job is None and self._backwards > 1 and not any(ref() is not None for ref in self.made):
            confinement.run_alone(self, confinement.BY_HAND)
            return
        active = self._active
        if job is not None and len(active) == 1 and active[0].training:  # most scripts, most of the time
            group = active if active[0].flight else []
        else:
            group = self._drawn_from(job)
        if group:
            self._in_this_step += 1
            self._current = [here.flight.popleft() for here in group]
        for here in self._active:
            here.touched = False
            if len(here.flight) > self._most_in_flight and here in group:
                self._most_in_flight = len(here.flight)
        if job is not None and not job.forwarding:
            self._reduce(job)
        self._loss = None

    def _drawn_from(self, job: ScriptJob | None) -> list[Pass]:
        """The passes whose batches the present gradients are of; they are training passes from now on."""
        group = [p for p in self._active if p.flight and (p.training or p.touched or job is None)]
        if job is not None:
            for here in [p for p in group if not p.training]:  # this loader's first use in training
                main = next((p for p in group if p.training and p.main is None), None)
                self._begin_pass(here, follows=main)
                for drawn in here.flight:
                    drawn.ordinal, drawn.counts = here.ordinal, job.rank == 0
        return group

    def _reduce(self, job: ScriptJob) -> None:
        """Average the gradients of the present batch over all workers that have a part of it."""
        drawn, alone = self._current[0] if self._current else None, job.world == 1
        if alone and drawn is not None and drawn.is_whole:  # nothing to exchange, and nobody to agree with
            self._last = ALONE
            loss = self._read_loss(drawn, job)
            if loss is not None and math.isfinite(loss):
                job.add_loss(loss)
            return
        header: Header
        if drawn is None:  # no data in it: all workers computed the same
            header = {"what": "step", "n": 1, "at": [-1, 0], "part": [0, 0]}
            size = job.world
        else:
            at, part = [drawn.ordinal, drawn.index], list(drawn.part)
            header = {"what": "step", "n": drawn.samples, "at": at, "part": part}
            size = len(drawn.window)
            self._look_at_loss(drawn, header, job)
        header["steps"] = job.steps
        unfrozen = not alone and layout.trains_others(job, job.optimizer)
        if unfrozen and job.rank:
            os._exit(RESPAWN)  # joins again, with a layout that has what is trained now
        if drawn is not None and not drawn.samples and alone:
            job.rescale(0.0)  # samples that this worker had drawn before it came to the job's position
        weight = header["n"] / size if size else 0.0
        if self._agreed:  # with an earlier batch of this step, which was not the step's last one after all
            self.link.release()
        may_change = not alone and self._may_change()
        reduced = self._last = job.average(header, weight, _tree, may_change=may_change)
        self._agreed = _common([h["candidate"] for h in reduced.headers])
        if header["candidate"] and not self._agreed:
            self.link.release()
        self.reduction.hear(reduced.headers)
        if self.reduction.kind == NEITHER and not job.confined:
            confinement.confine(self, confinement.LOSS)
        if unfrozen:
            self._lay_out(job)
        going = _going(reduced.headers)
        if going and (going[0]["at"], going[0]["steps"]) != (header["at"], header["steps"]):
            os._exit(RESPAWN)  # this worker's script is at another place: a new worker replaces it
        self._hear_loss(job, going)
        total = sum(h["n"] for h in going)
        if not going or drawn is None:
            return
        full = max(int(h.get("size", size)) for h in going)
        if total != full and not alone:  # a single worker's mean over its samples was not weighted
            job.rescale(full / total)
        gaps = plan.missing(full, [(h["part"][0], h["part"][1]) for h in going])
        if gaps and drawn.window:
            here = next((p for p in self._active if p.ordinal == drawn.ordinal and p.main is None), None)
            if here is not None:
                here.carry += [drawn.window[i] for low, high in gaps for i in range(low, high)]
                here.over = False

    def _may_change(self) -> bool:
        """Whether workers may come and go after this step."""
        if not self._ahead:
            return True
        here = self._training()
        if here is None:
            return True
        return self._ahead == len(here.flight) and here.index - self._ahead > _LEAST_STEPS

    def _look_at_loss(self, drawn: Drawn, header: Header, job: ScriptJob) -> None:
        """Put this worker's part of the step's loss into the header, and judge a probe."""
        header["size"] = len(drawn.window)
        value = self._read_loss(drawn, job)
        if drawn.probe >= 0 and self.reduction.kind is None:
            self.reduction.tried(drawn.probe, value)
            if self.reduction.found:
                header["loss_is"] = self.reduction.found
        if value is not None and math.isfinite(value) and drawn.samples:
            header["loss"] = value * (1 if self.reduction.kind == SUM else drawn.samples)

    def _read_loss(self, drawn: Drawn, job: ScriptJob) -> float | None:
        """This worker's loss of the batch; on a device only now and then, because reading makes it wait."""
        loss = self._loss
        if loss is None or (drawn.probe < 0 and job.steps % 10 and loss.device.type != "cpu"):
            return None
        return float(loss.item())

    def _hear_loss(self, job: ScriptJob, going: list[Header]) -> None:
        if going and all("loss" in h for h in going):
            total = sum(h["loss"] for h in going)
            job.add_loss(total if self.reduction.kind == SUM else total / sum(h["n"] for h in going))

    # ------------------------------------------------------------------ steps

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The script calls optimizer.step()."""
        if self.alone or os.getpid() != self.pid:
            return
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._in_step = 0
        if self.job is None:
            reason = self._why_not()
            if reason:
                confinement.run_alone(self, reason)
                return
            self._begin(optimizer, confinement.CLOSURE if _may_repeat(optimizer, closure) else "")
        elif optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self.job.trains_with(self._whole_optimizer())

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        if os.getpid() != self.pid:
            return
        self._dirty = False
        if self._in_this_step > self._per_step:
            self._per_step = self._in_this_step
        self._in_this_step = 0
        job = self.job
        if self.alone:
            self._lone.step(self.link)
            self._stop_if_asked()
        elif job is not None:
            if self._in_step > 1 and not job.confined:
                confinement.confine(self, confinement.CLOSURE)
            here, forwarding = self._training(), job.forwarding
            if job.world == 1 and not forwarding:
                self._agree_alone(job, optimizer)
            if here is not None and not here.over:
                self._ahead = len(here.flight) or self._ahead
            if forwarding:
                if self._ahead and here is not None and here.ordinal == job.epoch and not here.over:
                    self._arrive_after_step(here)
                return
            size, divided = 1, True
            for drawn in self._current:
                divided = divided and not drawn.undivided
            if self._current:
                size = len(self._current[0].window)
            job.stepped(self._last, size, divided=divided)
            if self._ahead:
                self._boundary()

    def _agree_alone(self, job: ScriptJob, optimizer: torch.optim.Optimizer) -> None:
        """What several workers exchange with their gradients, a single one settles after its step."""
        if layout.trains_others(job, optimizer):
            self._lay_out(job)
        if self._agreed:  # after the step of another optimizer on the same batch
            self.link.release()
        self._agreed = job.offer() if self._may_change() else 0

    def _arrive_after_step(self, here: Pass) -> None:
        job = self.job
        assert job is not None
        while here.ordinal == job.epoch:
            if self._arrive(here):
                return
            if job.script_state.later is not None:  # there are batches to count
                return

    def _why_not(self) -> str:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return confinement.DISTRIBUTED
        drew = any(p.flight or p.drawn for p in self._active)
        return "" if self._current or drew else self._odd

    def _begin(self, optimizer: torch.optim.Optimizer, confined: str) -> None:
        """Make the job, at the first step of the first training pass, which shows what is trained."""
        passes = [p for p in self._active if not p.over or p.flight or p.drawn]
        alive = [made for ref in self.made if (made := ref()) is not None and _trains_any(made)]
        first = [optimizer] if not any(o is optimizer for o in alive) else []
        self.optimizers = first + alive
        model = auto_script.find_model(self.optimizers)
        job = ScriptJob(self, model, self._whole_optimizer(), self.link, self.seed)
        if confined:
            confinement.confine(self, confined, job)
        self._founding, self.job = True, job
        for here in passes:
            self._begin_pass(here, follows=None if here is passes[0] else passes[0])
        here = passes[0]
        found = job.begin()
        while not found and not job.rehearsing:
            found = job.join()
        self._founding = False
        if job.forwarding:
            return
        if job.rank != 0:  # every worker computes the first batch whole; only the leader's counts
            for mine in passes:
                mine.reorder(self._order(mine))
                for drawn in (*mine.flight, *self._current):
                    drawn.counts, drawn.ordinal = False, here.ordinal
        job.at_epoch(here.ordinal)
        if self._backwards and self._dirty:
            self._reduce(job)

    # ------------------------------------------------------------------ the end

    def _stop_if_asked(self) -> None:
        """End a script that cannot be followed when the job is paused; it will begin again."""
        if self.link.offer(0) == STOP:
            self.left = True
            self.link.stopped()
            raise SystemExit(LEFT)

    def leads(self) -> bool:
        """Whether this worker is the leader, whose output and files count."""
        if self.alone:
            return True
        if self.job is None or self._founding:
            return self._leads
        return self.job.is_leader and not self.job.forwarding

    def finish(self) -> None:
        """The script has run to its end."""
        if self.left:
            return
        for pool in self._pools.values():
            pool.close()
        if self.job is None:
            if not self.alone:  # the script never trained
                confinement.be_the_only_one(self.link)
            self.link.done(0)
            self.link.flush()
        elif self.job.forwarding:
            self.job.begin_anew()
        else:
            self._end_together(self.job)
            self.job.end()

    def _end_together(self, job: ScriptJob) -> None:
        """Let all members come to the end; one that is there alone is at another place than the job."""
        header: Header = {"what": "step", "n": 0, "at": [2**60, 0], "part": [0, 0], "steps": job.steps}
        if not job.end_together({**header, "candidate": 0, "unused": []}):
            os._exit(RESPAWN)


def _trains_any(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.requires_grad for group in optimizer.param_groups for p in group["params"])


def _may_repeat(optimizer: torch.optim.Optimizer, closure: Any) -> bool:
    return closure is not None and isinstance(optimizer, torch.optim.LBFGS)


def _going(headers: list[Header]) -> list[Header]:
    """Headers of the members with samples that are where the leader is, or furthest if it has none."""
    usable = [h for h in headers if h["n"] and h["steps"] == headers[0]["steps"]]
    furthest = max((h["at"] for h in usable), default=None)
    return [h for h in usable if h["at"] == furthest]


def _tree(headers: list[Header]) -> Tree | None:
    going = _going(headers)
    return plan.balanced([rank for rank, h in enumerate(headers) if any(h is g for g in going)])


def _common(candidates: list[int]) -> int:
    return candidates[0] if len(set(candidates)) == 1 else 0
