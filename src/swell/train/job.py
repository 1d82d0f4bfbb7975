"""`swell.elastic`: an ordinary training loop that grows, shrinks and survives.

    job = swell.elastic(model, optimizer, scheduler=scheduler)
    loader = job.loader(train_set, batch_size=128)
    for epoch in job.epochs(10):
        for x, y in loader:
            job.step(loss_fn(model(x), y))

The story of a step is in docs/runtime.md; here it reads: `_run_loader` hands out this worker's part,
`backward` adds its gradients, `_sync` sums them with the others', `_commit` takes effect everywhere or
nowhere, `_switch` goes to another generation. Without `swell run` the same code is a crew of one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from swell.train import checks, plan, reporting
from swell.train import state as states
from swell.train.crew import Crew
from swell.train.data import ElasticLoader, MapDataset, key, seed_all
from swell.train.errors import LEFT, RESPAWN, PeerLost, UsageError
from swell.train.flat import FlatModel
from swell.train.jobdir import JobDirectory
from swell.train.keeper import Keeper
from swell.train.link import STOP, Link
from swell.train.mesh import Header
from swell.train.plan import Tree
from swell.train.ranks import LogicalRanks, PartialSums
from swell.train.reducer import Reduced
from swell.train.shares import Shares

if TYPE_CHECKING:
    from swell.train.adaptation import Adaptation
    from swell.train.stream import StreamLoader

log = logging.getLogger(__name__)

MODES = ("fixed", "adaptive", "consistent")
DEFAULT_CHECKPOINT_S = 60.0


class Job:
    """One training run, seen from one of its workers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        step_scheduler: str = "epoch",
        mode: str = "fixed",
        logical_ranks: int = 4,
        clip_norm: float | None = None,
        scaler: Any = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every_s: float | None = DEFAULT_CHECKPOINT_S,
        checkpoint_every_steps: int | None = None,
        keep_checkpoints: int = 3,
        learning_rate_rule: str = "adascale",
        warmup_epochs: float = 0.0,
        max_batch: int | None = None,
        min_local: int = 1,
        max_local: int | None = None,
        link: Link | None = None,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"mode: got {mode!r}, must be one of {', '.join(MODES)}")
        if step_scheduler not in ("epoch", "step", "never"):
            raise UsageError(f"step_scheduler: got {step_scheduler!r}, must be epoch, step or never")
        if logical_ranks < 1:
            raise UsageError(f"logical_ranks: got {logical_ranks}, must be at least 1")
        checks.device(model, device)
        checks.optimizer(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.mode = mode
        self.seed = seed
        self.epoch = 0
        self.steps = 0
        """Committed optimizer steps."""
        self._step_scheduler = step_scheduler
        self._ticks = 0
        """Steps of the scheduler so far."""
        self._by = "progress" if mode == "adaptive" else "data"
        self._clip_norm = clip_norm
        self._logical = logical_ranks
        self._ranks = LogicalRanks(model, logical_ranks, seed) if mode == "consistent" else None
        self._flat = FlatModel(model, self._ranks.named() if self._ranks else None)
        self._sums = PartialSums(list(self._flat.parameters.values()), self._flat.grad_in)
        self._shares = Shares(logical_ranks if self._ranks else None, self._sums)
        self._link = link
        if link is not None:
            checkpoint_dir = checkpoint_dir or link.config.get("checkpoints")
            checkpoint_dir = checkpoint_dir or link.directory.path / "checkpoints"
            if checkpoint_every_s == DEFAULT_CHECKPOINT_S:  # the script left it to whoever runs it
                checkpoint_every_s = link.config.get("checkpoint_s", checkpoint_every_s)
        self._keeper = Keeper(checkpoint_dir, checkpoint_every_s, checkpoint_every_steps, keep_checkpoints)
        facts: Header = {"model": self._flat.layout.digest, "mode": mode, "logical_ranks": logical_ranks}
        self._crew = Crew(link, self._flat, self, facts)
        self._adaptive: Adaptation | None = None
        self._adaptive_options: dict[str, Any] = {
            "learning_rate_rule": learning_rate_rule,
            "warmup_epochs": warmup_epochs,
            "max_batch": max_batch,
            "min_local": min_local,
            "max_local": max_local,
        }
        self._loaders: dict[str, ElasticLoader] = {}
        self._objects: dict[str, Any] = {}
        self._pending_loaders: dict[str, Any] = {}
        self._entered = False
        self._rehearsing = False
        self._rehearsed = False
        self._turned: int | None = None
        self._ended = False
        self._metrics: dict[str, float] = {}
        self._last_commit_s = time.perf_counter()
        self._pace = reporting.Pace()
        self._epochs: int | None = None

    # ------------------------------------------------------------------ what scripts use

    @property
    def rank(self) -> int:
        """This worker's place in the present generation (changes when membership does)."""
        return self._crew.rank

    @property
    def world(self) -> int:
        """Workers in the present generation."""
        return self._crew.size

    @property
    def generation(self) -> int:
        """The number of the present generation; grows with every change of membership."""
        return self._crew.mesh.number

    @property
    def is_leader(self) -> bool:
        """True on exactly one worker: the one that prints and saves."""
        return self._crew.rank == 0 and not self._rehearsing

    @property
    def adaptive(self) -> Adaptation:
        """What adaptive mode has found out: noise scale, progress, reports."""
        if self._adaptive is None:
            raise UsageError("job.adaptive: needs mode='adaptive' and a training loader made by job.loader")
        return self._adaptive

    @property
    def rehearsing(self) -> bool:
        """This worker is preparing and not yet part of the job."""
        return self._rehearsing

    def loader(
        self,
        dataset: MapDataset,
        batch_size: int,
        *,
        shuffle: bool | None = None,
        train: bool = True,
        drop_last: bool = False,
        micro_batch: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> ElasticLoader:
        """Batches of `dataset`. `batch_size` is that of a whole step, over all workers.

        With `train=False` the data is cut among the workers for evaluation and `batch_size` is each worker's.
        `micro_batch` bounds what is computed at once; the rest of a worker's part accumulates.
        """
        name = name or f"loader{len(self._loaders)}"
        if name in self._loaders:
            raise UsageError(f"name: there are two loaders called {name!r}; give each its own")
        if train and self.mode == "consistent" and batch_size < self._logical:
            raise UsageError(
                f"batch_size: got {batch_size}, but consistent mode has {self._logical} logical ranks, each "
                f"of which needs a sample; use at least {self._logical}, or fewer logical_ranks"
            )
        made = ElasticLoader(
            self,
            name,
            dataset,
            batch_size=batch_size,
            shuffle=train if shuffle is None else shuffle,
            drop_last=drop_last,
            micro_batch=micro_batch,
            num_workers=num_workers,
            collate_fn=collate_fn,
            train=train,
            seed=self.seed if seed is None else seed,
        )
        self._loaders[name] = made
        if train and self.mode == "adaptive":
            self._adapt(made)
        if name in self._pending_loaders:
            made.load(self._pending_loaders.pop(name))
        return made

    def stream(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        batch_size: int,
        *,
        shuffle: bool = True,
        micro_batch: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> StreamLoader:
        """Batches of a stream that is cut into `shards` (file names, ranges, ...); `read(shard)` gives
        samples.

        `read` must give the same samples in the same order every time. `shuffle` shuffles the shards.
        """
        from swell.train.stream import StreamLoader

        name = name or f"loader{len(self._loaders)}"
        if name in self._loaders:
            raise UsageError(f"name: there are two loaders called {name!r}; give each its own")
        if self.mode != "fixed":
            raise UsageError(
                f"mode: {self.mode!r} must know the samples of a step beforehand, and a stream does not; use "
                "mode='fixed', or a data set with a length and job.loader"
            )
        made = StreamLoader(
            self,
            name,
            shards,
            read,
            worker=self._link.name if self._link is not None else "w0",
            batch_size=batch_size,
            micro_batch=micro_batch,
            shuffle=shuffle,
            collate_fn=collate_fn,
            seed=self.seed if seed is None else seed,
        )
        self._loaders[name] = made
        if name in self._pending_loaders:
            made.load(self._pending_loaders.pop(name))
        return made

    def _adapt(self, loader: ElasticLoader) -> None:
        """The loader that trains is the one whose batch follows goodput."""
        from swell.train.adaptation import Adaptation

        if self._adaptive is not None:
            raise UsageError(
                "mode: adaptive mode tunes the batch of one training loader, and this is the second; use "
                "mode='fixed', or train=False for loaders that only evaluate"
            )
        self._adaptive = Adaptation(self.optimizer, self._flat, loader, **self._adaptive_options)

    def register(self, name: str, value: Any) -> Any:
        """Let `value` (anything with state_dict and load_state_dict) travel with the job; returns it."""
        if name in self._objects:
            raise UsageError(f"name: there are two objects called {name!r}; give each its own")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise UsageError(f"{name}: a {type(value).__name__} has no {method}(), so it cannot travel")
        self._objects[name] = value
        return value

    def epochs(self, count: int, *, by: str | None = None) -> Iterator[int]:
        """The epochs still to train, up to `count`; a newcomer or a restart begins where the job is.

        In adaptive mode `count` is what they are worth at the tuned batch (`by="progress"`; larger batches
        make less progress per sample, so there may be more passes over the data); `by="data"` counts passes.
        """
        if count < 0:
            raise UsageError(f"epochs: got {count}, must be at least 0")
        if by not in (None, "data", "progress"):
            raise UsageError(f"by: got {by!r}, must be 'data' or 'progress'")
        if by == "progress" and self.mode != "adaptive":
            raise UsageError("by: 'progress' needs mode='adaptive', where batches differ in worth")
        self._by = by or self._by
        self._epochs = count
        self._enter()
        try:
            while self._more(count):
                yield self.epoch
                if self._turned is not None:
                    self.epoch, self._turned = self._turned, None
                    continue
                if self._rehearsing:
                    raise UsageError("job.epochs: the loop body never iterated a loader made by job.loader")
                self._end_of_epoch(count)
        except GeneratorExit:
            if self._rehearsing:
                self._quit_rehearsal()
            raise
        finally:
            if not self._rehearsing:
                self._end()
        if self._rehearsing:
            self._quit_rehearsal()

    def step(self, loss: Tensor | Callable[[], Tensor]) -> bool:
        """Use one batch's loss (its mean over the batch). True if this completed an optimizer step.

        Given as a function, `job.step(lambda: loss_fn(model(x), y))`, the forward pass too may run out of
        memory: the batch is then handed out again in smaller pieces, and what did not fit is remembered.
        """
        self.backward(loss)
        return self.commit()

    def backward(self, loss: Tensor | Callable[[], Tensor]) -> None:
        """The first half of `step`: add this batch's gradients."""
        if not self._shares.drawn:
            raise UsageError(
                "job.step: no batch was drawn since the last step. Iterate a loader made by job.loader(...), "
                "and call job.step once for each batch"
            )
        share = self._shares.drawn[0].share
        if self._rehearsing or share is None or share.current is None:
            self._scaled(loss() if callable(loss) else loss).backward()  # type: ignore[no-untyped-call]
            return
        rank, (low, high) = share.current
        try:
            weighted = (loss() if callable(loss) else loss) * ((high - low) / share.size)
            self._scaled(weighted).backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            if self._ranks is not None or len(self._shares.drawn) > 1 or high - low == 1:
                raise
            self._cut(self._shares.drawn[0], high - low)
            return
        if self._ranks is not None:
            self._ranks.end(rank)
            self._sums.after(rank)
        self._shares.cover()
        if self._adaptive is not None and self._crew.size == 1 and len(share.covered) == 1 and share.pending:
            self._adaptive.after_backward(share.samples)

    def _cut(self, loader: ElasticLoader, samples: int) -> None:
        """A micro-batch of `samples` did not fit: compute this worker's part again, in smaller pieces."""
        limit = self._adaptive.out_of_memory(samples) if self._adaptive is not None else samples // 2
        log.warning("a batch of %d does not fit the memory; going on with %d at once", samples, limit)
        self._flat.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        loader.micro_batch = limit
        self._shares.begin_again(loader)

    def commit(self) -> bool:
        """The second half of `step`: if this worker's part is complete, sum with the others and update."""
        if self._rehearsing:
            self._rehearse_update()
            return False
        return self._sync() if self._shares.complete() else False

    def reduce(self, **values: float | Tensor) -> dict[str, float]:
        """The sum over all workers of each named value."""
        mine = {name: float(value) for name, value in values.items()}
        out = dict.fromkeys(mine, 0.0)
        for header in self._share({"what": "reduce", "values": mine}):
            for name in out:
                out[name] += header["values"][name]
        return out

    def mean(self, value: float | Tensor, weight: float = 1.0) -> float:
        """The mean over all workers of `value`, each weighted by `weight` (say, its number of samples)."""
        out = self.reduce(total=float(value) * weight, weight=weight)
        return out["total"] / out["weight"] if out["weight"] else float("nan")

    def agree(self, flag: bool) -> bool:
        """True on every worker if `flag` is on any of them: how to leave a loop together."""
        return any(h["flag"] for h in self._share({"what": "agree", "flag": bool(flag)}))

    def log(self, **metrics: float | Tensor) -> None:
        """Report metrics (from the leader) to whoever watches the job."""
        self._metrics |= {name: float(value) for name, value in metrics.items()}

    # ------------------------------------------------------------------ state

    def capture(self) -> dict[str, Any]:
        """Everything that makes up the training state; tensors are live ones, not copies."""
        state: dict[str, Any] = {
            "model": states.model_tensors(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "objects": {name: value.state_dict() for name, value in self._objects.items()},
            "loaders": {name: ld.state() for name, ld in self._loaders.items()} | self._pending_loaders,
            "epoch": self.epoch,
            "steps": self.steps,
            "ticks": self._ticks,
            "operation": self._crew.operation,
        }
        if self._adaptive is not None:
            state["adaptive"] = self._adaptive.state_dict()
        if self._ranks is not None:
            state["rank_buffers"] = self._ranks.buffers
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a captured state."""
        states.load_model(self.model, state["model"])
        states.load_optimizer(self.optimizer, state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, value in self._objects.items():
            if name in state["objects"]:
                value.load_state_dict(state["objects"][name])
        self._pending_loaders = dict(state["loaders"])
        for name, loader in self._loaders.items():
            if name in self._pending_loaders:
                loader.load(self._pending_loaders.pop(name))
        if self._adaptive is not None and "adaptive" in state:
            self._adaptive.load_state_dict(state["adaptive"])
        self.epoch, self.steps, self._ticks = int(state["epoch"]), int(state["steps"]), int(state["ticks"])
        if self._ranks is not None:
            self._ranks.restore(state["rank_buffers"])
        self._flat.clear()

    def found(self) -> None:
        """Nobody has live state: begin from the newest checkpoint, if there is one."""
        if self._rehearsed:
            os._exit(RESPAWN)  # this worker prepared for a job that is no more; its weights are spoilt
        self.epoch = 0
        state = self._keeper.load()
        if state is not None:
            self.restore(state)
            self._crew.operation = int(state["operation"])

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now (on the leader; the others do nothing)."""
        if self.is_leader:
            self._keeper.save(self.steps, self.capture(), wait=wait)

    # ------------------------------------------------------------------ the loop

    def _run_loader(self, loader: ElasticLoader) -> Iterator[Any]:
        self._enter()
        if not loader.train:
            batches = loader.evaluation(self.rank, self.world)
            for indices in batches[:1] if self._rehearsing else batches:
                yield loader.fetch(indices)
            return
        if self._rehearsing and not self._rehearsed:
            self._shares.drawn = [loader]
            yield loader.rehearsal()
            self._rehearsed = True
        if self._rehearsing and not self._join():
            return
        loader.begin()
        while (share := self._shares.draw(loader, self.rank, self.world)) is not None:
            if not share.pending:  # nothing (left) for this worker in this step: take part all the same
                self._sync()
                continue
            rank, _ = share.take()
            batch = loader.batch(share)
            if batch is None:  # a stream that has nothing for this worker right now
                continue
            if self._ranks is not None:
                self._ranks.begin(rank, self.steps)
            yield batch

    # ------------------------------------------------------------------ one step, together

    def _sync(self) -> bool:
        """Sum the gradients with everybody's and commit. False: somebody died, samples are to be redone."""
        share = self._shares.drawn[0].share
        assert share is not None
        mesh, alone = self._crew.mesh, self._crew.size == 1
        header: Header = {"what": "step", "n": share.samples, "candidate": self._offer()}
        if self._ranks is not None:
            if not alone:
                block = range(*plan.blocks(self._logical, self.world)[self.rank])
                self._flat.gather_ranks(self._ranks.after_step(block, share.ranks))
        elif not alone and share.samples:
            unused = self._flat.gather(share.samples / share.size)
            if unused:
                header["unused"] = unused
        streams = {ld.name: ld.header() for ld in self._shares.drawn if ld.streaming}
        if streams:
            header["streams"] = streams
        squares, weights = False, None
        if self._adaptive is not None:
            header |= self._adaptive.header(self._crew.mesh.number)
            squares, weights = self._adaptive.measuring, self._adaptive.weights
        if alone:
            reduced = Reduced([header], 0.0, 0.0)
        else:
            try:
                reduced = self._crew.all_reduce(
                    header, self._tree(share.size), squares=squares, weights=weights
                )
            except PeerLost:
                if not self._recover():
                    return False
                assert self._crew.reducer.result is not None
                reduced = self._crew.reducer.result
        offered = header["candidate"]
        agreed = mesh is self._crew.mesh and all(h["candidate"] == offered for h in reduced.headers)
        self._commit(reduced, alone)
        if offered and agreed:
            self._switch(offered)
        elif offered and self._link is not None:
            self._link.release()
        return True

    def _tree(self, size: int) -> Callable[[list[Header]], Tree | None]:
        if self._ranks is not None:
            return lambda headers: plan.worker_tree(self._logical, len(headers), size)
        return lambda headers: plan.balanced([r for r, h in enumerate(headers) if h["n"]] or [0])

    def _commit(self, reduced: Reduced, alone: bool) -> None:
        headers = reduced.headers
        streams = [ld for ld in self._shares.drawn if ld.streaming]
        if streams and not self._rescale(headers, alone):  # nobody had a sample: only shards change hands
            self._hand_out(streams, headers)
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
            scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
            self._adaptive.commit(reduced, alone=alone, nodes=self._crew.nodes, unscale=scale**-2)
        self._update()
        self._flat.clear()
        share, loader = self._shares.drawn[0].share, self._shares.drawn[0]
        self._hand_out(streams, headers)
        self._shares.commit()
        self._crew.completed()
        self.steps += 1
        if self._step_scheduler == "step":
            self._tick(self.steps if self._adaptive is None else self._adaptive.steps_worth)
        if self._ranks is not None:
            self._ranks.between(self.steps)
        step_s = self._report(reduced, loader)
        if self._adaptive is not None and share is not None:
            self._adaptive.follow()
            self._adaptive.observe(step_s, reduced.sync_s, share.samples, len(share.covered))
        if self.rank == 0 and self._keeper.due(self.steps):
            self.save()

    def _rescale(self, headers: list[Header], alone: bool) -> bool:
        """Make the sum a mean over the samples that really came together; False if there was none."""
        share = self._shares.drawn[0].share
        total = sum(h["n"] for h in headers)
        if share is not None and total not in (0, share.size):
            vectors = [p.grad for p in self._flat.parameters.values() if p.grad is not None]
            torch._foreach_mul_(vectors if alone else self._flat.outputs, share.size / total)
        return total > 0

    def _hand_out(self, streams: list[ElasticLoader], headers: list[Header]) -> None:
        for loader in streams:
            loader.committed_by([h["streams"][loader.name] for h in headers])

    def _tick(self, due: float) -> None:
        """Let the scheduler catch up with training: to `due` of its steps."""
        while self.scheduler is not None and self._ticks + 1 <= due + 1e-6:
            self.scheduler.step()
            self._ticks += 1

    def _scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(loss) if self.scaler is not None else loss
        return scaled

    def _update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._flat.parameters.values(), self._clip_norm)
        rate = contextlib.nullcontext() if self._adaptive is None else self._adaptive.scaled_learning_rate()
        with rate:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()

    def _share(self, header: Header) -> list[Header]:
        """Show `header` to everybody and return everybody's, whoever dies meanwhile."""
        if self._rehearsing or not self._entered:
            return [header]
        while True:
            try:
                headers = self._crew.share(header)
            except PeerLost:
                if not self._recover():
                    continue
                headers = self._crew.held_headers()
            self._crew.completed()
            return headers

    def _report(self, reduced: Reduced, loader: ElasticLoader | None = None) -> float:
        """Say what this step was like; returns how long it took."""
        now = time.perf_counter()
        step_s, self._last_commit_s = now - self._last_commit_s, now
        if self._link is not None:
            self._link.step = self.steps
            self._link.report = {
                "step": self.steps,
                "epoch": self.epoch,
                "generation": self._crew.mesh.number,
                "rank": self.rank,
                "world": self.world,
                "step_s": round(step_s, 6),
                "wait_s": round(reduced.wait_s, 6),
                "sync_s": round(reduced.sync_s, 6),
                "metrics": self._metrics,
                "done": self.steps,
            }
            if loader is not None:
                now_with = (self._crew.mesh.number, loader.batch_size, loader.micro_batch or 0)
                self._pace.add(now_with, step_s, reduced.sync_s)
                self._link.report |= reporting.timing(self._pace, loader, self.world, self._crew.nodes)
                self._link.report |= self._progress(loader)
            if self._adaptive is not None:
                self._link.report |= self._adaptive.beat()
        return step_s

    def _progress(self, loader: ElasticLoader) -> dict[str, float | None]:
        if self._adaptive is None:
            return reporting.progress(loader, self._epochs, self.steps)
        worth = self._adaptive.steps_worth if self._by == "progress" else None
        tuned = int(self._adaptive.report()["init_batch"] or 1)
        return reporting.adaptive_progress(loader, self._epochs, self.epoch, tuned, worth)

    # ------------------------------------------------------------------ membership

    def _offer(self) -> int:
        if self._link is None:
            return 0
        return self._link.offer(self.epoch)

    def _enter(self) -> None:
        """Become part of the job: at once, or by way of a rehearsal if it is under way."""
        if self._entered or self._rehearsing:
            return
        if self._link is None:
            self._crew.enter(self._crew.mesh, {})
            self._entered = True
            self._begin_random()
            return
        welcome = self._link.welcome()
        self.epoch = int(welcome["epoch"])
        if welcome["live"]:
            self._rehearsing = True
            return
        while not self._join():
            assert self._turned is not None
            self.epoch, self._turned = self._turned, None

    def _join(self) -> bool:
        """Wait to be taken in. False: the job went on to another epoch (`_turned`), come along."""
        assert self._link is not None
        self._link.announce_ready(self.epoch)
        while True:
            found = self._link.wait_join()
            if isinstance(found, int):
                self._turned = found
                return False
            standing = self.epoch
            try:
                entered = self._crew.enter(found, {})
            except PeerLost:
                found.close()
                continue
            if self._rehearsed and self.epoch != standing:
                os._exit(RESPAWN)  # the script's loop variable says otherwise
            self._rehearsing, self._entered = False, True
            self._link.entered(found, self.steps, self.epoch)
            self._shares.settle(entered.covered, self.rank, self.world)
            self._begin_random()
            return True

    def _switch(self, number: int) -> None:
        """Everybody said yes to candidate `number` in the step that was just committed."""
        assert self._link is not None
        if number == STOP:
            self._leave_all()
        try:
            mesh = self._link.take(number)
        except PeerLost:
            self._recover()
            return
        if mesh is None:
            self._link.leaving(number)
            self._leave()
        begin = time.perf_counter()
        old = self._crew.mesh
        try:
            entered = self._crew.enter(mesh, {})
        except PeerLost:
            old.close()
            self._recover()
            return
        old.close()
        self._link.entered(mesh, self.steps, self.epoch)
        self._shares.settle(entered.covered, self.rank, self.world)
        if self.rank == 0:
            self._link.event("switch", step=self.steps, world=self.world, pause_s=time.perf_counter() - begin)

    def _leave_all(self) -> NoReturn:
        """The job was asked to end, to be started again some day: nobody trains after this step."""
        assert self._link is not None
        self._ended = True  # this script's end is not the end of training
        if self.is_leader:
            self.save(wait=True)
            self._link.stopped()
        else:
            self._link.leaving(STOP)
        self._leave()

    def _recover(self) -> bool:
        """Somebody is gone: form the next generation. True if the present operation is complete after all."""
        if self._link is None:
            raise PeerLost("a job of one has no peers to lose")
        begin, noticed = time.perf_counter(), time.time()
        covered = self._shares.coverage()
        while True:
            broken, lost = self._crew.mesh.number, self._crew.mesh.lost
            self._crew.close()
            mesh = self._link.wait_recovery(broken, self._crew.operation, lost)
            connected = time.perf_counter()
            try:
                entered = self._crew.enter(mesh, covered)
                break
            except PeerLost:
                continue
        self._link.entered(mesh, self.steps, self.epoch)
        if entered.complete:
            self._shares.others = dict(entered.covered)
        else:
            self._shares.settle(entered.covered, self.rank, self.world)
        if self.rank == 0:
            self._link.event(
                "recovery",
                step=self.steps,
                world=self.world,
                connect_s=round(connected - begin, 6),
                pause_s=round(time.perf_counter() - begin, 6),
                noticed_s=round(noticed, 6),
            )
        return entered.complete

    def _begin_random(self) -> None:
        if self._ranks is not None:
            self._ranks.between(self.steps)
        elif self._link is not None:
            seed_all(key(self.seed, self._link.name, self._crew.mesh.number))

    def _rehearse_update(self) -> None:
        """Build the optimizer's state; what it does to the weights is overwritten by the state to come."""
        with contextlib.suppress(RuntimeError):
            self._update()
        self._flat.clear()
        self._shares.drawn = []

    def _quit_rehearsal(self) -> None:
        """The script left its loop before this worker was part of the job: begin again in a fresh process."""
        os._exit(RESPAWN)

    def _more(self, count: int) -> bool:
        """Whether another pass over the data brings training closer to `count` epochs than it is."""
        if self._adaptive is None or self._by == "data":
            return self.epoch < count
        worth = self._adaptive.epochs_worth
        return self.epoch == 0 < count or worth * (1.0 + 0.5 / max(self.epoch, 1)) < count

    def _end_of_epoch(self, count: int) -> None:
        self.epoch += 1
        if self._step_scheduler == "epoch":
            by_worth = self._adaptive is not None and self._by == "progress"
            self._tick(round(self._adaptive.epochs_worth) if self._adaptive and by_worth else self.epoch)
        if self._link is not None and self._more(count):
            self._link.at_epoch(self.epoch)

    def _leave(self) -> NoReturn:
        """End this worker's script; that its loop is left is not the end of training for the others."""
        self._crew.close()
        self._ended = True
        for loader in self._loaders.values():
            loader.close()
        raise SystemExit(LEFT)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self.is_leader:
            self._keeper.wait()
        for loader in self._loaders.values():
            loader.close()
        if self._link is not None:
            self._link.done(self._crew.operation)
            self._link.flush()


_taken: set[tuple[str, str]] = set()


def elastic(model: nn.Module, optimizer: torch.optim.Optimizer, *, name: str = "job", **options: Any) -> Job:
    """Make a training loop elastic: under `swell run` a member of a job, otherwise a job of one.

    See `Job` for the options (scheduler, mode, logical_ranks, clip_norm, scaler, seed, device, ...).
    """
    directory, worker = os.environ.get("SWELL_JOB_DIR"), os.environ.get("SWELL_WORKER")
    if not directory or not worker:
        return Job(model, optimizer, **options)
    if (directory, name) in _taken:
        raise UsageError(
            f"name: this script calls swell.elastic twice with name={name!r}; one worker belongs "
            "to one elastic job"
        )
    _taken.add((directory, name))
    return Job(model, optimizer, **options, link=Link(JobDirectory(Path(directory)), worker))
