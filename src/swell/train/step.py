"""One step of all workers: each computes its part, the parts are summed, and all update or none does.

`batches` hands out this worker's part, `backward` adds its gradients, `commit` sums them with those of the
other workers and updates. See docs/how/runtime.md ("The story of a step").
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from swell.train import reporting
from swell.train.agent.errors import OutOfStep, PeerLost, UsageError
from swell.train.data import plan
from swell.train.data.loader import ElasticLoader, Share
from swell.train.data.plan import Tree
from swell.train.data.room import Room
from swell.train.learner import Learner, Loss
from swell.train.replicas import cutting
from swell.train.reporting import Progress, Reporter
from swell.train.shares import Shares
from swell.train.sync.generation import Crew
from swell.train.sync.mesh import Header, Mesh
from swell.train.sync.pieces import Norms
from swell.train.sync.reducer import Reduced, Reduction
from swell.train.worker import Member, Saver, Stage

log = logging.getLogger(__name__)

GPU_LOSS_EVERY = 10
"""On a GPU the job's loss is read in one of this many steps."""


class Stepper:
    """Makes the steps of one worker, together with the other members."""

    def __init__(
        self,
        learner: Learner,
        progress: Progress,
        crew: Crew,
        shares: Shares,
        member: Member,
        saver: Saver,
        reporter: Reporter,
        room: Room | None,
    ) -> None:
        self._learner = learner
        self._progress = progress
        self._crew = crew
        self._shares = shares
        self._member = member
        self._saver = saver
        self._reporter = reporter
        self._room = room
        self._early = EarlySums(learner, crew, shares)

    @property
    def mode(self) -> str:
        """The batch mode of the job."""
        return self._learner.mode

    def enough(self) -> bool:
        """Whether training is over, even in the middle of a pass; the same on every worker."""
        adaptive = self._learner.adaptive
        return self._progress.reached or (adaptive is not None and adaptive.enough())

    def backward(self, loss: Loss, *, last: bool = False) -> None:
        """Add this batch's gradients; `last`: no other gradients of this batch come afterwards."""
        if not self._shares.drawn:
            raise UsageError(
                "job.step: no batch was drawn since the last step. Iterate a loader made by job.loader(...), "
                "and call job.step once for each batch"
            )
        learner, share = self._learner, self._shares.drawn[0].share
        if self._member.rehearsing or share is None or share.current is None:
            weighted = learner.updater.weighted(loss, 1.0)
            if last and self._member.rehearsing and len(weighted) == 1:
                self._early.rehearse()
            learner.updater.descend(weighted)
            self._early.after_backward()
            self._settled()
            return
        rank, (low, high) = share.current
        try:
            weighted = learner.updater.weighted(loss, (high - low) / share.size)
            if self._needs_loss:
                part = sum(one.detach() for one in weighted)
                share.loss = part if share.loss is None else share.loss + part
            if self._early.prepare(share, last=last and len(weighted) == 1):
                header, norms = self._header(share, share.samples + high - low)
                self._early.begin(header, self._tree(share.size), norms)
            learner.updater.descend(weighted)
        except torch.OutOfMemoryError:
            several = len(self._shares.drawn) > 1 or learner.replica.size > 1
            if learner.ranks is not None or several or high - low == 1:
                raise
            self._cut(self._shares.drawn[0], high - low)
            return
        self._early.after_backward()
        self._settled()
        if learner.ranks is not None:
            learner.ranks.end(rank)
            learner.sums.after(rank)
        self._shares.cover()
        adaptive = learner.adaptive
        if adaptive is not None and self._crew.size == 1 and len(share.covered) == 1 and share.pending:
            adaptive.after_backward(share.samples)

    @property
    def _needs_loss(self) -> bool:
        """Whether to read this step's loss: on a GPU only in some steps, because reading makes it wait."""
        return self._learner.flat.device.type == "cpu" or self._progress.steps % GPU_LOSS_EVERY == 0

    def commit(self) -> bool:
        """The second half of `step`: if this worker's part is complete, sum with the others and update."""
        if self._member.rehearsing:
            self._rehearse_update()
            return False
        return self._sync() if self._shares.complete() else False

    def _cut(self, loader: ElasticLoader, samples: int) -> None:
        """Compute this worker's part again in smaller pieces, because `samples` at once did not fit."""
        adaptive = self._learner.adaptive
        limit = adaptive.out_of_memory(samples) if adaptive is not None else samples // 2
        log.warning("a batch of %d does not fit the memory; going on with %d at once", samples, limit)
        self._settled()
        self._learner.flat.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        loader.micro_batch = limit
        self._shares.begin_again(loader)

    def batches(self, loader: ElasticLoader) -> Iterator[Any]:
        """This worker's batches of a pass over a loader, step by step."""
        member, crew = self._member, self._crew
        member.enter()
        if not loader.train:
            batches = _evaluated(loader, crew.rank, crew.size, self._learner.replica.size)
            for indices in batches[:1] if member.rehearsing else batches:
                yield loader.fetch(indices)
            return
        if member.rehearsing and not self._learner.rehearsed:
            self._shares.drawn = [loader]
            self._try(loader.rehearsal_samples)
            yield loader.rehearsal()
            self._learner.rehearsed = True
        if member.rehearsing and not member.join():
            return
        loader.begin()
        while True:
            member.between_steps()
            share = self._shares.draw(loader, crew.rank, crew.size)
            if share is None:
                return
            if not share.pending:  # this worker has no samples (left) in this step, but takes part
                self._sync()
                continue
            rank, _ = share.take()
            batch = loader.batch(share)
            if batch is None:  # a stream that has nothing for this worker right now
                continue
            if self._learner.ranks is not None:
                self._learner.ranks.begin(rank, self._progress.steps)
            assert share.current is not None
            self._try(share.current[1][1] - share.current[1][0])
            yield batch

    def _try(self, samples: int) -> None:
        """Note that the script gets a batch of that size, which may not fit."""
        if self._room is not None and self._learner.ranks is None:
            self._room.trying(samples)

    def _settled(self) -> None:
        """Note that the batch was computed, or that it did not fit."""
        if self._room is not None:
            self._room.settled()

    def _header(self, share: Share, samples: int) -> tuple[Header, Norms | None]:
        """This worker's part of the step for the others, and how norms are taken in the sum."""
        header: Header = {"what": "step", "n": samples, "candidate": self._member.offer()}
        self._saver.due_with(header)
        if share.loss is not None and math.isfinite(loss := float(share.loss)):
            header["loss"] = loss
        streams = {ld.name: ld.header() for ld in self._shares.drawn if ld.streaming}
        if streams:
            header["streams"] = streams
        adaptive = self._learner.adaptive
        if adaptive is None:
            return header, None
        return header | adaptive.header(self._crew.mesh.number), adaptive.norms

    def _gather(self, share: Share) -> Header:
        """Complete this worker's input of the sum; returns what only that shows."""
        learner, crew = self._learner, self._crew
        if learner.ranks is not None:
            block = range(*plan.blocks(learner.logical, crew.size)[crew.rank])
            learner.flat.gather_ranks(learner.ranks.after_step(block, share.ranks))
        elif share.covered and (unused := learner.flat.gather(share.samples / share.size)):
            return {"unused": unused}
        return {}

    def _sync(self) -> bool:
        """Sum the gradients over all members and commit; False if a death means that samples come again."""
        share = self._shares.drawn[0].share
        assert share is not None
        early = self._early.take()
        mesh, alone = self._crew.mesh, self._crew.size == 1
        try:
            if early is not None:
                header, mesh = early.reduction.header, early.mesh
                early.reduction.complete(self._gather(share))
                reduced = early.reduction.result()
                reduced.began_s = early.began_s
            else:
                header, norms = self._header(share, share.samples)
                if alone and not mesh.broken:
                    reduced = Reduced([header], 0.0, 0.0)
                else:
                    header |= {} if alone else self._gather(share)
                    reduced = self._crew.all_reduce(header, self._tree(share.size), norms=norms)
        except (PeerLost, OutOfStep) as error:
            if not self._member.recover(error):
                return False
            reduced = self._crew.held_sum()
        offered, same = header["candidate"], mesh is self._crew.mesh
        change = self._member.agreed_on(offered, reduced.headers, same_generation=same)
        self._commit(reduced, alone)
        self._member.after_step(offered, change)
        return True

    def _tree(self, size: int) -> Callable[[list[Header]], Tree | None]:
        if self._learner.ranks is not None:
            return lambda headers: plan.worker_tree(self._learner.logical, len(headers), size)
        return lambda headers: cutting.tree(
            [h["n"] for h in headers], self._learner.replica.size, self._crew.rank
        )

    def _commit(self, reduced: Reduced, alone: bool) -> None:
        """Update by the summed gradients; the step is complete then, for all members or for none."""
        learner, adaptive, headers = self._learner, self._learner.adaptive, reduced.headers
        streams = [ld for ld in self._shares.drawn if ld.streaming]
        if streams and not self._rescale(headers, alone):  # no worker had a sample: only shards are leased
            _hand_out(streams, headers)
            self._learner.flat.clear()
            self._shares.commit()
            self._crew.completed()
            return
        share, loader = self._shares.drawn[0].share, self._shares.drawn[0]
        if not alone:
            learner.adopt(headers)
        elif learner.ranks is not None:
            learner.flat.adopt_inputs()
            learner.ranks.commit(share.ranks if share is not None else [])
        if adaptive is not None:
            unscale = learner.updater.scale**-2
            adaptive.commit(reduced, alone=alone, nodes=self._crew.nodes, unscale=unscale)
        learner.update()
        learner.flat.clear()
        if share is not None and (loss := reporting.step_loss(headers, share.size)) is not None:
            self._progress.loss.add(loss)
        _hand_out(streams, headers)
        self._shares.commit()
        self._crew.completed()
        self._progress.steps += 1
        if learner.updater.step_scheduler == "step":
            learner.updater.tick(self._progress.steps if adaptive is None else adaptive.steps_worth)
        if learner.ranks is not None:
            learner.ranks.between(self._progress.steps)
        step_s = self._reporter.after_step(reduced, loader)
        if adaptive is not None and share is not None:
            adaptive.follow()
            adaptive.observe(step_s, reduced.sync_s, share.samples, len(share.covered))
        self._saver.save_if_due(headers)

    def _rescale(self, headers: list[Header], alone: bool) -> bool:
        """Make the sum a mean over the samples that workers really had; False if there were none."""
        share = self._shares.drawn[0].share
        total = sum(h["n"] for h in headers)
        if share is not None and total not in (0, share.size):
            vectors = [p.grad for p in self._learner.flat.parameters.values() if p.grad is not None]
            torch._foreach_mul_(vectors if alone else self._learner.flat.outputs, share.size / total)
        return total > 0

    def share(self, header: Header) -> list[Header]:
        """Exchange headers with all members and return all of them, even if a member dies meanwhile."""
        if self._member.stage in (Stage.NEW, Stage.REHEARSING):
            return [header]
        while True:
            headers = self._member.survive(lambda: self._crew.share(header), self._crew.held_headers)
            if headers is not None:
                self._crew.completed()
                return headers

    def _rehearse_update(self) -> None:
        """Build the optimizer's state with a step; the state that arrives later overwrites the weights."""
        with contextlib.suppress(RuntimeError):
            self._learner.update()
        self._learner.flat.clear()
        self._shares.drawn = []


def _evaluated(loader: ElasticLoader, rank: int, world: int, workers: int) -> list[list[int]]:
    """A worker's batches of a pass without training; `workers`: those of a replica."""
    try:
        cut = cutting.evaluation(len(loader.dataset), loader.batch_size, rank, world, workers)
    except ValueError as error:
        raise UsageError(f"dataset of loader {loader.name!r}: {error}") from None
    return loader.evaluation(cut)


def _hand_out(streams: list[ElasticLoader], headers: list[Header]) -> None:
    """Tell the streams of this step which samples all workers used."""
    for loader in streams:
        loader.committed_by([h["streams"][loader.name] for h in headers])


# ---------------------------------------------------------------------- early sums
# Early sums: the exchange of a step begins while its last backward still computes gradients.


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
        """Note whether the first watched backward computed each gradient in one go."""
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
