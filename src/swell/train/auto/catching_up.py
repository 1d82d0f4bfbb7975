"""How the script of a newcomer comes to the job's position, and what it takes over there.

A newcomer runs the same script, gets a single batch in every pass that is over (or as many as the job, in a
loop that counts its draws: see `replay`), waits in the running pass, and receives model, optimizers,
schedulers and the script's plain variables; then it goes on like the others.
It takes them at the same line of the script at which the others hand them over: where the script asks for its
next batch, or, if the script draws batches ahead, after the optimizer's step.
"""

from __future__ import annotations

import os
from typing import Any

from swell.train.agent.errors import RESPAWN
from swell.train.auto import layout
from swell.train.auto import script as auto_script
from swell.train.auto.job import ScriptJob
from swell.train.auto.loss import Loss
from swell.train.auto.passes import Pass
from swell.train.auto.position import Position
from swell.train.auto.replay import Replay
from swell.train.auto.rhythm import Rhythm
from swell.train.auto.run import ScriptRun, ScriptStage
from swell.train.auto.trained import Trained
from swell.train.sync.transfer import _cloned as cloned


class CatchingUp:
    """What one worker's script hands over, and another's takes over once it has come there."""

    def __init__(
        self, run: ScriptRun, position: Position, rhythm: Rhythm, loss: Loss, trained: Trained
    ) -> None:
        self._run = run
        self._position = position
        self._rhythm = rhythm
        self._loss = loss
        self._trained = trained
        self.replay = Replay(run.link, position)
        self._variables: Any = None
        """The script's variables that were taken over; they are set once the script has arrived."""
        self._random: dict[str, Any] = {}
        """The states of the generators that were taken over; they are set then, too."""

    # ------------------------------------------------------------------ going there

    def forward(self, here: Pass, job: ScriptJob) -> list[Any] | None:
        """Samples to compute without effect while catching up; None once caught up. May end the pass."""
        if here.main is not None:
            return self.replay.samples(here) if here.counted else here.idle()
        while True:
            if here.epoch > job.epoch:
                job.begin_anew()
            if here.counted:
                if self._may_arrive(here, job) and self._arrive(here, job):
                    return None
                return self.replay.samples(here)
            if here.epoch < job.epoch:
                if here.drawn <= self._rhythm.ahead:
                    return here.idle()
                here.over = True
                raise StopIteration
            # Go on until a step, so that accumulation stays in phase; arrive there if batches are in flight.
            if self._rhythm.pending or self._rhythm.ahead:
                return here.idle()
            if self._arrive(here, job):
                return None
            if here.epoch == job.epoch:
                return here.idle()

    def _may_arrive(self, here: Pass, job: ScriptJob) -> bool:
        """Whether a script that draws as often as the job did may be where the job is."""
        if here.epoch != job.epoch or self._rhythm.pending or self._rhythm.ahead:
            return False
        return job.script_state.later is not None or not self.replay.is_behind()

    def arrive_after_step(self, here: Pass, job: ScriptJob) -> None:
        """Catch up after a step, if the script draws batches ahead."""
        if here.counted and job.script_state.later is None and self.replay.is_behind():
            return
        while here.epoch == job.epoch:
            if self._arrive(here, job):
                return
            if job.script_state.later is not None:  # there are batches to count
                return

    def _arrive(self, here: Pass, job: ScriptJob) -> bool:
        """Take over the job's state if the script is at the job's position, waiting to join if need be."""
        link = self._run.link
        if layout.is_stale(job):
            self._trained.lay_out(job)
        if not layout.is_that_of_members(job, link):
            raise SystemExit("layers were unfrozen in the middle of a pass: it can join in the next one")
        state = job.script_state
        if state.later is not None:
            short = self._position.short_of(here, state.later["script"])
            if short < 0:  # the script has counted too many batches
                os._exit(RESPAWN)
            if short:
                return False
            state.arrive(state.later)
            link.at_epoch(here.epoch)
        elif not job.join() or state.later is not None:
            return False
        self._position.arrive(here, live=not state.resumed)
        state.resumed = False
        auto_script.set_variables(auto_script.script_frames(), self._variables)
        self._run.randomness.restore(here, self._random)
        return True

    # ------------------------------------------------------------------ the script's part of the job's state

    def is_at(self, state: dict[str, Any], steps: int) -> bool:
        """Whether the script stands where `state` was captured, after that many steps."""
        if self._run.stage is ScriptStage.FOUNDING:
            return steps == 0
        here = self._position.main()
        assert here is not None
        if here.epoch != int(state.get("epoch", state["position"]["pass"])):
            return False
        short = self._position.short_of(here, state)
        if short < 0:  # the script has counted too many batches
            os._exit(RESPAWN)
        return short == 0

    def capture(self) -> dict[str, Any]:
        """The script's position, its variables, and the states of its stateful objects."""
        frames = auto_script.script_frames()
        return self._position.capture() | {
            "loss_is": self._loss.reduction.kind,
            "random": self._run.randomness.capture(self._position.main()),
            "variables": auto_script.variables(frames),
            "objects": {name: item.state_dict() for name, item in self._stateful(frames).items()},
        }

    def drawn(self) -> int:
        """How many batches the script has drawn in the loop that it is in, for newcomers."""
        return self._position.drawn

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `capture` gave; position and variables follow once the script has come there."""
        given = cloned(state)
        self._position.restore(given)
        self._loss.reduction.kind = given["loss_is"]
        self._variables = given["variables"]
        self._random = given.get("random", {})  # checkpoints of earlier versions have none
        items = self._stateful(auto_script.script_frames())
        for name, value in given["objects"].items():
            if name in items:
                items[name].load_state_dict(value)

    def _stateful(self, frames: list[Any]) -> dict[str, Any]:
        job = self._run.job
        assert job is not None
        own = {id(m) for m in job.model.modules()} | {id(o) for o in self._trained.optimizers}
        return auto_script.stateful(frames, own | {id(job.optimizer)})
