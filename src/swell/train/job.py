"""`swell.elastic`: an ordinary training loop that grows, shrinks and survives.

    job = swell.elastic(model, optimizer, scheduler=scheduler)
    loader = job.loader(train_set, batch_size=128)
    for epoch in job.epochs(10):
        for x, y in loader:
            job.step(loss_fn(model(x), y))

This module has what scripts use. `travelling` has the state that travels, `stepping` what happens in a step,
`member` how a worker joins and goes on in another generation. Without `swell run` a job has one worker.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from swell.train import checks, reporting
from swell.train.agent.errors import UsageError
from swell.train.data import room
from swell.train.data.loader import ElasticLoader
from swell.train.data.room import Room
from swell.train.data.samples import MapDataset
from swell.train.modes.ranks import LogicalRanks, PartialSums
from swell.train.replicas.form import form_of
from swell.train.replicas.group import Replica
from swell.train.shares import Shares
from swell.train.state.keeper import Keeper
from swell.train.sync.crew import Crew
from swell.train.sync.device import turns_of
from swell.train.sync.link import Link
from swell.train.sync.mesh import Header
from swell.train.travelling import Traveller
from swell.train.updating import Updater

if TYPE_CHECKING:
    from swell.train.data.stream import StreamLoader
    from swell.train.modes.adaptation import Adaptation

log = logging.getLogger(__name__)

MODES = ("fixed", "adaptive", "consistent")
DEFAULT_CHECKPOINT_S = 60.0


class Job(Traveller):
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
        if logical_ranks < 1:
            raise UsageError(f"logical_ranks: got {logical_ranks}, must be at least 1")
        checks.device(model, device)
        checks.optimizer(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self._updater = Updater(optimizer, scheduler, scaler, clip_norm, step_scheduler)
        self.mode = mode
        self.seed = seed
        self.epoch = 0
        self.steps = 0
        """Committed optimizer steps."""
        self._by = "progress" if mode == "adaptive" else "data"
        self._logical = logical_ranks
        self._replica = Replica(1, 0) if link is None else Replica.of(link.config, link.name)
        self._form = form_of(model, optimizer, self._replica, mode, scaler)
        self._ranks = LogicalRanks(model, logical_ranks, seed) if mode == "consistent" else None
        self._flat = self._form.flat(model, self._ranks.named() if self._ranks else None)
        self._sums = PartialSums(
            list(self._flat.parameters.values()), self._flat.grad_in if self._ranks else []
        )
        self._shares = Shares(logical_ranks if self._ranks else None, self._sums, self._replica.size)
        self._link = link
        self._room = Room(link.directory.path, link.name) if link is not None else None
        if link is not None:
            checkpoint_dir = checkpoint_dir or link.config.get("checkpoints")
            checkpoint_dir = checkpoint_dir or link.directory.path / "checkpoints"
            if checkpoint_every_s == DEFAULT_CHECKPOINT_S:  # the script left it to the job's settings
                checkpoint_every_s = link.config.get("checkpoint_s", checkpoint_every_s)
        self._keeper = Keeper(checkpoint_dir, checkpoint_every_s, checkpoint_every_steps, keep_checkpoints)
        facts: Header = {"model": self._flat.digest, "mode": mode, "logical_ranks": logical_ranks}
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
        self._loss = reporting.SmoothedLoss()
        self._until_loss: float | None = None
        self._samples = {}
        self._turns = turns_of(self._flat.device, None if link is None else link.event)

    # ------------------------------------------------------------------ what scripts use

    @property
    def adaptive(self) -> Adaptation:
        """What adaptive mode has found out: noise scale, progress, reports."""
        if self._adaptive is None:
            raise UsageError("job.adaptive: needs mode='adaptive' and a training loader made by job.loader")
        return self._adaptive

    @property
    def loss(self) -> float | None:
        """The loss of the whole job, averaged over some fifty steps: the same on every worker."""
        return self._loss.value

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
        if train:
            self._mind_room(made)
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
        prefetch: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> StreamLoader:
        """Batches of a stream that is cut into `shards` (file names, ranges, ...); `read(shard)` gives
        samples.

        `read` must give the same samples in the same order every time. `shuffle` shuffles the shards. With
        `prefetch`, threads read up to that many samples of each shard at hand ahead of the training.
        """
        from swell.train.data.stream import StreamLoader

        name = name or f"loader{len(self._loaders)}"
        if name in self._loaders:
            raise UsageError(f"name: there are two loaders called {name!r}; give each its own")
        if self.mode != "fixed":
            raise UsageError(
                f"mode: {self.mode!r} must know the samples of a step beforehand, and a stream does not; use "
                "mode='fixed', or a data set with a length and job.loader"
            )
        if self._replica.size > 1:
            raise UsageError(
                "job.stream: the workers of a replica must have the same number of batches, and in a stream "
                "that is not known beforehand; use a data set with a length and job.loader"
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
            prefetch=prefetch,
        )
        self._loaders[name] = made
        self._mind_room(made)
        if name in self._pending_loaders:
            made.load(self._pending_loaders.pop(name))
        return made

    def _mind_room(self, loader: ElasticLoader) -> None:
        """Do not try again what did not fit an earlier worker's memory."""
        failed = room.failed(self._link.directory.path) if self._link is not None else None
        failed = self._replica.first(failed or 0)[0] or None  # the same for all workers of a replica
        if failed is not None and self.mode != "consistent":
            loader.room = failed // 2
            if self._adaptive is not None:
                self._adaptive.out_of_memory(failed)

    def _adapt(self, loader: ElasticLoader) -> None:
        """Make this training loader the one whose batch follows goodput."""
        from swell.train.modes.adaptation import Adaptation

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

    def epochs(self, count: int, *, by: str | None = None, until_loss: float | None = None) -> Iterator[int]:
        """The epochs still to train, up to `count`; a newcomer or a restarted job begins where the job is.

        In adaptive mode `count` means as much progress as `count` epochs at the tuned batch make
        (`by="progress"`). Larger batches make less progress per sample, so there may be more passes over the
        data; `by="data"` counts passes.
        With `until_loss`, training ends earlier, once the job's own loss, averaged over some fifty steps, is
        at most that: at the same step on every worker (over a stream, at the end of a pass).
        """
        if count < 0:
            raise UsageError(f"epochs: got {count}, must be at least 0")
        if by not in (None, "data", "progress"):
            raise UsageError(f"by: got {by!r}, must be 'data' or 'progress'")
        if by == "progress" and self.mode != "adaptive":
            raise UsageError("by: 'progress' needs mode='adaptive', where batches differ in worth")
        if until_loss is not None and not math.isfinite(until_loss):
            raise UsageError(f"until_loss: got {until_loss}, must be a number")
        self._by = by or self._by
        self._epochs = count
        self._until_loss = until_loss
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

    def step(self, loss: Tensor | Sequence[Tensor] | Callable[[], Tensor]) -> bool:
        """Use one batch's loss (its mean over the batch). True if this completed an optimizer step.

        A job with several optimizers takes as many losses: each changes the parameters of its optimizer only.

        If the loss is given as a function, `job.step(lambda: loss_fn(model(x), y))`, the forward pass too may
        run out of memory: the batch is then handed out again in smaller pieces, and the job remembers what
        did not fit.
        """
        self._backward(loss, early=True)
        return self.commit()

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
        """True on every worker if `flag` is true on any of them, so that all leave a loop together."""
        return any(h["flag"] for h in self._share({"what": "agree", "flag": bool(flag)}))

    def log(self, **metrics: float | Tensor) -> None:
        """Report metrics; those of the leader go into the job's reports."""
        self._metrics |= {name: float(value) for name, value in metrics.items()}

    def _more(self, count: int) -> bool:
        """Whether there is more to train: neither `count` epochs nor the target were reached."""
        by_data = self._adaptive is None or self._by == "data"
        if self._adaptive is not None:
            self._adaptive.until_epochs = None if by_data else count
        return not self.enough() and (self.epoch < count or not by_data)

    def _end_of_epoch(self, count: int) -> None:
        self.epoch += 1
        if self._updater.step_scheduler == "epoch":
            by_worth = self._adaptive is not None and self._by == "progress"
            self._updater.tick(
                round(self._adaptive.epochs_worth) if self._adaptive and by_worth else self.epoch
            )
        if self._link is not None and self._more(count):
            self._link.at_epoch(self.epoch)
