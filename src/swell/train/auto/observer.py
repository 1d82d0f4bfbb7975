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

import contextlib
import copy
import math
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from swell.train.auto import by_hand, held, loops, processes
from swell.train.auto.catching_up import CatchingUp
from swell.train.auto.dividing import Dividing
from swell.train.auto.fingerprint import Fingerprint, contents
from swell.train.auto.job import (
    ALONE,
    BY_HAND,
    CLOSURE,
    CYCLE,
    DISTRIBUTED,
    HAND,
    SHARDED,
    STREAM_AHEAD,
    Count,
    ScriptJob,
    ScriptRun,
    ScriptStage,
    be_the_only_one,
    confine,
    give_way,
    run_alone,
)
from swell.train.auto.passes import Pass, ReadBatch, Readings, Stream, StreamPass, is_stream
from swell.train.auto.position import END, Position, Rhythm, leave, place
from swell.train.auto.randomness import states
from swell.train.auto.trained import Trained, trains_others
from swell.train.data.samples import LoaderPool, fetch, key
from swell.train.sync.mesh import Header
from swell.train.sync.reducer import Reduced


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
        self._lone = Count()

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
            run_alone(self.run, BY_HAND)
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
            reason = SHARDED if processes.shards(optimizer) else self._why_not()
            if reason:
                run_alone(self.run, reason)
                return
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._begin(optimizer, CLOSURE if _may_repeat(optimizer, closure) else "")
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
            confine(self.run, job, CLOSURE)
        here, forwarding = self.position.main(), job.forwarding
        if job.world == 1 and not forwarding:
            if trains_others(job, optimizer):
                self.trained.lay_out(job)
            self.agreement.settle_alone(job)
        if here is not None and not here.over:
            rhythm.ahead = len(here.flight) or rhythm.ahead
            if rhythm.ahead and isinstance(here, StreamPass) and not job.confined:
                confine(self.run, job, STREAM_AHEAD)
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
            return DISTRIBUTED
        if any(loops.is_repeated(p) for p in self.position.active):
            return CYCLE
        if any(isinstance(p, StreamPass) and p.flight for p in self.position.active):
            return STREAM_AHEAD
        drew = any(p.flight or p.drawn for p in self.position.active)
        if drew or self.position.current or by_hand.may_be_followed():
            return ""
        return HAND

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
            confine(run, job, confined)
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
                be_the_only_one(run.link)
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


# ---------------------------------------------------------------------- what the script draws
# What a script draws from its DataLoaders: whole batches, or samples without effect while it catches up.


_UNTRAINED = 3
"""A training pass in which so many batches in a row were not trained on is no training pass after all."""
_MOST_IN_FLIGHT = 512


class Draws:
    """Hands out batches, and knows which of them the script has computed gradients of."""

    def __init__(
        self,
        run: ScriptRun,
        position: Position,
        rhythm: Rhythm,
        agreement: Agreement,
        catching_up: CatchingUp,
        dividing: Dividing,
        readings: Readings,
    ) -> None:
        self._run = run
        self._position = position
        self._rhythm = rhythm
        self._agreement = agreement
        self._catching_up = catching_up
        self._dividing = dividing
        self.pools = Pools()
        self.readings = readings

    def draw(self, here: Pass) -> Any:
        """The next batch of `here`."""
        randomness = self._run.randomness
        if not here.drawn and not here.over:
            here.order.peek(0)  # newcomers draw that too
            randomness.pass_begins(here)
        try:
            batch = self._draw(here)
        except StopIteration:
            run = self._run
            if not run.forwarding:
                self.readings.leave(here, ended=True)
            randomness.pass_ends(here, leads=run.leads(), forwarding=run.forwarding)
            raise
        here.gave(batch)
        return batch

    def _load(self, here: Pass, samples: Any) -> Any:
        """These samples as one batch."""
        if isinstance(samples, ReadBatch):
            batch = samples.hand_out()
            if not self._run.forwarding and self._run.job is not None and self._run.job.world > 1:
                self._dividing.given += contents(batch)
            return batch
        return self.pools.get(here.loader, samples, self._seed(here))

    def _load_idle(self, here: Pass, samples: Any) -> Any:
        """A batch to compute without effect, loaded with randomness of this worker's own."""
        if isinstance(samples, ReadBatch):
            return samples.hand_out()
        with self._run.randomness.own():  # where there are many of them, any will do, so it is loaded once
            return (self.pools.idle if here.counted else self.pools.get)(here.loader, samples)

    def _seed(self, here: Pass) -> int | None:
        """The seed of what loader processes draw: by sample, so that all workers draw the same."""
        return key(self._run.randomness.seed, here.ordinal) if here.loader.num_workers else None

    def _draw(self, here: Pass) -> Any:
        if here.over:
            raise StopIteration
        job = self._run.job
        if here.drawn == 0:
            here.drawn_in = loops.drawn_in(held.script_frames())
        if job is None or not here.training:
            return self._whole(here)
        if here.drawn == 0:
            self._begin_pass(here, self._position.other_of_loop(here), job)
        if job.forwarding:
            idle = self._catching_up.forward(here, job)
            here.touched = True
            if idle is not None:
                return self._load_idle(here, idle)
        elif len(here.flight) >= self._rhythm.most_in_flight + _UNTRAINED:
            here.to_evaluation()
            return self._whole(here)
        elif not self._rhythm.ahead and here.main is None:
            self._agreement.carry_out(job)
        here.touched = True
        self.watch_calls(job)
        drawn = here.take()
        if drawn is None:
            here.over = True
            raise StopIteration
        if here.loader.num_workers and not isinstance(drawn.window, ReadBatch):
            ahead = here.upcoming(2 * here.loader.num_workers)
            self.pools.plan(here.loader, [drawn.window, *ahead], self._seed(here))
        return self._load(here, drawn.window)

    def computed(self, job: ScriptJob | None) -> None:
        """The script has computed gradients of the oldest batches in flight: these are current now."""
        active, by_hand = self._position.active, self._position.by_hand()
        if by_hand is not None:
            self._position.current = [by_hand.computed()]
            self._rhythm.computed([by_hand])
            return
        if job is not None and len(active) == 1 and active[0].training:  # most scripts, most of the time
            group = active if active[0].flight else []
        else:
            group = self._drawn_from(job)
        if group:
            self._position.current = [here.flight.popleft() for here in group]
            for drawn in self._position.current:
                drawn.batch = None
            self._rhythm.computed(group)
        for here in self._position.active:
            here.touched = False

    def watch_calls(self, job: ScriptJob) -> None:
        """Have the calls of models divided, if there are several workers."""
        self._dividing.watch(on=job.world > 1)

    def _begin_pass(self, here: Pass, follows: Pass | None, job: ScriptJob) -> None:
        processes.check(self._run, here.loader)
        for before in self._position.active:
            if follows is None and before.training and not before.over and not job.forwarding:
                self.readings.leave(before, ended=False)
        self._position.begin(here, follows, forwarding=job.forwarding, ahead=self._rhythm.ahead)
        if follows is None and not job.forwarding:
            job.at_epoch(here.epoch)

    def _whole(self, here: Pass) -> Any:
        """A whole batch, in a pass that is not (or not yet) a training pass."""
        job, forwarding = self._run.job, self._run.forwarding
        if job is not None:
            self.watch_calls(job)
        brief = forwarding and here.drawn and not isinstance(here, StreamPass)
        drawn = None if brief else here.take()
        if drawn is None:
            if here.drawn and not forwarding:
                self._position.ended_untrained(here)
            here.over = True
            here.flight.clear()
            raise StopIteration
        if not torch.is_grad_enabled() or len(here.flight) > _MOST_IN_FLIGHT:
            here.flight.popleft()
        here.touched = True
        self._position.evaluates(here)
        return self._load(here, drawn.window)

    def _drawn_from(self, job: ScriptJob | None) -> list[Pass]:
        """The passes whose batches the present gradients are of; they are training passes from now on."""
        active = self._position.active
        group = [p for p in active if p.flight and (p.training or p.touched or job is None)]
        if job is not None:
            for here in [p for p in group if not p.training]:  # this loader's first use in training
                main = next((p for p in group if p.training and p.main is None), None)
                self._begin_pass(here, main or self._position.other_of_loop(here), job)
                for drawn in here.flight:
                    drawn.ordinal = here.ordinal
        return group


# ---------------------------------------------------------------------- loader processes
# Samples of a script's loaders, through loader processes where the script asked for some.


_TOKENIZERS = "TOKENIZERS_PARALLELISM"


class Pools:
    """The loader processes of each loader, as many as its `num_workers`."""

    def __init__(self) -> None:
        self._pools: weakref.WeakKeyDictionary[DataLoader[Any], LoaderPool] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakKeyDictionary[DataLoader[Any], Any] = weakref.WeakKeyDictionary()
        """By loader: a batch that was loaded once, in place of those that are computed without effect."""

    def get(self, loader: DataLoader[Any], indices: list[Any], seed: int | None = None) -> Any:
        """These samples of `loader`, as one batch; loader processes draw random numbers by `seed`."""
        if loader.num_workers:
            return self._pool(loader).get(indices, seed)
        return fetch(loader.dataset, indices, loader.collate_fn, None)  # type: ignore[arg-type]

    def idle(self, loader: DataLoader[Any], indices: list[Any]) -> Any:
        """A batch in place of one that is computed without effect: the first one, loaded once."""
        if loader not in self._idle:
            self._idle[loader] = self.get(loader, indices)
        return copy.deepcopy(self._idle[loader])  # the script may change it

    def plan(self, loader: DataLoader[Any], batches: list[list[Any]], seed: int | None) -> None:
        """Begin to load batches that will be asked for."""
        self._pool(loader).plan(batches, seed)

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            pool.close()

    def _pool(self, loader: DataLoader[Any]) -> LoaderPool:
        if loader not in self._pools:
            assert loader.collate_fn is not None
            with _quiet_tokenizers():
                made = LoaderPool(loader.dataset, loader.collate_fn, loader.num_workers)  # type: ignore[arg-type]
            self._pools[loader] = made
        return self._pools[loader]


@contextlib.contextmanager
def _quiet_tokenizers() -> Iterator[None]:
    """Processes that are forked here use one thread to tokenize, and do not warn of it."""
    chosen = os.environ.get(_TOKENIZERS)
    os.environ[_TOKENIZERS] = chosen or "false"
    try:
        yield
    finally:
        if chosen is None:
            del os.environ[_TOKENIZERS]


# ---------------------------------------------------------------------- the exchange of a batch
# The gradients of a batch, averaged over the workers, and what the workers tell each other with them.


_EVERY = 10
"""On a device the loss is read once in so many steps."""
_OF_LOSS = 10.0
"""Losses of two workers may differ by so many times more than the inputs of their models."""


class Loss:
    """The loss that the script computes gradients of, for the reports."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None

    def take(self, roots: Any) -> None:
        """The script computes gradients of `roots`. Only a single number counts as the loss."""
        first = roots if isinstance(roots, Tensor) else roots[0]
        self._tensor = first if first.numel() == 1 else None

    def forget(self) -> None:
        """The gradients have been computed."""
        self._tensor = None

    def read(self, steps: int) -> float | None:
        """The loss of the batch; on a device only now and then, because reading makes the script wait."""
        loss = self._tensor
        if loss is None or (steps % _EVERY and loss.device.type != "cpu"):
            return None
        return float(loss.item())


class Exchange:
    """Averages the gradients of the current batch over all workers that have computed a part of it."""

    def __init__(
        self,
        run: ScriptRun,
        position: Position,
        loss: Loss,
        agreement: Agreement,
        trained: Trained,
        dividing: Dividing,
    ) -> None:
        self._run = run
        self._position = position
        self._loss = loss
        self._agreement = agreement
        self._trained = trained
        self._fingerprint = Fingerprint(run.link)
        self._dividing = dividing
        self.last = ALONE
        """What was exchanged last."""

    def average(self, job: ScriptJob, *, founding: bool = False) -> None:
        """Make the gradients of the current batch those of all workers; what each computed is compared.

        When the job is founded all workers have computed the whole batch, and the leader's gradients count:
        the others lost theirs when they were given its state.
        """
        current = self._position.current
        drawn = current[0] if current else None
        if job.world == 1 and not self._dividing.scale:  # nothing to exchange, and nobody to agree with
            self.last = ALONE
            self._note(self._loss.read(job.steps), job)
            return
        dividing = self._dividing
        unfrozen = job.world > 1 and trains_others(job, job.optimizer)
        if unfrozen and job.rank:  # joins again, with a layout that has what is trained now
            give_way(self._run.link, "layers were unfrozen", steps=job.steps, counts=False)
        loss = self._loss.read(job.steps)
        given = dividing.told()
        if loss is not None and not founding:
            given.append([loss, _OF_LOSS * abs(loss), 1])  # targets that differ, the model is not given
        header = place(job, self._position, "step")
        header |= {"n": 1, "divided": bool(dividing.scale), "given": given, "first": job.rank == 0}
        self._fingerprint.tell(job, header)
        self._agreement.withdraw()  # with an earlier batch of this step, which was not its last one after all
        may_change = job.world > 1 and self._agreement.may_change()

        def check(headers: list[Header]) -> None:
            leave(self._run, job, headers)

        if dividing.scale or unfrozen or founding:
            self.last = job.average(
                header,
                lambda: 1 if founding else dividing.scale or job.world,
                dividing.settle,
                check,
                may_change=may_change,
            )
            headers = self.last.headers
            if founding and not headers[0]["first"]:
                give_way(self._run.link, "the worker that began the job died in its first step", counts=False)
        else:  # all computed the same
            header["candidate"] = job.offer() if may_change else 0
            headers = job.share(header, check)
            self.last = Reduced(headers, 0.0, 0.0)
        dividing.done()
        self._agreement.settle(header["candidate"], headers)
        if unfrozen:
            self._trained.lay_out(job)
        self._note(loss, job)
        if drawn is not None:
            drawn.undivided = dividing.tried or bool(job.confined)
        dividing.batch_computed()
        self._fingerprint.take(job, headers)

    def _note(self, loss: float | None, job: ScriptJob) -> None:
        if loss is not None and math.isfinite(loss):
            job.add_loss(loss)

    def end_together(self, job: ScriptJob) -> None:
        """Let all members come to the end; one that is there alone is at another place than the job."""
        header: Header = {"what": "step", "doing": "end", "n": 0, "at": END, "steps": job.steps}
        if not job.end_together({**header, "candidate": 0, "unused": []}):
            give_way(self._run.link, "its script came to its end before the others'", steps=job.steps)


# ---------------------------------------------------------------------- who may come or go after this step
# The change of membership that the workers have agreed on, and when it can be made.
#
# Membership changes when the script asks for its next batch and no gradient is pending, because then none
# of its state is in the middle of a change; or after an optimizer's step, if the script draws batches
# ahead.


_LEAST_STEPS = 2
"""Where batches are drawn ahead, newcomers join after so many steps of a pass: they made one too."""


class Agreement:
    """The candidate that all workers agreed to switch to after the present step."""

    def __init__(self, run: ScriptRun, position: Position, rhythm: Rhythm) -> None:
        self._run = run
        self._position = position
        self._rhythm = rhythm
        self.number = 0
        """The candidate's number, or 0."""

    def may_change(self) -> bool:
        """Whether workers may come and go after this step."""
        ahead = self._rhythm.ahead
        if not ahead:
            return True
        here = self._position.main()
        if here is None:
            return True
        drawn = self._position.drawn if here.counted else here.index
        return ahead == len(here.flight) and drawn - ahead > _LEAST_STEPS

    def withdraw(self) -> None:
        """Let go of the candidate: the step for which it was agreed on goes on."""
        if self.number:
            self._run.link.release()
        self.number = 0

    def settle(self, offered: int, headers: list[Header]) -> None:
        """Agree on the candidate that this worker has `offered` if all others have offered it too."""
        candidates = {h["candidate"] for h in headers}
        self.number = candidates.pop() if len(candidates) == 1 else 0
        if offered and not self.number:
            self._run.link.release()

    def settle_alone(self, job: ScriptJob) -> None:
        """What several workers settle with their gradients, a single one does after its step."""
        self.withdraw()  # of the step of another optimizer on the same batch
        self.number = job.offer() if self.may_change() else 0

    def carry_out(self, job: ScriptJob) -> None:
        """Between two steps: save if it is time, and change membership if all agreed to."""
        rhythm, position = self._rhythm, self._position
        if rhythm.pending or (not rhythm.ahead and any(p.flight for p in position.active if p.training)):
            position.counts = position.counts or rhythm.pending
            self.withdraw()
            return
        agreed, self.number = self.number, 0
        try:
            job.boundary(agreed)
        except SystemExit:
            self._run.left = True
            raise
