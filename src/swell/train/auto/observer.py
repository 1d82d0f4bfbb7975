"""What happens in a step of an unmodified script, seen from outside.

This follows CoDDL (NSDI'21, section 3), which does the same for its users' graphs. Here the job is a Python
script, which is observed at four places only:

- `DataLoader.__iter__`: a pass in which gradients are computed is a *training pass*. All workers draw the
  same batches from it, as a plain run does (`Draws`). Other passes are evaluations.
- `nn.Module.__call__`: each worker computes its part of what a model is given (`Dividing`).
- the end of `loss.backward()`: gradients become those of the whole batch, and what the workers have computed
  is compared (`Exchange`). Whatever the script does then (clipping, GradScaler, logging) is as on one device.
- `optimizer.step()` (torch's global step hooks): counts steps; the first step shows what is trained.

Between steps membership changes (`Agreement`), and newcomers follow to where the others are (`CatchingUp`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from swell.train.auto import by_hand, confinement, held, layout, loops, processes
from swell.train.auto.agreement import Agreement
from swell.train.auto.catching_up import CatchingUp
from swell.train.auto.dividing import Dividing
from swell.train.auto.draws import Draws
from swell.train.auto.exchange import Exchange, Loss
from swell.train.auto.giving_way import give_way
from swell.train.auto.job import ScriptJob
from swell.train.auto.position import Position
from swell.train.auto.randomness import states
from swell.train.auto.rhythm import Rhythm
from swell.train.auto.run import ScriptRun, ScriptStage
from swell.train.auto.streams import Readings, Stream, StreamPass, is_stream
from swell.train.auto.trained import Trained


class Observer:
    """Observes what the script does and makes it one worker of a job."""

    def __init__(self, run: ScriptRun, whole_iter: Callable[[Any], Iterator[Any]]) -> None:
        self.run = run
        self._whole_iter = whole_iter
        self.pid = os.getpid()
        """The process of the script; those that it forks are not observed."""
        self.position, self._rhythm = Position(), Rhythm()
        self.readings = Readings()
        self.loss, self.trained = Loss(), Trained(run.link)
        self.agreement = Agreement(run, self.position, self._rhythm)
        self.dividing = Dividing(run, self.position)
        self.exchange = Exchange(run, self.position, self.loss, self.agreement, self.trained, self.dividing)
        self._catching_up = CatchingUp(run, self.position, self._rhythm, self.trained, self.readings)
        self.dividing.watch(on=True)  # to see how many rows a batch has
        self._draws = Draws(
            run,
            self.position,
            self._rhythm,
            self.agreement,
            self._catching_up,
            self.dividing,
            self.readings,
        )
        self._lone = confinement.Count()

    # ------------------------------------------------------------------ passes

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The script begins to iterate `loader`."""
        if self.run.stage is ScriptStage.ALONE or os.getpid() != self.pid:
            return self._whole_iter(loader)
        if not torch.is_grad_enabled() or self.position.trains(loader) is False:
            return self._evaluation(loader)
        if is_stream(loader):
            stream = Stream(self._whole_iter(loader), lambda: self.run.job is None or self.run.forwarding)
            return self.position.open_stream(loader, self._draws.draw, stream)
        return self.position.open(loader, self._draws.draw)

    def _evaluation(self, loader: DataLoader[Any]) -> Iterator[Any]:
        batches, begun = self._whole_iter(loader), states()
        for batch in batches:
            yield batch
            if self.run.forwarding and not is_stream(loader):
                break
        # Newcomers see all of it if it is a stream, if no step was made, or if batches are drawn by hand.
        if self.run.job is not None and not is_stream(loader) and self.position.by_hand() is None:
            self.run.randomness.after(begun)

    # ------------------------------------------------------------------ gradients

    def before_backward(self, roots: Any) -> None:
        """The script computes gradients of `roots`."""
        self.dividing.begin_backward()
        self.loss.take(roots)

    def skips(self, roots: Any) -> bool:
        """Whether the gradients of `roots` have no effect and need not be computed."""
        job = self.run.job
        return job is not None and job.forwarding and self._catching_up.replay.skips(roots, job)

    def after_backward(self) -> None:
        """The gradients have been computed."""
        job, rhythm = self.run.job, self._rhythm
        if job is None and self.run.stage is ScriptStage.ALONE:
            if self.trained.by_hand():  # so this is all there is of a step
                self._lone.step(self.run.link)
            self.run.stop_if_asked()
            return
        rhythm.pending = True
        rhythm.backwards += 1
        if job is None and rhythm.backwards > 1 and self.trained.by_hand():
            confinement.run_alone(self.run, confinement.BY_HAND)
            return
        self._draws.computed(job)
        if job is not None and not job.forwarding:
            self.exchange.average(job)
        self.loss.forget()

    # ------------------------------------------------------------------ steps

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The script calls optimizer.step()."""
        job, stage = self.run.job, self.run.stage
        if stage is ScriptStage.ALONE or os.getpid() != self.pid:
            return
        self._rhythm.backwards = 0
        if job is None:
            reason = confinement.SHARDED if processes.shards(optimizer) else self._why_not()
            if reason:
                confinement.run_alone(self.run, reason)
                return
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._begin(optimizer, confinement.CLOSURE if _may_repeat(optimizer, closure) else "")
        elif optimizer not in self.trained.optimizers:
            self.trained.optimizers.append(optimizer)
            job.trains_with(self.trained.optimizer())

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        if os.getpid() != self.pid:
            return
        self._rhythm.stepped()
        job = self.run.job
        if job is not None:
            self._after_shared_step(job, optimizer)
        elif self.run.stage is ScriptStage.ALONE:
            self._lone.step(self.run.link)
            self.run.stop_if_asked()

    def _after_shared_step(self, job: ScriptJob, optimizer: torch.optim.Optimizer) -> None:
        rhythm, position, current = self._rhythm, self.position, self.position.current
        if rhythm.backwards > 1 and not job.confined:
            confinement.confine(self.run, job, confinement.CLOSURE)
        here, forwarding = self.position.main(), job.forwarding
        if job.world == 1 and not forwarding:
            if layout.trains_others(job, optimizer):
                self.trained.lay_out(job)
            self.agreement.settle_alone(job)
        if here is not None and not here.over:
            rhythm.ahead = len(here.flight) or rhythm.ahead
            if rhythm.ahead and isinstance(here, StreamPass) and not job.confined:
                confinement.confine(self.run, job, confinement.STREAM_AHEAD)
        steps = position.by_hand()
        if forwarding and steps is not None:
            self._catching_up.arrive_by_hand(steps, job)
            self._draws.watch_calls(job)
            return
        if forwarding:
            if rhythm.ahead and here is not None and here.epoch == job.epoch and not here.over:
                self._catching_up.arrive_after_step(here, job)
                self._draws.watch_calls(job)
            return
        divided = True
        for drawn in current:
            divided = divided and not drawn.undivided
        job.stepped(self.exchange.last, len(current[0].window) if current else 1, divided=divided)
        if rhythm.ahead or steps is not None:
            self.agreement.carry_out(job)
            self._draws.watch_calls(job)

    def _why_not(self) -> str:
        """Why the script cannot be followed, seen at its first step, or ''."""
        if processes.is_real():
            return confinement.DISTRIBUTED
        if any(loops.is_repeated(p) for p in self.position.active):
            return confinement.CYCLE
        if any(isinstance(p, StreamPass) and p.flight for p in self.position.active):
            return confinement.STREAM_AHEAD
        drew = any(p.flight or p.drawn for p in self.position.active)
        if drew or self.position.current or by_hand.may_be_followed():
            return ""
        return confinement.HAND

    def _begin(self, optimizer: torch.optim.Optimizer, confined: str) -> None:
        """Make the job, at the first step of the first training pass, which shows what is trained."""
        run, position = self.run, self.position
        passes = [p for p in position.active if not p.over or p.flight or p.drawn]
        if not passes:
            processes.check_drawn(run)
        for here in passes:
            processes.check(run, here.loader)
        self.trained.begin(optimizer)
        model, whole = self.trained.model(), self.trained.optimizer()
        job = ScriptJob(self._catching_up, model, whole, run.link, run.randomness.seed)
        if confined:
            confinement.confine(run, job, confined)
        run.found(job)
        position.stepped_in(loops.around(held.script_frames()))
        self._catching_up.begin()
        self.dividing.watch(on=False)
        if not passes:  # it draws by hand
            steps = position.open_steps(self.dividing.rows)
            passes, position.current = [steps], [steps.computed()]
        for here in passes:
            position.begin(here, None if here is passes[0] else passes[0])
        here = passes[0]
        found = job.begin()
        while not found and not job.rehearsing:
            found = job.join()
        run.stage = ScriptStage.SHARED
        if job.forwarding:
            return
        if job.rank != 0:  # all workers have computed the first batch
            position.reorder(passes)
            for mine in passes:
                for drawn in (*mine.flight, *position.current):
                    drawn.ordinal = here.ordinal
        job.at_epoch(here.epoch)
        if self._rhythm.pending:
            self.exchange.average(job, founding=True)

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """The script has run to its end."""
        run, job = self.run, self.run.job
        if run.left:
            return
        self._draws.pools.close()
        self.dividing.watch(on=False)
        if job is None:
            if run.stage is not ScriptStage.ALONE:  # the script never trained
                confinement.be_the_only_one(run.link)
            run.link.done(0)
            run.link.flush()
        elif job.forwarding:
            give_way(
                run.link, "its script came to its end before it was where the others are", steps=job.steps
            )
        else:
            self.exchange.end_together(job)
            job.end()


def _may_repeat(optimizer: torch.optim.Optimizer, closure: Any) -> bool:
    return closure is not None and isinstance(optimizer, torch.optim.LBFGS)
