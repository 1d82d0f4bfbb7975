"""The state of a job: what newcomers receive and checkpoints hold, and how a job begins without any."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from swell.train.agent.errors import RESPAWN
from swell.train.by_steps import BySteps
from swell.train.replicas.form import Whole
from swell.train.state import statetree
from swell.train.sync import transfer as states
from swell.train.sync.level import Optimized


class Traveller(BySteps):
    """A worker whose state travels; `Job` sets the fields."""

    model: nn.Module
    _form: Whole
    """How this worker holds the model: the whole of it, or its part."""
    _objects: dict[str, Any]
    """What the script gave to `register`."""

    def capture(self) -> dict[str, Any]:
        """Everything that makes up the training state; tensors are live ones, not copies."""
        return self._form.local(self._state())

    def capture_whole(self) -> dict[str, Any]:
        """The state with whole tensors, as a checkpoint holds it."""
        return self._form.gathered(self._state(), keep=self.is_leader)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": states.model_tensors(self.model),
            "optimizer": self.optimizer.state_dict(),
            "objects": {name: value.state_dict() for name, value in self._objects.items()},
            "loaders": {name: ld.state() for name, ld in self._loaders.items()} | self._pending_loaders,
            "epoch": self.epoch,
            "steps": self.steps,
            "operation": self._crew.operation,
            "loss": self._loss.state_dict(),
        }
        state |= self._updater.state()
        if self._adaptive is not None:
            state["adaptive"] = self._adaptive.state_dict()
        if self._ranks is not None:
            state["rank_buffers"] = self._ranks.buffers
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a captured state."""
        states.load_model(self.model, state["model"])
        states.load_optimizer(self.optimizer, self._form.for_optimizer(state["optimizer"]))
        self._updater.load(state)
        for name, value in self._objects.items():
            if name in state["objects"]:
                value.load_state_dict(state["objects"][name])
        self._pending_loaders = dict(state["loaders"])
        for name, loader in self._loaders.items():
            if name in self._pending_loaders:
                loader.load(self._pending_loaders.pop(name))
        if self._adaptive is not None and "adaptive" in state:
            self._adaptive.load_state_dict(state["adaptive"])
        self.epoch, self.steps = int(state["epoch"]), int(state["steps"])
        if "loss" in state:  # checkpoints of earlier versions have none
            self._loss.load_state_dict(state["loss"])
        if self._ranks is not None:
            self._ranks.restore(state["rank_buffers"])
        self._flat.clear()

    def steady(self) -> dict[str, Tensor]:
        """The tensors of the captured state that change only in the optimizer's step; buffers do not."""
        parameters = dict(self.model.named_parameters())
        state = {"model": parameters, "optimizer": self.optimizer.state_dict()}
        return statetree.split(self._form.local(state))[1]

    def optimized(self) -> Optimized | None:
        """What the optimizer changes, for newcomers that make its steps by themselves."""
        if self._form.sharded:
            return None
        return Optimized(dict(self.model.named_parameters()), self.optimizer)

    def found(self) -> None:
        """Begin without live state: from the newest checkpoint, or from what the script built."""
        if self._rehearsed:
            os._exit(RESPAWN)  # the rehearsal for another position has changed this worker's weights
        self.epoch = 0
        state = self._keeper.load(self._form.targets)
        if state is not None:
            self.restore(self._form.local(state))
            self._crew.operation = int(state["operation"])
