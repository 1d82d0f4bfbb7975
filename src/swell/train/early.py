"""Early sums: the exchange of a step begins while its last backward still computes gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swell.train.data.loader import Share
from swell.train.data.plan import Tree
from swell.train.learner import Learner
from swell.train.shares import Shares
from swell.train.sync.generation import Crew
from swell.train.sync.mesh import Header, Mesh
from swell.train.sync.pieces import Norms
from swell.train.sync.reducer import Reduction


@dataclass(slots=True)
class Early:
    """A sum that began during backward."""

    reduction: Reduction
    mesh: Mesh
    began_s: float


class EarlySums:
    """Watches a worker's backward passes, and begins a step's sum in its last one where that is possible."""

    def __init__(self, learner: Learner, crew: Crew, shares: Shares) -> None:
        self._learner = learner
        self._crew = crew
        self._shares = shares
        self._begun: Early | None = None
        self._rehearsing = False
        """True in a backward whose gradients count for nothing."""
        self._fired: list[int] | None = None
        """In the first backward that is watched: the parameters whose gradients came, in order."""
        self._fires_once: bool | None = None
        """Whether backward computed each gradient in one go; layers that are computed again break that."""

    def rehearse(self) -> None:
        """Before a backward of a rehearsal: watch it, so that the first real sum can begin early."""
        if self._fires_once is None and self._learner.flat.device.type == "cpu":
            self._learner.flat.watch(self._on_gradient)
            self._rehearsing, self._fired = True, []

    def prepare(self, share: Share, *, last: bool) -> bool:
        """Before a backward: have gradients taken as they come. True if the sum can begin: `last` says that
        no other gradients of this batch come afterwards."""
        wanted, flat = self._crew.reducer.early_now, self._learner.flat
        self._rehearsing = False
        if wanted != flat.watched:
            flat.watch(self._on_gradient if wanted else None)
        if not wanted or not last:
            return False
        if share.pending or len(self._shares.drawn) > 1 or self._shares.drawn[0].streaming:
            return False
        if self._fires_once is None:  # see first that backward computes each gradient in one go
            self._fired = []
        return bool(self._fires_once)

    def begin(self, header: Header, tree: Callable[[list[Header]], Tree | None], norms: Norms | None) -> None:
        """Begin the sum of a step whose last backward is about to run."""
        began_s = time.perf_counter()
        reduction = self._crew.begin(header, tree, norms=norms)
        self._begun = Early(reduction, self._crew.mesh, began_s)

    def after_backward(self) -> None:
        """Of the first backward that was watched, note whether it computed each gradient in one go."""
        if self._fired is not None:
            self._fires_once, self._fired = len(self._fired) == len(set(self._fired)), None

    def take(self) -> Early | None:
        """The sum that began during the step's last backward, if one did."""
        begun, self._begun = self._begun, None
        return begun

    def _on_gradient(self, index: int) -> None:
        """In backward: the gradient of a parameter is complete."""
        if self._fired is not None:
            self._fired.append(index)
        if self._rehearsing:
            return
        reduction = self._begun.reduction if self._begun is not None else None
        if self._learner.ranks is None:
            if self._learner.flat.keep(index) and reduction is not None:
                reduction.ready(index)
        elif reduction is not None:
            self._learner.sums.finish(index)
            reduction.ready(index)
