"""What a script draws from its DataLoaders: whole batches, or samples without effect while it catches up."""

from __future__ import annotations

from typing import Any

import torch

from swell.train.auto import held, loops, processes
from swell.train.auto.agreement import Agreement
from swell.train.auto.catching_up import CatchingUp
from swell.train.auto.contents import contents
from swell.train.auto.dividing import Dividing
from swell.train.auto.job import ScriptJob
from swell.train.auto.passes import Pass
from swell.train.auto.pools import Pools
from swell.train.auto.position import Position
from swell.train.auto.rhythm import Rhythm
from swell.train.auto.run import ScriptRun
from swell.train.auto.streams import ReadBatch, Readings, StreamPass
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
