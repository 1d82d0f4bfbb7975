"""The state of a job: what newcomers receive and checkpoints hold, and how a job begins without any."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from swell.train.agent.errors import RESPAWN, UsageError
from swell.train.data.loader import ElasticLoader
from swell.train.learner import Learner
from swell.train.progress import Progress
from swell.train.state import statetree
from swell.train.state.keeper import Keeper
from swell.train.sync.level import Optimized
from swell.train.sync.memory import load_model, load_optimizer, model_tensors


class TrainingState:
    """Everything that must be the same on all members; the `Carrier` of a crew."""

    def __init__(self, learner: Learner, progress: Progress, keeper: Keeper) -> None:
        self._learner = learner
        self._progress = progress
        self._keeper = keeper
        self.loaders: dict[str, ElasticLoader] = {}
        self._objects: dict[str, Any] = {}
        """What the script gave to `register`."""
        self._positions: dict[str, Any] = {}
        """By name: the positions of loaders that the script has not made yet."""

    def add(self, loader: ElasticLoader) -> None:
        """Have the position of a loader travel, and take over the one that it had, if any."""
        self.loaders[loader.name] = loader
        if loader.name in self._positions:
            loader.load(self._positions.pop(loader.name))

    def free_name(self, name: str | None) -> str:
        """The name of a new loader; UsageError if another one has it."""
        name = name or f"loader{len(self.loaders)}"
        if name in self.loaders:
            raise UsageError(f"name: there are two loaders called {name!r}; give each its own")
        return name

    def register(self, name: str, value: Any) -> None:
        """Have anything with state_dict and load_state_dict travel."""
        if name in self._objects:
            raise UsageError(f"name: there are two objects called {name!r}; give each its own")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise UsageError(f"{name}: a {type(value).__name__} has no {method}(), so it cannot travel")
        self._objects[name] = value

    def close(self) -> None:
        """End the loaders' processes and threads."""
        for loader in self.loaders.values():
            loader.close()

    def capture(self) -> dict[str, Any]:
        """The whole state; tensors are live ones, not copies, and sharded ones as this worker has them."""
        return self._learner.form.local(self.all())

    def gathered(self, *, keep: bool) -> dict[str, Any]:
        """The state with whole tensors, where `keep`; all workers of a replica must call this together."""
        return self._learner.form.gathered(self.all(), keep=keep)

    def all(self) -> dict[str, Any]:
        """The state as the model and the optimizer hold it."""
        learner, progress = self._learner, self._progress
        state: dict[str, Any] = {
            "model": model_tensors(learner.model),
            "optimizer": learner.optimizer.state_dict(),
            "objects": {name: value.state_dict() for name, value in self._objects.items()},
            "loaders": {name: ld.state() for name, ld in self.loaders.items()} | self._positions,
            "epoch": progress.epoch,
            "steps": progress.steps,
            "loss": progress.loss.state_dict(),
        }
        state |= learner.updater.state()
        if learner.adaptive is not None:
            state["adaptive"] = learner.adaptive.state_dict()
        if learner.ranks is not None:
            state["rank_buffers"] = learner.ranks.buffers
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a captured state."""
        learner, progress = self._learner, self._progress
        load_model(learner.model, state["model"])
        load_optimizer(learner.optimizer, learner.form.for_optimizer(state["optimizer"]))
        learner.updater.load(state)
        for name, value in self._objects.items():
            if name in state["objects"]:
                value.load_state_dict(state["objects"][name])
        self._positions = dict(state["loaders"])
        for name, loader in self.loaders.items():
            if name in self._positions:
                loader.load(self._positions.pop(name))
        if learner.adaptive is not None and "adaptive" in state:
            learner.adaptive.load_state_dict(state["adaptive"])
        progress.epoch, progress.steps = int(state["epoch"]), int(state["steps"])
        if "loss" in state:  # checkpoints of earlier versions have none
            progress.loss.load_state_dict(state["loss"])
        if learner.ranks is not None:
            learner.ranks.restore(state["rank_buffers"])
        learner.flat.clear()

    def steady(self) -> dict[str, Tensor]:
        """The tensors of the captured state that change only in the optimizer's step; buffers do not."""
        parameters = dict(self._learner.model.named_parameters())
        state = {"model": parameters, "optimizer": self._learner.optimizer.state_dict()}
        return statetree.split(self._learner.form.local(state))[1]

    def optimized(self) -> Optimized | None:
        """What the optimizer changes, for newcomers that make its steps by themselves."""
        if self._learner.form.sharded:
            return None
        return Optimized(dict(self._learner.model.named_parameters()), self._learner.optimizer)

    def found(self) -> int:
        """Begin without live state: from the newest checkpoint, or from what the script built. Returns the
        number of the job's next operation."""
        if self._learner.rehearsed:
            os._exit(RESPAWN)  # the rehearsal for another position has changed this worker's weights
        self._progress.epoch = 0
        state = self._keeper.load(self._learner.form.targets)
        if state is None:
            return 0
        self.restore(self._learner.form.local(state))
        return int(state["operation"])
