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
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swell.train import plan
from swell.train import state as states
from swell.train.crew import Crew
from swell.train.data import ElasticLoader, MapDataset, Share, key, seed_all
from swell.train.errors import LEFT, RESPAWN, PeerLost, UsageError
from swell.train.flat import FlatModel
from swell.train.jobdir import JobDirectory
from swell.train.link import Link
from swell.train.mesh import Header
from swell.train.plan import Range, Tree
from swell.train.ranks import LogicalRanks, PartialSums
from swell.train.reducer import Reduced

MODES = ("fixed", "adaptive", "consistent")


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
        link: Link | None = None,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"mode: got {mode!r}, must be one of {', '.join(MODES)}")
        if step_scheduler not in ("epoch", "step", "never"):
            raise UsageError(f"step_scheduler: got {step_scheduler!r}, must be epoch, step or never")
        if logical_ranks < 1:
            raise UsageError(f"logical_ranks: got {logical_ranks}, must be at least 1")
        _check_device(model, device)
        _check_optimizer(model, optimizer)
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
        self._clip_norm = clip_norm
        self._logical = logical_ranks
        self._ranks = LogicalRanks(model, logical_ranks, seed) if mode == "consistent" else None
        self._flat = FlatModel(model, self._ranks.named() if self._ranks else None)
        self._sums = PartialSums(list(self._flat.parameters.values()), self._flat.grad_in)
        self._link = link
        facts: Header = {"model": self._flat.layout.digest, "mode": mode, "logical_ranks": logical_ranks}
        self._crew = Crew(link, self._flat, self, facts)
        self._loaders: dict[str, ElasticLoader] = {}
        self._objects: dict[str, Any] = {}
        self._pending_loaders: dict[str, Any] = {}
        self._drawn: list[ElasticLoader] = []
        self._covered_by_others: dict[str, list[Range]] = {}
        self._entered = False
        self._rehearsing = False
        self._rehearsed = False
        self._turned: int | None = None
        self._ended = False
        self._metrics: dict[str, float] = {}
        self._last_commit_s = time.perf_counter()
        self._gave_state_at = -1
        self._prepared_for = 0
        self._batches = 0

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
    def is_leader(self) -> bool:
        """True on exactly one worker: the one that prints and saves."""
        return self._crew.rank == 0 and not self._rehearsing

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
                f"batch_size: got {batch_size}, but consistent mode has {self._logical} logical "
                "ranks, each of "
                f"which needs a sample; use at least {self._logical}, or fewer logical_ranks"
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
        if name in self._pending_loaders:
            made.load(self._pending_loaders.pop(name))
        return made

    def register(self, name: str, value: Any) -> Any:
        """Let `value` (anything with state_dict and load_state_dict) travel with the job; returns it."""
        if name in self._objects:
            raise UsageError(f"name: there are two objects called {name!r}; give each its own")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise UsageError(f"{name}: a {type(value).__name__} has no {method}(), so it cannot travel")
        self._objects[name] = value
        return value

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs still to train, up to `count`; a newcomer or a restart begins where the job is."""
        if count < 0:
            raise UsageError(f"epochs: got {count}, must be at least 0")
        self._enter()
        try:
            while self.epoch < count:
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

    def step(self, loss: Tensor) -> bool:
        """Use one batch's loss (its mean over the batch). True if this completed an optimizer step."""
        self.backward(loss)
        return self.commit()

    def backward(self, loss: Tensor) -> None:
        """The first half of `step`: add this batch's gradients."""
        if not self._drawn:
            raise UsageError(
                "job.step: no batch was drawn since the last step. Iterate a loader made by "
                "job.loader(...), and "
                "call job.step once for each batch"
            )
        share = self._drawn[0].share
        if self._rehearsing or share is None or share.current is None:
            self._scaled(loss).backward()  # type: ignore[no-untyped-call]
            return
        rank, (low, high) = share.current
        self._scaled(loss * ((high - low) / share.size)).backward()  # type: ignore[no-untyped-call]
        if self._ranks is not None:
            self._ranks.end(rank)
            self._sums.after(rank)
        self._mark_covered()

    def commit(self) -> bool:
        """The second half of `step`: if this worker's part is complete, sum with the others and update."""
        if self._rehearsing:
            self._rehearse_update()
            return False
        if not self._drawn or any(ld.share is None or ld.share.pending for ld in self._drawn):
            return False
        return self._sync()

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
        }
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
        self.epoch, self.steps = int(state["epoch"]), int(state["steps"])
        if self._ranks is not None:
            self._ranks.restore(state["rank_buffers"])
        self._flat.clear()

    def found(self) -> None:
        """Nobody has live state: begin from the newest checkpoint, if there is one."""

    # ------------------------------------------------------------------ the loop

    def _run_loader(self, loader: ElasticLoader) -> Iterator[Any]:
        self._enter()
        if not loader.train:
            batches = loader.evaluation(self.rank, self.world)
            for indices in batches[:1] if self._rehearsing else batches:
                yield loader.fetch(indices, keyed=False)
            return
        if self._rehearsing and not self._rehearsed:
            self._drawn = [loader]
            size = max(1, min(loader.window() or loader.batch_size, len(loader.dataset)))
            (low, high) = plan.parts(size, 2)[1] if size > 1 else (0, 1)
            yield loader.fetch(loader.indices((low, high)) or [0], keyed=False)
            self._rehearsed = True
        if self._rehearsing and not self._join():
            return
        while True:
            if loader.share is None:
                size = loader.window()
                if size == 0:
                    loader.turn()
                    return
                loader.share = self._new_share(loader, size)
            share = loader.share
            if loader not in self._drawn:
                self._drawn.append(loader)
            if share.current is not None:  # the script went on without stepping: a part without gradient
                self._mark_covered()
            if not share.pending:
                self._sync()
                continue
            share.current = share.pending.pop(0)
            rank, position = share.current
            batch = loader.fetch(loader.indices(position), keyed=self._ranks is not None)
            if self._ranks is not None:
                self._ranks.begin(rank, self.steps)
            yield batch

    def _positions(self, loader: ElasticLoader, size: int, rank: int, world: int) -> list[tuple[int, Range]]:
        """This worker's micro-batches of a step of `size` samples."""
        if self._ranks is not None:
            shares = plan.parts(size, self._logical)
            low, high = plan.blocks(self._logical, world)[rank]
            return [(r, shares[r]) for r in range(low, high) if shares[r][0] < shares[r][1]]
        mine = plan.parts(size, world)[rank]
        return [(-1, r) for r in plan.micro([mine], loader.micro_batch) if r[0] < r[1]]

    def _new_share(self, loader: ElasticLoader, size: int) -> Share:
        held = self._covered_by_others.pop(loader.name, None)
        if held:
            ranges = plan.divide(plan.missing(size, held), self.world)[self.rank]
            return Share(size, [(-1, r) for r in plan.micro(ranges, loader.micro_batch)])
        share = Share(size, self._positions(loader, size, self.rank, self.world))
        if self._ranks is not None:
            low, high = plan.blocks(self._logical, self.world)[self.rank]
            self._sums.start(plan.program(low, high, size, self._logical))
        return share

    def _mark_covered(self) -> None:
        for loader in self._drawn:
            share = loader.share
            if share is not None and share.current is not None:
                share.covered.append(share.current[1])
                share.current = None

    # ------------------------------------------------------------------ one step, together

    def _sync(self) -> bool:
        """Sum the gradients with everybody's and commit. False: somebody died, samples are to be redone."""
        share = self._drawn[0].share
        assert share is not None
        alone = self._crew.size == 1
        header: Header = {"what": "step", "n": share.samples, "candidate": self._offer()}
        if self._ranks is not None:
            if not alone:
                low, high = plan.blocks(self._logical, self.world)[self.rank]
                self._flat.gather_ranks(range(low, high))
        elif not alone and share.samples:
            unused = self._flat.gather(share.samples / share.size)
            if unused:
                header["unused"] = unused
        if alone:
            reduced = Reduced([header], 0.0, 0.0)
        else:
            try:
                reduced = self._crew.all_reduce(header, self._tree(share.size), squares=False)
            except PeerLost:
                if not self._recover():
                    return False
                assert self._crew.reducer.result is not None
                reduced = self._crew.reducer.result
        self._commit(reduced, alone)
        return True

    def _tree(self, size: int) -> Callable[[list[Header]], Tree | None]:
        if self._ranks is not None:
            return lambda headers: plan.worker_tree(self._logical, len(headers), size)
        return lambda headers: plan.balanced([r for r, h in enumerate(headers) if h["n"]])

    def _commit(self, reduced: Reduced, alone: bool) -> None:
        headers = reduced.headers
        if not alone:
            silent = [set(h.get("unused", ())) for h in headers if h["n"]]
            self._flat.adopt(set.intersection(*silent) if silent and self._ranks is None else set())
        elif self._ranks is not None:
            self._flat.adopt_inputs()
        self._update()
        self._flat.clear()
        for loader in self._drawn:
            assert loader.share is not None
            loader.advance(loader.share.size)
        self._drawn = []
        self._crew.completed()
        self.steps += 1
        if self.scheduler is not None and self._step_scheduler == "step":
            self.scheduler.step()
        if self._ranks is not None:
            self._ranks.between(self.steps)
        self._report(reduced)
        wanted = {h["candidate"] for h in headers}
        if len(wanted) == 1 and (number := wanted.pop()):
            self._switch(number)
        elif self._link is not None and header_offered(headers, self.rank):
            self._link.release()

    def _scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(loss) if self.scaler is not None else loss
        return scaled

    def _update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._flat.parameters.values(), self._clip_norm)
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

    def _report(self, reduced: Reduced) -> None:
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
            }

    # ------------------------------------------------------------------ membership

    def _offer(self) -> int:
        if self._link is None:
            return 0
        return self._link.offer()

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
            try:
                entered = self._crew.enter(found, {})
            except PeerLost:
                found.close()
                continue
            self._rehearsing, self._entered = False, True
            self._link.entered(found, self.steps, self.epoch)
            self._settle(entered.covered)
            self._begin_random()
            return True

    def _switch(self, number: int) -> None:
        """Everybody said yes to candidate `number` in the step that was just committed."""
        assert self._link is not None
        try:
            mesh = self._link.take(number)
        except PeerLost:
            self._recover()
            return
        if mesh is None:
            self._link.leaving(number)
            self._crew.close()
            raise SystemExit(LEFT)
        old = self._crew.mesh
        try:
            entered = self._crew.enter(mesh, {})
        except PeerLost:
            old.close()
            self._recover()
            return
        old.close()
        self._link.entered(mesh, self.steps, self.epoch)
        self._settle(entered.covered)

    def _recover(self) -> bool:
        """Somebody is gone: form the next generation. True if the present operation is complete after all."""
        if self._link is None:
            raise PeerLost("a job of one has no peers to lose")
        covered = self._coverage()
        while True:
            broken = self._crew.mesh.number
            self._crew.close()
            mesh = self._link.wait_recovery(broken)
            try:
                entered = self._crew.enter(mesh, covered)
                break
            except PeerLost:
                continue
        self._link.entered(mesh, self.steps, self.epoch)
        self._settle(entered.covered if not entered.complete else {}, keep=covered)
        if entered.complete:
            self._covered_by_others = dict(entered.covered)
        return entered.complete

    def _coverage(self) -> dict[str, list[Range]]:
        """Which samples of the present step this worker's gradients cover (none, if they cannot be kept)."""
        if len(self._drawn) == 1 and self._ranks is None:
            share = self._drawn[0].share
            return {self._drawn[0].name: list(share.covered)} if share is not None else {}
        self._flat.clear()
        for loader in self._drawn:
            loader.share = None
        self._drawn = []
        return {}

    def _settle(self, covered: dict[str, list[Range]], keep: dict[str, list[Range]] | None = None) -> None:
        """Hand out again what nobody has gradients for; whoever is in a step goes on with it."""
        self._covered_by_others = dict(covered)
        for loader in self._drawn:
            share = loader.share
            if share is None or not keep:
                continue
            held = self._covered_by_others.pop(loader.name, [])
            ranges = plan.divide(plan.missing(share.size, held), self.world)[self.rank]
            share.pending = [(-1, r) for r in plan.micro(ranges, loader.micro_batch)]

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
        self._drawn = []

    def _quit_rehearsal(self) -> None:
        """The script left its loop before this worker was part of the job: begin again in a fresh process."""
        os._exit(RESPAWN)

    def _end_of_epoch(self, count: int) -> None:
        self.epoch += 1
        if self.scheduler is not None and self._step_scheduler == "epoch":
            self.scheduler.step()
        if self._link is not None and self.epoch < count:
            self._link.at_epoch(self.epoch)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        for loader in self._loaders.values():
            loader.close()
        if self._link is not None:
            self._link.done()
            self._link.flush()


def header_offered(headers: list[Header], rank: int) -> bool:
    """Whether this worker had put a candidate into its header."""
    return bool(headers[rank]["candidate"])


def _check_device(model: nn.Module, device: torch.device | str | None) -> None:
    if device is None:
        return
    wanted = torch.device(device)
    for name, parameter in model.named_parameters():
        here = parameter.device
        if here.type != wanted.type or (wanted.index is not None and here.index != wanted.index):
            raise UsageError(
                f"model: {name} is on {here}, but device={str(wanted)!r} was announced; call "
                f"model.to({str(wanted)!r}) before building the optimizer"
            )


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(p) for p in model.parameters()}
    strangers = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
    if strangers:
        raise UsageError(
            f"optimizer: {len(strangers)} of its parameters are not the model's (the first has shape "
            f"{tuple(strangers[0].shape)}); build the optimizer from model.parameters(), after "
            "moving the model"
        )


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
