"""Where a worker's script is, where the job is, and how the worker gets there.

The script's position is (training pass, batch). A newcomer runs the same script, gets a single batch in every
pass that is over, waits in the running pass, and receives model, optimizers, schedulers and the script's
plain variables; then it goes on like the others. It takes them at the same line of the script at which the
others hand them over: where the script asks for its next batch, or, if the script draws batches ahead, after
the optimizer's step.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader

from swell.train.agent.errors import RESPAWN
from swell.train.auto import layout
from swell.train.auto import script as auto_script
from swell.train.auto.job import ScriptJob
from swell.train.auto.passes import Drawn, Pass
from swell.train.auto.reduction import Reduction
from swell.train.data.samples import key
from swell.train.optimizers import Several
from swell.train.sync.link import Link
from swell.train.sync.transfer import _cloned as cloned


class Position:
    """The passes of a script and its place in them; `Observer` adds what happens in a step."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.job: ScriptJob | None = None
        self.seed = 0
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers that have stepped, or were there when the first one did."""
        self.reduction = Reduction()
        self._trains: weakref.WeakKeyDictionary[DataLoader[Any], bool] = weakref.WeakKeyDictionary()
        self._active: list[Pass] = []
        """Passes that the script is in: the present training passes, and others that were drawn from."""
        self._current: list[Drawn] = []
        """The batches whose gradients were computed last, one of each loader."""
        self._passes = 0
        """The number of training passes that have begun."""
        self._founding = False
        self._dirty = False
        """True if a backward pass has run since the last step."""
        self._ahead = 0
        """How many batches the script has drawn ahead when its optimizer steps."""
        self._in_this_step = 0
        """Batches whose gradients were computed since the optimizer's last step."""
        self._per_step = 1
        """The most batches that the script has accumulated for one step."""
        self._counts = False
        """True if the script does not step with every batch or leaves passes early: then its count of batches
        matters."""
        self._given: dict[str, Any] = {}

    @property
    def forwarding(self) -> bool:
        """Whether the script is catching up with the job."""
        return self.job is not None and self.job.forwarding

    # ------------------------------------------------------------------ passes

    def _training(self) -> Pass | None:
        """The training pass that the script is in: the first one, if it draws from several loaders."""
        for here in reversed(self._active):
            if here.training and here.main is None:
                return here
        return None

    def _begin_pass(self, here: Pass, *, follows: Pass | None = None) -> None:
        """Begin a training pass; `follows`: the pass with which it shares its steps."""
        here.training = self._trains[here.loader] = True
        if here not in self._active:
            self._active.append(here)
        if follows is not None:
            here.main, here.ordinal = follows, follows.ordinal
            here.reorder(self._order(here))
            if self._given.get("more") and not self.forwarding:  # the job was in the middle of it
                here.go_to(self._given["more"].pop(0), live=True)
            return
        for before in [p for p in self._active if p is not here]:
            if before.training and not before.over:
                self._counts = True  # the script has left a pass before its end
            self._active.remove(before)
        if here.ordinal != self._passes:
            here.ordinal = self._passes
            here.reorder(self._order(here))
        self._passes += 1
        if self.job is not None and not self.job.forwarding and not self._founding:
            self.job.at_epoch(here.ordinal)

    def _order(self, here: Pass) -> int:
        """The seed of a pass's order; loaders that are drawn from together have different ones."""
        beside = [p for p in self._active if p.main is not None]
        extra = () if here.main is None else (beside.index(here) if here in beside else len(beside),)
        return key(self.seed, here.ordinal, *extra)

    # ------------------------------------------------------------------ catching up

    def _forward(self, here: Pass) -> list[Any] | None:
        """Samples to compute without effect while catching up; None once caught up. May end the pass."""
        job = self.job
        assert job is not None
        if here.main is not None:
            return here.idle()
        while True:
            if here.ordinal > job.epoch:
                job.begin_anew()
            if here.ordinal < job.epoch:
                if here.drawn <= self._ahead:
                    return here.idle()
                here.over = True
                raise StopIteration
            # Go on until a step, so that accumulation stays in phase; arrive there if batches are in flight.
            if self._dirty or self._ahead:
                return here.idle()
            if self._arrive(here):
                return None
            if here.ordinal == job.epoch:
                return here.idle()

    def _arrive(self, here: Pass) -> bool:
        """Take over the job's state if the script is at the job's position, waiting to join if need be."""
        job = self.job
        assert job is not None
        if layout.is_stale(job):
            self._lay_out(job)
        if not layout.is_that_of_members(job, self.link):
            raise SystemExit("layers were unfrozen in the middle of a pass: it can join in the next one")
        state = job.script_state
        if state.later is not None:
            if self._short_of(here, state.later["script"]):
                return False
            state.arrive(state.later)
            self.link.at_epoch(here.ordinal)
        elif not job.join() or state.later is not None:
            return False
        positions = [self._given["position"], *self._given["more"]]
        passes = [here, *(p for p in self._active if p.main is here)]
        self._given["more"] = positions[len(passes) :]
        for mine, position in zip(passes, positions):
            mine.reorder(self._order(mine))
            mine.go_to(position, live=not state.resumed)
        state.resumed = False
        auto_script.set_variables(auto_script.script_frames(), self._given["variables"])
        return True

    def _short_of(self, here: Pass, state: dict[str, Any]) -> int:
        """How many batches the script is behind, if its count of batches matters (negative: ahead)."""
        return int(state["position"]["batch"]) - here.drawn if state["counts"] else 0

    def is_at(self, state: dict[str, Any], steps: int) -> bool:
        """Whether the script stands where `state` was captured, after that many steps."""
        if self._founding:
            return steps == 0
        here = self._training()
        assert here is not None
        if here.ordinal != int(state["position"]["pass"]):
            return False
        short = self._short_of(here, state)
        if short < 0:  # the script has counted too many batches
            os._exit(RESPAWN)
        return short == 0

    # ------------------------------------------------------------------ state

    def capture(self) -> dict[str, Any]:
        """The script's position, its variables, and the states of its stateful objects."""
        here = self._training()
        assert here is not None
        frames = auto_script.script_frames()
        return {
            "position": here.position(),
            "more": [p.position() for p in self._active if p.main is here],
            "seed": self.seed,
            "counts": self._counts,
            "loss_is": self.reduction.kind,
            "variables": auto_script.variables(frames),
            "objects": {name: item.state_dict() for name, item in self._stateful(frames).items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `capture` gave; position and variables follow once the script has come there."""
        self.seed, self._counts = int(state["seed"]), bool(state["counts"])
        self.reduction.kind = state["loss_is"]
        self._given = cloned(state)
        items = self._stateful(auto_script.script_frames())
        for name, value in self._given["objects"].items():
            if name in items:
                items[name].load_state_dict(value)

    def _stateful(self, frames: list[Any]) -> dict[str, Any]:
        assert self.job is not None
        own = {id(m) for m in self.job.model.modules()} | {id(o) for o in self.optimizers}
        return auto_script.stateful(frames, own | {id(self.job.optimizer)})

    def _lay_out(self, job: ScriptJob) -> None:
        """Exchange the gradients of what the script trains now."""
        layout.lay_out(job, auto_script.find_model(self.optimizers), self._whole_optimizer(), self.link)

    def _whole_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0] if len(self.optimizers) == 1 else Several(self.optimizers)
