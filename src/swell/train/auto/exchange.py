"""The gradients of a batch, averaged over the workers, and what the workers tell each other with them."""

from __future__ import annotations

import math

from swell.train.auto import confinement, layout
from swell.train.auto.agreement import Agreement
from swell.train.auto.dividing import TOGETHER, Dividing
from swell.train.auto.fingerprint import Fingerprint
from swell.train.auto.giving_way import give_way
from swell.train.auto.job import ALONE, ScriptJob
from swell.train.auto.loss import Loss
from swell.train.auto.passes import Drawn
from swell.train.auto.place import END, leave, place, stop_with_the_leader
from swell.train.auto.position import Position
from swell.train.auto.reduction import NEITHER
from swell.train.auto.run import ScriptRun
from swell.train.auto.trained import Trained
from swell.train.data import plan
from swell.train.data.plan import Tree
from swell.train.sync.mesh import Header
from swell.train.sync.reducer import Reduced

_OF_LOSS = 10.0
"""A loss is so many times less exact than what a model is given."""


class Exchange:
    """Averages the gradients of the current batch over all workers that have a part of it."""

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

    def average(self, job: ScriptJob) -> None:
        """Average the gradients of the current batch."""
        current = self._position.current
        drawn, alone = current[0] if current else None, job.world == 1
        if self._loss.reduction.kind == TOGETHER and (self._dividing.scale or not alone):
            self._average_together(drawn, job)
            return
        if alone and drawn is not None and drawn.is_whole:  # nothing to exchange, and nobody to agree with
            self.last = ALONE
            loss = self._loss.read(drawn, job.steps)
            if loss is not None and math.isfinite(loss):
                job.add_loss(loss)
            return
        header, size = self._header(drawn, job)
        unfrozen = not alone and layout.trains_others(job, job.optimizer)
        if unfrozen and job.rank:  # joins again, with a layout that has what is trained now
            give_way(self._run.link, "layers were unfrozen", steps=job.steps, counts=False)
        if drawn is not None and not drawn.samples and alone:
            job.rescale(0.0)  # samples that this worker had drawn before it came to the job's position
        headers = self._sum(header, size, job)
        if headers[0]["at"] == END:
            stop_with_the_leader(self._run, job)
        if unfrozen:
            self._trained.lay_out(job)
        going = _going(headers)
        if going and (going[0]["at"], going[0]["steps"]) != (header["at"], header["steps"]):
            give_way(self._run.link, _elsewhere(header, going[0]), steps=job.steps)
        loss = self._loss.of_all(going)
        if loss is not None:
            job.add_loss(loss)
        if going and drawn is not None:
            self._make_up(drawn, going, job, weighted=not alone)
        self._fingerprint.take(job, headers)

    def _average_together(self, drawn: Drawn | None, job: ScriptJob) -> None:
        """Average the gradients of a batch that all workers have, and whose model calls were divided."""
        dividing = self._dividing
        unfrozen = job.world > 1 and layout.trains_others(job, job.optimizer)
        if unfrozen and job.rank:  # joins again, with a layout that has what is trained now
            give_way(self._run.link, "layers were unfrozen", steps=job.steps, counts=False)
        loss = None if drawn is None else self._loss.read(drawn, job.steps)
        given = list(dividing.given)
        if loss is not None and self._position.by_hand() is not None:
            given.append([loss, _OF_LOSS * abs(loss), 1])  # targets that differ, the model is not given
        header = place(job, self._position, "step")
        header |= {"n": 1, "divided": bool(dividing.scale), "given": given}
        self._fingerprint.tell(job, header)
        self._run.randomness.tell(header)
        self._agreement.withdraw()  # with an earlier batch of this step, which was not its last one after all
        may_change = job.world > 1 and self._agreement.may_change()

        def check(headers: list[Header]) -> None:
            leave(self._run, job, headers)

        if dividing.scale or unfrozen:
            self.last = job.average_together(
                header,
                lambda: dividing.scale or job.world,
                dividing.settle,
                check,
                may_change=may_change,
            )
            headers = self.last.headers
        else:  # all computed the same
            header["candidate"] = job.offer() if may_change else 0
            headers = job.share(header, check)
            self.last = Reduced(headers, 0.0, 0.0)
        dividing.done()
        self._agreement.settle(header["candidate"], headers)
        if unfrozen:
            self._trained.lay_out(job)
        if drawn is not None:
            if loss is not None and math.isfinite(loss):
                job.add_loss(loss)
            drawn.undivided = dividing.tried or bool(job.confined)
        dividing.batch_computed()
        self._run.randomness.take(headers)
        self._fingerprint.take(job, headers)

    def end_together(self, job: ScriptJob) -> None:
        """Let all members come to the end; one that is there alone is at another place than the job."""
        header: Header = {
            "what": "step",
            "doing": "end",
            "n": 0,
            "at": END,
            "part": [0, 0],
            "steps": job.steps,
        }
        if not job.end_together({**header, "candidate": 0, "unused": []}, _tree):
            give_way(self._run.link, "its script came to its end before the others'", steps=job.steps)

    def _header(self, drawn: Drawn | None, job: ScriptJob) -> tuple[Header, int]:
        """What this worker tells the others of the batch, and how many samples the whole batch has."""
        header: Header
        if drawn is None:  # no data in it: all workers computed the same
            header = {"what": "step", "n": 1, "at": [-1, 0], "part": [0, 0]}
            size = job.world
        else:
            at, part = [drawn.ordinal, drawn.index], list(drawn.part)
            header = {"what": "step", "n": drawn.samples, "at": at, "part": part}
            size = len(drawn.window)
            self._loss.tell(drawn, header, job.steps)
        header["steps"] = job.steps
        return header, size

    def _sum(self, header: Header, size: int, job: ScriptJob) -> list[Header]:
        """Add the gradients up, weighted by samples; returns what all workers told."""
        weight = header["n"] / size if size else 0.0
        self._agreement.withdraw()  # with an earlier batch of this step, which was not its last one after all
        may_change = job.world > 1 and self._agreement.may_change()
        self._fingerprint.tell(job, header)
        self._run.randomness.tell(header)
        self.last = job.average(header, weight, _tree, may_change=may_change)
        headers = self.last.headers
        self._run.randomness.take(headers)
        self._agreement.settle(header["candidate"], headers)
        self._loss.reduction.hear(headers)
        if self._loss.reduction.kind == NEITHER and not job.confined:
            confinement.confine(self._run, job, confinement.LOSS)
        return headers

    def _make_up(self, drawn: Drawn, going: list[Header], job: ScriptJob, *, weighted: bool) -> None:
        """Make up for samples that no worker has computed: one of those that had them is gone."""
        total = sum(h["n"] for h in going)
        full = max(int(h.get("size", len(drawn.window))) for h in going)
        if total != full and weighted:  # a single worker's mean over its samples was not
            job.rescale(full / total)
        gaps = plan.missing(full, [(h["part"][0], h["part"][1]) for h in going])
        if gaps and drawn.window:
            self._position.give_back(drawn, gaps)


def _elsewhere(mine: Header, theirs: Header) -> str:
    """Where this worker's script is, and where the others' are."""
    if mine["at"] == theirs["at"]:
        return f"its script is at step {mine['steps']} and the others' at step {theirs['steps']}"
    here, there = (f"batch {h['at'][1]} of pass {h['at'][0]}" for h in (mine, theirs))
    return f"its script is at {here} and the others' at {there}"


def _going(headers: list[Header]) -> list[Header]:
    """Headers of the members with samples that are where the leader is, or furthest if it has none."""
    usable = [h for h in headers if h["n"] and h["steps"] == headers[0]["steps"]]
    where = headers[0]["at"] if headers[0]["n"] else max((h["at"] for h in usable), default=None)
    return [h for h in usable if h["at"] == where]


def _tree(headers: list[Header]) -> Tree | None:
    going = _going(headers)
    return plan.balanced([rank for rank, h in enumerate(headers) if any(h is g for g in going)])
