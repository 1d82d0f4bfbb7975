"""What a script draws from its DataLoaders: this worker's part, whole batches, or samples without effect."""

from __future__ import annotations

from typing import Any

import torch

from swell.train.auto import held, loops, processes
from swell.train.auto.agreement import Agreement
from swell.train.auto.catching_up import CatchingUp
from swell.train.auto.contents import contents
from swell.train.auto.dividing import TOGETHER, Dividing
from swell.train.auto.job import ScriptJob
from swell.train.auto.loss import Loss
from swell.train.auto.output import tell_of_parts
from swell.train.auto.passes import Pass
from swell.train.auto.pools import Pools
from swell.train.auto.position import Position
from swell.train.auto.reduction import NEITHER
from swell.train.auto.rhythm import Rhythm
from swell.train.auto.run import ScriptRun
from swell.train.auto.streams import Readings, StreamPass, Whole
from swell.train.data.samples import key

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
        loss: Loss,
        agreement: Agreement,
        catching_up: CatchingUp,
        dividing: Dividing,
        readings: Readings,
    ) -> None:
        self._run = run
        self._position = position
        self._rhythm = rhythm
        self._loss = loss
        self._agreement = agreement
        self._catching_up = catching_up
        self._dividing = dividing
        self.pools = Pools()
        self.readings = readings
        self._divided = False
        """Whether other workers have other samples of the batch that was drawn last."""
        self._told = False
        """True once this worker, as the leader of several, has said what the script's numbers cover."""

    def draw(self, here: Pass) -> Any:
        """The next batch of `here` for this worker, who computes a divided one with randomness of its own."""
        randomness = self._run.randomness
        randomness.rejoin()
        if not here.drawn and not here.over:
            here.order.peek(0)  # newcomers draw that too
            randomness.pass_begins(here)
        try:
            batch = self._draw(here)
        except StopIteration:
            run = self._run
            if not run.forwarding:
                self.readings.leave(here, ended=True)
            randomness.pass_ends(here, alike=True, leads=run.leads(), forwarding=run.forwarding)
            raise
        here.gave(batch)
        if self._divided:
            randomness.part()
        return batch

    def _load(self, here: Pass, samples: Any, *, divided: bool, again: bool = False) -> Any:
        """These samples as one batch; if others have others, with randomness of this worker's own.

        `again`: any batch will do, so it is loaded once.
        """
        self._divided = divided
        if isinstance(samples, Whole):
            batch = samples.hand_out()
            if not self._run.forwarding and self._run.job is not None and self._run.job.world > 1:
                self._dividing.given += contents(batch)
            return batch
        if not divided:
            return self.pools.get(here.loader, samples, self._seed(here))
        with self._run.randomness.own():
            return (self.pools.idle if again else self.pools.get)(here.loader, samples)

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
                return self._load(here, idle, divided=True, again=here.counted)
        elif len(here.flight) >= self._rhythm.most_in_flight + _UNTRAINED:
            here.to_evaluation()
            return self._whole(here)
        elif not self._rhythm.ahead and here.main is None:
            self._agreement.carry_out(job)
        here.touched = True
        rank, world = (0, 1) if self.together(job) else (job.rank, job.world)
        samples = self._cut(here, rank, world)
        if samples is None:
            here.over = True
            raise StopIteration
        if here.loader.num_workers and not isinstance(samples, Whole):
            ahead = here.upcoming(rank, world, 2 * here.loader.num_workers)
            self.pools.plan(here.loader, [samples, *ahead], self._seed(here))
        return self._load(here, samples, divided=world > 1)

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

    def together(self, job: ScriptJob) -> bool:
        """Whether all workers have whole batches, and models are divided."""
        reduction = self._loss.reduction
        if reduction.kind is None and job.world > 1 and not job.forwarding:
            reduction.kind = TOGETHER
        together = reduction.kind == TOGETHER
        self._dividing.watch(on=together and job.world > 1)
        return together

    def _begin_pass(self, here: Pass, follows: Pass | None, job: ScriptJob) -> None:
        processes.check(self._run, here.loader)
        for before in self._position.active:
            if follows is None and before.training and not before.over and not job.forwarding:
                self.readings.leave(before, ended=False)
        self._position.begin(here, follows, forwarding=job.forwarding, ahead=self._rhythm.ahead)
        if follows is None and not job.forwarding:
            job.at_epoch(here.epoch)

    def _cut(self, here: Pass, rank: int, world: int) -> Any:
        """Draw a batch; returns this worker's samples of it, or None if nothing is left."""
        reduction = self._loss.reduction
        self._loss.dropout.set(off=world > 1 and rank > 0 and reduction.kind is None)
        if world == 1 or isinstance(here, StreamPass):
            all_of_it = here.take_whole(counts=rank == 0)
            return None if all_of_it is None else all_of_it.window
        if here.at_end():
            return None
        if reduction.kind in (None, NEITHER):
            whole = here.take_whole(counts=rank == 0)
            assert whole is not None
            whole.undivided = True
            if rank and here.main is None:
                whole.probe, samples = reduction.samples(whole.window, whole.index, self._rhythm.per_step)
                return samples
            return whole.window
        if rank == 0 and not self._told:
            self._told = True
            tell_of_parts(self._run.link.directory.path)
        drawn = here.take(rank, world)
        return drawn.window[drawn.part[0] : drawn.part[1]]

    def _whole(self, here: Pass) -> Any:
        """A whole batch, in a pass that is not (or not yet) a training pass."""
        job, forwarding = self._run.job, self._run.forwarding
        if job is not None:
            self.together(job)
        brief = forwarding and here.drawn and not isinstance(here, StreamPass)
        drawn = None if brief else here.take_whole()
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
        return self._load(here, drawn.window, divided=False)

    def _drawn_from(self, job: ScriptJob | None) -> list[Pass]:
        """The passes whose batches the present gradients are of; they are training passes from now on."""
        active = self._position.active
        group = [p for p in active if p.flight and (p.training or p.touched or job is None)]
        if job is not None:
            for here in [p for p in group if not p.training]:  # this loader's first use in training
                main = next((p for p in group if p.training and p.main is None), None)
                self._begin_pass(here, main or self._position.other_of_loop(here), job)
                for drawn in here.flight:
                    drawn.ordinal, drawn.counts = here.ordinal, job.rank == 0
        return group
