"""`swell.elastic`: an ordinary training loop that grows, shrinks and survives.

    job = swell.elastic(model, optimizer, scheduler=scheduler)
    loader = job.loader(train_set, batch_size=128)
    for epoch in job.epochs(10):
        for x, y in loader:
            job.step(loss_fn(model(x), y))

This module has what scripts use. A job's `Worker` has the parts behind it: `learner` what is trained,
`travelling` the state that travels, `member` how a worker joins and goes on in another generation; `stepping`
makes the steps. Without `swell run` a job has one worker.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from swell.train.agent.errors import UsageError
from swell.train.agent.jobdir import JobDirectory
from swell.train.data import room
from swell.train.data.loader import ElasticLoader
from swell.train.data.room import Room
from swell.train.data.samples import MapDataset
from swell.train.data.sampling import SampleLoader
from swell.train.learner import Learner, Loss, Several
from swell.train.options import AdaptiveOptions, Options
from swell.train.replicas.group import Replica
from swell.train.reporting import Progress
from swell.train.step import Stepper
from swell.train.sync.control import Link
from swell.train.worker import Stage, TrainingState, Worker, keeper_of

if TYPE_CHECKING:
    from swell.train.data.stream import StreamLoader
    from swell.train.modes.adaptive import Adaptation

taken: set[str] = set()
"""Directories of the jobs that this process is a worker of: one at most."""


def elastic(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    **options: Any,
) -> Job:
    """Make a training loop elastic: under `swell run` a member of a job, otherwise a job of one.

    Several models and optimizers are given as lists: `swell.elastic([maker, critic], [optimizer_m,
    optimizer_c])`. The options (scheduler, mode, clip_norm, ...) are those of `swell.train.options`.
    """
    if not isinstance(model, nn.Module):
        model = nn.ModuleList(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = Several(optimizer)
    directory, worker = os.environ.get("SWELL_JOB_DIR"), os.environ.get("SWELL_WORKER")
    if not directory or not worker:
        return Job(model, optimizer, Options.of(options))
    if directory in taken:
        raise UsageError(
            "swell.elastic: this script calls it twice, and one worker belongs to one elastic job; give all "
            "models and optimizers to one call: swell.elastic([maker, critic], [optimizer_m, optimizer_c])"
        )
    if JobDirectory(Path(directory)).config().auto:
        raise UsageError("swell.elastic: this script is elastic by itself; start it without --auto")
    taken.add(directory)
    gc.collect()
    gc.freeze()  # later collections, in the middle of a step, leave alone what is here for good
    return Job(model, optimizer, Options.of(options), Link(JobDirectory(Path(directory)), worker))


# ---------------------------------------------------------------------- the loop


Loader = TypeVar("Loader", bound=ElasticLoader)


class Job(Worker):
    """One training run, seen from one of its workers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: Options | None = None,
        link: Link | None = None,
    ) -> None:
        options = options or Options()
        refuse_elsewhere(model, options.device)
        refuse_strangers(model, optimizer)
        replica = Replica(1, 0) if link is None else Replica.of(link.config, link.name)
        learner = Learner(model, optimizer, options, replica)
        progress = Progress(by="progress" if options.mode == "adaptive" else "data")
        keeper = keeper_of(options.checkpoints, link)
        super().__init__(learner, progress, TrainingState(learner, progress, keeper), keeper, link)
        self._adaptive_options: AdaptiveOptions = options.adaptive
        self._samples: dict[tuple[int, int, bool], SampleLoader] = {}
        """The loaders behind `sample`."""
        self._stepper = Stepper(
            learner,
            progress,
            self._crew,
            self._shares,
            self._member,
            self._saver,
            self._reporter,
            Room(link.directory.path, link.name) if link is not None else None,
        )

    @property
    def adaptive(self) -> Adaptation:
        """Results of adaptive mode: noise scale, progress, reports."""
        if self._learner.adaptive is None:
            raise UsageError("job.adaptive: needs mode='adaptive' and a training loader made by job.loader")
        return self._learner.adaptive

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
        name, logical = self._state.free_name(name), self._learner.logical
        if train and self.mode == "consistent" and batch_size < logical:
            raise UsageError(
                f"batch_size: got {batch_size}, but consistent mode has {logical} logical ranks, each of "
                f"which needs a sample; use at least {logical}, or fewer logical_ranks"
            )
        made = ElasticLoader(
            self._stepper,
            name,
            dataset,
            batch_size=batch_size,
            shuffle=train if shuffle is None else shuffle,
            drop_last=drop_last,
            micro_batch=micro_batch,
            num_workers=num_workers,
            collate_fn=collate_fn,
            train=train,
            seed=self._learner.seed if seed is None else seed,
        )
        if train and self.mode == "adaptive":
            self._adapt(made)
        return self._added(made)

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

        name = self._state.free_name(name)
        if self.mode != "fixed":
            raise UsageError(
                f"mode: {self.mode!r} must know the samples of a step beforehand, and a stream does not; use "
                "mode='fixed', or a data set with a length and job.loader"
            )
        if self._learner.replica.size > 1:
            raise UsageError(
                "job.stream: the workers of a replica must have the same number of batches, and in a stream "
                "that is not known beforehand; use a data set with a length and job.loader"
            )
        made = StreamLoader(
            self._stepper,
            name,
            shards,
            read,
            worker=self._link.name if self._link is not None else "w0",
            batch_size=batch_size,
            micro_batch=micro_batch,
            shuffle=shuffle,
            collate_fn=collate_fn,
            seed=self._learner.seed if seed is None else seed,
            prefetch=prefetch,
        )
        return self._added(made)

    def sample(self, source: int | MapDataset, batch_size: int, *, replace: bool | None = None) -> Any:
        """This worker's part of the next step's batch: a tensor of numbers below `source`, or samples of it.

        `batch_size` is that of a whole step, over all workers. Numbers are drawn with replacement, as
        `torch.randint` does; samples of a data set without it, so that each comes once in every pass.
        """
        replace = isinstance(source, int) if replace is None else replace
        key = source if isinstance(source, int) else id(source), batch_size, replace
        if key not in self._samples:
            if self.mode != "fixed":
                raise UsageError(f"mode: job.sample needs mode='fixed', and this job has {self.mode!r}")
            name, seed = f"sample{len(self._samples)}", self._learner.seed
            made = SampleLoader(self._stepper, name, source, batch_size, replace=replace, seed=seed)
            self._samples[key] = self._added(made)
        return self._samples[key].next()

    def _added(self, loader: Loader) -> Loader:
        """The loader, whose position is part of the job's state from now on."""
        if loader.train:  # do not try again what did not fit an earlier worker's memory
            failed = room.failed(self._link.directory.path) if self._link is not None else None
            failed = self._learner.replica.first(failed or 0)[0] or None  # the same for all of a replica
            if failed is not None and self.mode != "consistent":
                loader.room = failed // 2
                if self._learner.adaptive is not None:
                    self._learner.adaptive.out_of_memory(failed)
        self._state.add(loader)
        return loader

    def _adapt(self, loader: ElasticLoader) -> None:
        """Make this training loader the one whose batch follows goodput."""
        from swell.train.modes.adaptive import Adaptation

        if self._learner.adaptive is not None:
            raise UsageError(
                "mode: adaptive mode tunes the batch of one training loader, and this is the second; use "
                "mode='fixed', or train=False for loaders that only evaluate"
            )
        given = asdict(self._adaptive_options)
        self._learner.adaptive = Adaptation(self.optimizer, self._learner.flat, loader, **given)

    def register(self, name: str, value: Any) -> Any:
        """Let `value` (anything with state_dict and load_state_dict) travel with the job; returns it."""
        self._state.register(name, value)
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
        progress, member = self._progress, self._member
        progress.by, progress.epochs, progress.until_loss = by or progress.by, count, until_loss
        with self._training():
            while self._more(count):
                yield progress.epoch
                if member.turn():
                    continue
                if member.rehearsing:
                    raise UsageError("job.epochs: the loop body never iterated a loader made by job.loader")
                self._end_of_epoch(count)

    def loop(self, steps: int) -> Iterator[int]:
        """The steps still to train, up to `steps`; a newcomer or a restarted job begins where the job is.

        Draw the batches inside with `job.sample`. A scheduler is stepped with every step.
        """
        if steps < 0:
            raise UsageError(f"steps: got {steps}, must be at least 0")
        progress, member, updater = self._progress, self._member, self._learner.updater
        if updater.step_scheduler == "epoch":
            updater.step_scheduler = "step"
        progress.total_steps = steps
        with self._training():
            while progress.steps < steps and not self._stepper.enough():
                yield progress.steps
                if not member.rehearsing:
                    member.between_steps()
                    continue
                if not self._samples:
                    raise UsageError("job.loop: the loop body never called job.sample")
                self._learner.rehearsed = True
                while not member.join():
                    member.turn()
                for loader in self._samples.values():
                    loader.again()

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Around the script's loop: become part of the job, and see to its end, however the loop is left."""
        self._member.enter()
        try:
            yield
        except GeneratorExit:
            if self._member.rehearsing:
                self._member.begin_anew()
            raise
        finally:
            if not self._member.rehearsing:
                self._member.end()
        if self._member.rehearsing:  # the script left its loop before this worker was part of the job
            self._member.begin_anew()

    def step(self, loss: Loss) -> bool:
        """Use one batch's loss (its mean over the batch). True if this completed an optimizer step.

        A job with several optimizers takes as many losses: each changes the parameters of its optimizer only.

        If the loss is given as a function, `job.step(lambda: loss_fn(model(x), y))`, the forward pass too may
        run out of memory: the batch is then handed out again in smaller pieces, and the job remembers what
        did not fit.
        """
        self._stepper.backward(loss, last=True)
        return self._stepper.commit()

    def backward(self, loss: Loss) -> None:
        """The first half of `step`: add this batch's gradients."""
        self._stepper.backward(loss)

    def commit(self) -> bool:
        """The second half of `step`: if this worker's part is complete, sum with the others and update."""
        return self._stepper.commit()

    def reduce(self, **values: float | Tensor) -> dict[str, float]:
        """The sum over all workers of each named value."""
        mine = {name: float(value) for name, value in values.items()}
        out = dict.fromkeys(mine, 0.0)
        for header in self._stepper.share({"what": "reduce", "values": mine}):
            for name in out:
                out[name] += header["values"][name]
        return out

    def mean(self, value: float | Tensor, weight: float = 1.0) -> float:
        """The mean over all workers of `value`, each weighted by `weight` (say, its number of samples)."""
        out = self.reduce(total=float(value) * weight, weight=weight)
        return out["total"] / out["weight"] if out["weight"] else float("nan")

    def agree(self, flag: bool) -> bool:
        """True on every worker if `flag` is true on any of them, so that all leave a loop together."""
        return any(h["flag"] for h in self._stepper.share({"what": "agree", "flag": bool(flag)}))

    def log(self, **metrics: float | Tensor) -> None:
        """Report metrics; those of the leader go into the job's reports."""
        member = self._member.stage in (Stage.MEMBER, Stage.ENDED)
        self._reporter.log({name: float(value) for name, value in metrics.items()}, member=member)

    def _more(self, count: int) -> bool:
        """Whether there is more to train: neither `count` epochs nor the target were reached."""
        adaptive = self._learner.adaptive
        by_data = adaptive is None or self._progress.by == "data"
        if adaptive is not None:
            adaptive.until_epochs = None if by_data else count
        return not self._stepper.enough() and (self._progress.epoch < count or not by_data)

    def _end_of_epoch(self, count: int) -> None:
        progress, adaptive, updater = self._progress, self._learner.adaptive, self._learner.updater
        progress.epoch += 1
        if updater.step_scheduler == "epoch":
            by_worth = adaptive is not None and progress.by == "progress"
            updater.tick(round(adaptive.epochs_worth) if adaptive and by_worth else progress.epoch)
        if not self._more(count):
            self._reporter.ended_at(progress.epoch)
        elif self._link is not None:
            self._link.at_epoch(progress.epoch)


# ---------------------------------------------------------------------- what is refused


def refuse_elsewhere(model: nn.Module, device: torch.device | str | None) -> None:
    """Refuse a model that is not on the device that the script names."""
    if device is None:
        return
    wanted = torch.device(device)
    for name, parameter in model.named_parameters():
        here = parameter.device
        if here.type != wanted.type or (wanted.index is not None and here.index != wanted.index):
            raise UsageError(
                f"model: {name} is on {here}, but the script says device={str(wanted)!r}; call "
                f"model.to({str(wanted)!r}) before building the optimizer"
            )


def refuse_strangers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that updates parameters of anything but the model."""
    own = {id(p) for p in model.parameters()}
    strangers = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
    if strangers:
        raise UsageError(
            f"optimizer: {len(strangers)} of its parameters are not the model's (the first has shape "
            f"{tuple(strangers[0].shape)}); build the optimizer from model.parameters(), after "
            "moving the model"
        )
