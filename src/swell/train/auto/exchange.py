"""The gradients of a batch, averaged over the workers, and what the workers tell each other with them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from swell.train.auto import layout
from swell.train.auto.agreement import Agreement
from swell.train.auto.dividing import Dividing
from swell.train.auto.fingerprint import Fingerprint
from swell.train.auto.giving_way import give_way
from swell.train.auto.job import ALONE, ScriptJob
from swell.train.auto.place import END, leave, place
from swell.train.auto.position import Position
from swell.train.auto.run import ScriptRun
from swell.train.auto.trained import Trained
from swell.train.sync.mesh import Header
from swell.train.sync.reducer import Reduced

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
        unfrozen = job.world > 1 and layout.trains_others(job, job.optimizer)
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
