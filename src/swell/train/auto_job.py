"""The job behind an unmodified script: `Job` with the loop turned inside out.

`Job` owns the loop and calls the optimizer; here the script does, and `auto` tells the job what it did. The
crew, generations, recovery, state and checkpoints are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swell.train import reporting
from swell.train.errors import PeerLost
from swell.train.job import Job
from swell.train.link import Link
from swell.train.mesh import Header
from swell.train.plan import Tree
from swell.train.reducer import Reduced
from swell.train.state import _cloned as cloned


class Script(Protocol):
    """What the job needs to know of the script."""

    def is_at(self, state: dict[str, Any], steps: int) -> bool:
        """Whether it stands where `state` was captured, after that many steps."""

    def capture(self) -> dict[str, Any]:
        """Its position and variables."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `capture` gave."""


class ScriptJob(Job):
    """A job whose loop belongs to somebody else: its state includes where the script is."""

    def __init__(
        self, script: Script, model: nn.Module, optimizer: torch.optim.Optimizer, link: Link, seed: int
    ) -> None:
        super().__init__(model, optimizer, seed=seed, link=link)
        self._script = script
        self.later: dict[str, Any] | None = None
        """A state this worker has received and will take over when its script has come there."""

    @property
    def forwarding(self) -> bool:
        """This worker's script is not yet where the job is."""
        return self._rehearsing or self.later is not None

    def capture(self) -> dict[str, Any]:
        """As for any job, with the script's position and variables."""
        if self.later is not None:
            return self.later
        return super().capture() | {"script": self._script.capture()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state over now, or keep it until the script has come to its position."""
        if self._script.is_at(state["script"], int(state["steps"])):
            self.arrive(state)
        else:
            self.later = cloned(state)
            self.epoch, self.steps = int(state["epoch"]), int(state["steps"])

    def arrive(self, state: dict[str, Any]) -> None:
        """The script is where `state` was taken."""
        self.later = None
        super().restore(state)
        self._script.restore(state["script"])

    def begin(self) -> bool:
        """Become part of the job; False if it is under way, so that the script has to catch up first."""
        assert self._link is not None
        welcome = self._link.welcome()
        self.epoch = int(welcome["epoch"])
        self._rehearsing = bool(welcome["live"])
        return not self._rehearsing and self.join()

    def join(self) -> bool:
        """Wait to be taken in. False: the job is in another pass by now."""
        if self._join():
            return True
        assert self._turned is not None
        self.epoch, self._turned = self._turned, None
        return False

    def average(self, header: Header, weight: float, tree: Callable[[list[Header]], Tree | None]) -> Reduced:
        """Make this worker's gradients (and buffers) the weighted sum of everybody's."""
        header["candidate"] = self._offer()
        if self.world == 1:
            return Reduced([header], 0.0, 0.0)
        if weight:
            gradients = [p.grad for p in self._flat.parameters.values() if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, weight)
            header["unused"] = self._flat.gather(weight)
        while True:
            try:
                reduced = self._crew.all_reduce(header, tree, squares=False)
            except PeerLost:
                header["candidate"] = 0  # what was offered belonged to a generation that is no more
                if not self._recover():
                    continue  # what went in is still there: sum again, without whoever is gone
                assert self._crew.reducer.result is not None
                reduced = self._crew.reducer.result
                reduced.headers = [{**h, "candidate": 0} for h in reduced.headers]
            break
        silent = [set(h["unused"]) for h in reduced.headers if h["n"]]
        self._flat.adopt(set.intersection(*silent) if silent else set())
        self._crew.completed()
        return reduced

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Multiply gradients and buffers, when not all samples of the batch are in."""
        tensors = [p.grad for p in self._flat.parameters.values() if p.grad is not None]
        tensors += list(self._flat.buffers.values())
        if tensors:
            torch._foreach_mul_(tensors, factor)

    def stepped(self, reduced: Reduced, batch_size: int) -> None:
        """The script's optimizer has stepped on a batch of that size."""
        self.steps += 1
        step_s = self._report(reduced)
        if self._link is not None:
            self._pace.add((self._crew.mesh.number, batch_size), step_s, reduced.sync_s)
            self._link.report |= reporting.timing(self._pace, batch_size, None, self.world, self._crew.nodes)
            self._link.report["of"] = None  # how long the script goes on, only the script knows

    def boundary(self, agreed: int) -> None:
        """Between two steps, at rest: save, and go to another generation if all agreed to."""
        self._save_if_due()
        if agreed:
            self._switch(agreed)

    def parameters(self) -> list[Tensor]:
        """What is trained together."""
        return list(self._flat.parameters.values())
