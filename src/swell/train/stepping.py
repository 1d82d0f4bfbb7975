"""One step of all workers: each computes its part, the parts are summed, and all update or none does.

`_run_loader` hands out this worker's part, `backward` adds its gradients, `_sync` sums them with those of the
other workers, `_commit` updates. See docs/runtime.md ("The story of a step").
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

from swell.train import heartbeat, reporting
from swell.train.agent.errors import OutOfStep, PeerLost, UsageError
from swell.train.data import plan
from swell.train.data.loader import ElasticLoader, Share
from swell.train.data.plan import Tree
from swell.train.data.room import Room
from swell.train.member import Member
from swell.train.modes.ranks import PartialSums
from swell.train.replicas import cutting
from swell.train.sync.adding import Norms
from swell.train.sync.mesh import Header, Mesh
from swell.train.sync.reduction import Reduced, Reduction
from swell.train.updating import Loss, Updater

log = logging.getLogger(__name__)

GPU_LOSS_EVERY = 10
"""On a GPU the job's loss is read in one of this many steps."""


@dataclass(slots=True)
class Early:
    """A sum that began during backward."""

    reduction: Reduction
    mesh: Mesh
    began_s: float


class Stepper(Member):
    """A member that trains; `Job` sets the fields."""

    optimizer: torch.optim.Optimizer
    mode: str
    _updater: Updater
    _by: str
    _logical: int
    _sums: PartialSums
    _room: Room | None
    _metrics: dict[str, float]
    _last_commit_s: float
    _pace: reporting.Pace
    _epochs: int | None
    _loss: reporting.SmoothedLoss
    _until_loss: float | None
    _early: Early | None = None
    """The sum that began during this step's last backward."""
    _fired: list[int] | None = None
    """In the first backward that is watched: the parameters whose gradients came, in order."""
    _fires_once: bool | None = None
    """Whether backward computed each gradient in one go; with layers that it computes again it may not."""
    _total_steps: int | None = None
    """The length of a job that trains by steps (`job.loop`)."""

    def enough(self) -> bool:
        """Whether training is over, even in the middle of a pass; the same on every worker."""
        if self._until_loss is not None and self._loss.reached(self._until_loss):
            return True
        return self._adaptive is not None and self._adaptive.enough()

    def backward(self, loss: Loss) -> None:
        """The first half of `step`: add this batch's gradients."""
        self._backward(loss, early=False)

    def _backward(self, loss: Loss, *, early: bool) -> None:
        """Add this batch's gradients; with `early`, no other gradients of this batch come afterwards."""
        if not self._shares.drawn:
            raise UsageError(
                "job.step: no batch was drawn since the last step. Iterate a loader made by job.loader(...), "
                "and call job.step once for each batch"
            )
        share = self._shares.drawn[0].share
        if self._rehearsing or share is None or share.current is None:
            weighted = self._updater.weighted(loss, 1.0)
            unseen = self._fires_once is None and self._flat.device.type == "cpu"
            if early and self._rehearsing and unseen and len(weighted) == 1:
                self._flat.watch(self._on_gradient)  # so that the first real sum can begin early
                self._fired = []
            self._updater.descend(weighted)
            self._see_fired()
            if self._room is not None:
                self._room.settled()
            return
        rank, (low, high) = share.current
        try:
            weighted = self._updater.weighted(loss, (high - low) / share.size)
            if self._asks_loss:
                part = sum(one.detach() for one in weighted)
                share.loss = part if share.loss is None else share.loss + part
            self._watch(share, high - low, early and len(weighted) == 1)
            self._updater.descend(weighted)
        except torch.OutOfMemoryError:
            several = len(self._shares.drawn) > 1 or self._replica.size > 1
            if self._ranks is not None or several or high - low == 1:
                raise
            self._cut(self._shares.drawn[0], high - low)
            return
        self._see_fired()
        if self._room is not None:
            self._room.settled()
        if self._ranks is not None:
            self._ranks.end(rank)
            self._sums.after(rank)
        self._shares.cover()
        if self._adaptive is not None and self._crew.size == 1 and len(share.covered) == 1 and share.pending:
            self._adaptive.after_backward(share.samples)

    @property
    def _asks_loss(self) -> bool:
        """Whether to read this step's loss: on a GPU only in some steps, because reading makes it wait."""
        return self._flat.device.type == "cpu" or self.steps % GPU_LOSS_EVERY == 0

    def commit(self) -> bool:
        """The second half of `step`: if this worker's part is complete, sum with the others and update."""
        if self._rehearsing:
            self._rehearse_update()
            return False
        return self._sync() if self._shares.complete() else False

    def _cut(self, loader: ElasticLoader, samples: int) -> None:
        """Compute this worker's part again in smaller pieces, because `samples` at once did not fit."""
        limit = self._adaptive.out_of_memory(samples) if self._adaptive is not None else samples // 2
        log.warning("a batch of %d does not fit the memory; going on with %d at once", samples, limit)
        if self._room is not None:
            self._room.settled()
        self._flat.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        loader.micro_batch = limit
        self._shares.begin_again(loader)

    def _run_loader(self, loader: ElasticLoader) -> Iterator[Any]:
        self._enter()
        if not loader.train:
            batches = _evaluated(loader, self.rank, self.world, self._replica.size)
            for indices in batches[:1] if self._rehearsing else batches:
                yield loader.fetch(indices)
            return
        if self._rehearsing and not self._rehearsed:
            self._shares.drawn = [loader]
            self._try(loader.rehearsal_samples)
            yield loader.rehearsal()
            self._rehearsed = True
        if self._rehearsing and not self._join():
            return
        loader.begin()
        while True:
            self._between_steps()
            share = self._shares.draw(loader, self.rank, self.world)
            if share is None:
                return
            if not share.pending:  # this worker has no samples (left) in this step, but takes part
                self._sync()
                continue
            rank, _ = share.take()
            batch = loader.batch(share)
            if batch is None:  # a stream that has nothing for this worker right now
                continue
            if self._ranks is not None:
                self._ranks.begin(rank, self.steps)
            assert share.current is not None
            self._try(share.current[1][1] - share.current[1][0])
            yield batch

    def _try(self, samples: int) -> None:
        """Note that the script gets a batch of that size, which may not fit."""
        if self._room is not None and self._ranks is None:
            self._room.trying(samples)

    def _watch(self, share: Share, samples: int, early: bool) -> None:
        """Before a backward: have gradients taken as they come, and begin the sum if this is the last one."""
        wanted = self._crew.reducer.early_now
        if wanted != self._flat.watched:
            self._flat.watch(self._on_gradient if wanted else None)
        if not wanted or not early:
            return
        if share.pending or len(self._shares.drawn) > 1 or self._shares.drawn[0].streaming:
            return
        if self._fires_once is None:  # see first that backward computes each gradient in one go
            self._fired = []
        elif self._fires_once:
            header, norms = self._header(share, share.samples + samples)
            began_s = time.perf_counter()
            reduction = self._crew.begin(header, self._tree(share.size), norms=norms)
            self._early = Early(reduction, self._crew.mesh, began_s)

    def _see_fired(self) -> None:
        """After a backward that was watched: note whether it computed each gradient in one go."""
        if self._fired is not None:
            self._fires_once, self._fired = len(self._fired) == len(set(self._fired)), None

    def _on_gradient(self, index: int) -> None:
        """In backward: the gradient of a parameter is complete."""
        if self._fired is not None:
            self._fired.append(index)
        if self._rehearsing:
            return
        early = self._early.reduction if self._early is not None else None
        if self._ranks is None:
            if self._flat.keep(index) and early is not None:
                early.ready(index)
        elif early is not None:
            self._sums.finish(index)
            early.ready(index)

    def _header(self, share: Share, samples: int) -> tuple[Header, Norms | None]:
        """What the others learn of this worker's part of the step, and how norms are taken in the sum."""
        header: Header = {"what": "step", "n": samples, "candidate": self._offer()}
        if self._replica.size > 1 and self.rank == 0 and self._keeper.due(self.steps + 1):
            header["save"] = True
        if share.loss is not None and math.isfinite(loss := float(share.loss)):
            header["loss"] = loss
        if self._turns is not None:
            header["gpu"] = self._turns.gpu
        streams = {ld.name: ld.header() for ld in self._shares.drawn if ld.streaming}
        if streams:
            header["streams"] = streams
        if self._adaptive is None:
            return header, None
        return header | self._adaptive.header(self._crew.mesh.number), self._adaptive.norms

    def _gather(self, share: Share) -> Header:
        """Complete this worker's input of the sum; returns what only that shows."""
        if self._ranks is not None:
            block = range(*plan.blocks(self._logical, self.world)[self.rank])
            self._flat.gather_ranks(self._ranks.after_step(block, share.ranks))
        elif share.covered and (unused := self._flat.gather(share.samples / share.size)):
            return {"unused": unused}
        return {}

    def _sync(self) -> bool:
        """Sum the gradients over all members and commit; False if a death means that samples come again."""
        share = self._shares.drawn[0].share
        assert share is not None
        early, self._early = self._early, None
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
            if not self._recover(error):
                return False
            assert self._crew.reducer.result is not None
            reduced = self._crew.reducer.result
        offered = header["candidate"]
        agreed = mesh is self._crew.mesh and all(h["candidate"] == offered for h in reduced.headers)
        later = bool(offered and agreed) and self._brings_newcomers(offered)
        if offered and agreed and not later:
            self._leave_if_out(offered)  # the update is for those who go on
        self._commit(reduced, alone)
        if later:
            self._agreed = (offered, self.epoch)
        elif offered and agreed:
            self._switch(offered)
        elif offered and self._link is not None:
            self._link.release()
        return True

    def _tree(self, size: int) -> Callable[[list[Header]], Tree | None]:
        if self._ranks is not None:
            return lambda headers: plan.worker_tree(self._logical, len(headers), size)
        return lambda headers: cutting.tree([h["n"] for h in headers], self._replica.size, self.rank)

    def _commit(self, reduced: Reduced, alone: bool) -> None:
        headers = reduced.headers
        streams = [ld for ld in self._shares.drawn if ld.streaming]
        if streams and not self._rescale(headers, alone):  # no worker had a sample: only shards are leased
            _hand_out(streams, headers)
            self._flat.clear()
            self._shares.commit()
            self._crew.completed()
            return
        if not alone:
            silent = [set(h.get("unused", ())) for h in headers if h["n"]]
            self._flat.adopt(set.intersection(*silent) if silent and self._ranks is None else set())
        elif self._ranks is not None:
            self._flat.adopt_inputs()
            self._ranks.commit(self._shares.drawn[0].share.ranks if self._shares.drawn[0].share else [])
        if self._adaptive is not None:
            unscale = self._updater.scale**-2
            self._adaptive.commit(reduced, alone=alone, nodes=self._crew.nodes, unscale=unscale)
        rate = None if self._adaptive is None else self._adaptive.scaled_learning_rate()
        self._updater.update(self._flat.parameters.values(), rate)
        self._flat.clear()
        share, loader = self._shares.drawn[0].share, self._shares.drawn[0]
        if share is not None and (loss := reporting.step_loss(headers, share.size)) is not None:
            self._loss.add(loss)
        _hand_out(streams, headers)
        self._shares.commit()
        self._crew.completed()
        self.steps += 1
        if self._updater.step_scheduler == "step":
            self._updater.tick(self.steps if self._adaptive is None else self._adaptive.steps_worth)
        if self._ranks is not None:
            self._ranks.between(self.steps)
        turn_s = 0.0
        if self._turns is not None:
            turn_s = self._turns.after_step(headers, sum(h["n"] for h in headers), leads=self.rank == 0)
            reduced.wait_s += turn_s
        step_s = self._report(reduced, loader)
        if self._adaptive is not None and share is not None:
            self._adaptive.follow()
            self._adaptive.observe(step_s - turn_s, reduced.sync_s, share.samples, len(share.covered))
        self._save_if_due(headers)

    def _rescale(self, headers: list[Header], alone: bool) -> bool:
        """Make the sum a mean over the samples that workers really had; False if there were none."""
        share = self._shares.drawn[0].share
        total = sum(h["n"] for h in headers)
        if share is not None and total not in (0, share.size):
            vectors = [p.grad for p in self._flat.parameters.values() if p.grad is not None]
            torch._foreach_mul_(vectors if alone else self._flat.outputs, share.size / total)
        return total > 0

    def _share(self, header: Header) -> list[Header]:
        """Exchange headers with all members and return all of them, even if a member dies meanwhile."""
        if self._rehearsing or not self._entered:
            return [header]
        while True:
            try:
                headers = self._crew.share(header)
            except (PeerLost, OutOfStep) as error:
                if not self._recover(error):
                    continue
                headers = self._crew.held_headers()
            self._crew.completed()
            return headers

    def _report(self, reduced: Reduced, loader: ElasticLoader | None = None) -> float:
        """Update the report after a step; returns how long the step took."""
        now = time.perf_counter()
        step_s, self._last_commit_s = now - self._last_commit_s, now
        if self._link is not None:
            self._link.step = self.steps
            self._link.report = heartbeat.report(self, reduced, loader, step_s)
        return step_s

    def _rehearse_update(self) -> None:
        """Build the optimizer's state with a step; the state that arrives later overwrites the weights."""
        with contextlib.suppress(RuntimeError):
            rate = None if self._adaptive is None else self._adaptive.scaled_learning_rate()
            self._updater.update(self._flat.parameters.values(), rate)
        self._flat.clear()
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
