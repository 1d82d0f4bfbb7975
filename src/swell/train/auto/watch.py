"""`swell run --auto train.py`: an ordinary single-device script, data-parallel and elastic, unchanged.

This follows CoDDL (NSDI'21, section 3), which does the same for its users' graphs. Here the job is a Python
script, which is observed at three places only:

- `DataLoader.__iter__`: a pass in which the optimizer steps is a *training pass*. Each worker gets its part
  of every batch, so the global batch is the script's own. Every worker runs other passes (evaluation) whole.
- the end of `loss.backward()` (hooks on the parameters): gradients are averaged over the workers, weighted by
  samples. Whatever the script does then (clipping, GradScaler, logging) sees what one device would see.
- `optimizer.step()` (torch's global step hooks): counts steps; the first step shows what is trained.

The script's position is (training pass, batch). Membership changes when the script asks for its next batch
and no gradient is pending, because then none of its state is in the middle of a change. A newcomer runs the
same script, gets a single batch in every pass that is over (its output and `torch.save` do nothing), waits in
the running pass, and receives model, optimizer, schedulers and the script's plain variables; then it goes on
like the others. The samples of a worker that dies during a step come again with the next batch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset

from swell.train.agent.client import JobClient
from swell.train.agent.errors import RESPAWN
from swell.train.agent.jobdir import JobDirectory
from swell.train.auto import script as auto_script
from swell.train.auto.job import ScriptJob
from swell.train.auto.output import LeaderOnly
from swell.train.auto.passes import Pass
from swell.train.data import plan
from swell.train.data.loader import fetch, key
from swell.train.data.plan import Tree
from swell.train.data.pool import LoaderPool
from swell.train.sync.link import Link
from swell.train.sync.mesh import Header
from swell.train.sync.reducer import Reduced
from swell.train.sync.transfer import _cloned as cloned

NO_LOADER = "it steps its optimizer without having drawn a batch from a DataLoader"
ITERABLE = "its DataLoader has an iterable data set, which has no indices to cut"
UNBATCHED = "its DataLoader has no batches to cut (batch_size=None)"
CLOSURE = "it gives optimizer.step() a closure, which may run the model any number of times"
OPTIMIZERS = "it has more than one optimizer"
DISTRIBUTED = "it sets up torch.distributed by itself"
FROZEN = "parameters that were frozen at the first step are trained now; use swell.elastic instead of --auto"


class Watch:
    """Observes what the script does and makes it one worker of a job."""

    def __init__(self, script: Path, link: Link, whole_iter: Callable[[Any], Iterator[Any]]) -> None:
        self.root = script.resolve().parent
        self.link = link
        self.job: ScriptJob | None = None
        self.seed = 0
        self.alone = False
        """True if the script cannot be shared among workers: it runs as it is, on one worker."""
        self._left = False
        self._pid = os.getpid()
        self._whole_iter = whole_iter
        self._trains: weakref.WeakKeyDictionary[DataLoader[Any], bool] = weakref.WeakKeyDictionary()
        self._pools: weakref.WeakKeyDictionary[DataLoader[Any], LoaderPool] = weakref.WeakKeyDictionary()
        self._odd = NO_LOADER
        self._pass: Pass | None = None
        self._passes = 0
        """The number of training passes that have begun."""
        self._founding = False
        self._dirty = False
        """True if a backward pass has run since the last step."""
        self._queued = False
        self._agreed = 0
        self._counts = False
        """True if the script does not step with every batch or leaves passes early: then its count of batches
        matters."""
        self._last = Reduced([], 0.0, 0.0)
        self._strangers: list[Tensor] = []
        self._given: dict[str, Any] = {}

    # ------------------------------------------------------------------ loaders

    def open(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The script begins to iterate `loader`."""
        if self.alone or os.getpid() != self._pid:
            return self._whole_iter(loader)
        trains = self._trains.get(loader)
        if not torch.is_grad_enabled() or trains is False:
            return self._evaluation(loader)
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            self._odd = ITERABLE if isinstance(loader.dataset, IterableDataset) else UNBATCHED
            self._pass = None
            return self._whole_iter(loader)
        self.seed = self.seed or torch.initial_seed() & (2**53 - 1)
        order = key(self.seed, self._passes)
        return Pass(loader, self._passes, order, self.draw, training=bool(trains))

    def _evaluation(self, loader: DataLoader[Any]) -> Iterator[Any]:
        for batch in self._whole_iter(loader):
            yield batch
            if self._forwarding:
                return

    def draw(self, here: Pass) -> Any:
        """The next batch of `here` for this worker."""
        self._queued = False
        if here.over or self.alone:
            return self._whole(here)
        if not here.training:
            return self._whole(here)
        job = self.job
        assert job is not None
        if here.drawn == 0:
            self._begin_pass(here)
        self._pass = here
        here.advance()
        if job.forwarding:
            idle = self._forward(here)
            if idle is not None:
                return self._fetch(here, idle)
        elif here.window:  # no backward pass followed the last batch: this is not training
            here.to_evaluation()
            return self._whole(here)
        self._boundary()
        if here.at_end():
            here.over = True
            raise StopIteration
        mine = here.take(job.rank, job.world)
        if here.loader.num_workers:
            pool = self._pool(here.loader)
            pool.plan(here.upcoming(job.rank, job.world, 2 * here.loader.num_workers), None)
        return self._fetch(here, mine)

    def _whole(self, here: Pass) -> Any:
        if here.window and not here.over:
            here.index += 1
        if here.over or here.index >= len(here.batches) or (self._forwarding and here.drawn):
            if here.drawn and not here.over and not self._forwarding:
                self._trains.setdefault(here.loader, False)
            here.over = True
            raise StopIteration
        self._pass = here
        return self._fetch(here, here.take_whole())

    def _fetch(self, here: Pass, indices: list[int]) -> Any:
        if here.loader.num_workers:
            return self._pool(here.loader).get(indices, None)
        return fetch(here.loader.dataset, indices, here.loader.collate_fn, None)  # type: ignore[arg-type]

    def _pool(self, loader: DataLoader[Any]) -> LoaderPool:
        if loader not in self._pools:
            assert loader.collate_fn is not None
            made = LoaderPool(loader.dataset, loader.collate_fn, loader.num_workers)  # type: ignore[arg-type]
            self._pools[loader] = made
        return self._pools[loader]

    def _begin_pass(self, here: Pass) -> None:
        """Begin a training pass."""
        before = self._pass
        if before is not None and before is not here and before.training and not before.over:
            self._counts = True  # the script has left a pass before its end
        if here.ordinal != self._passes:
            here.ordinal = self._passes
            here.reorder(key(self.seed, here.ordinal))
        here.training = self._trains[here.loader] = True
        self._passes += 1
        self._pass = here
        if self.job is not None and not self.job.forwarding and not self._founding:
            self.job.epoch = here.ordinal
            self.link.at_epoch(here.ordinal)

    def _boundary(self) -> None:
        agreed, self._agreed = self._agreed, 0
        if self._dirty:
            self._counts = True
            if agreed:
                self.link.release()
            return
        assert self.job is not None
        try:
            self.job.boundary(agreed)
        except SystemExit:
            self._left = True
            raise

    # ------------------------------------------------------------------ catching up

    @property
    def _forwarding(self) -> bool:
        return self.job is not None and self.job.forwarding

    def _forward(self, here: Pass) -> list[int] | None:
        """Samples to compute without effect while catching up; None once caught up. May end the pass."""
        job = self.job
        assert job is not None
        while True:
            if here.ordinal > job.epoch:
                job._quit_rehearsal()
            if here.ordinal < job.epoch:
                if not here.drawn:
                    return here.idle()
                here.over = True
                raise StopIteration
            if self._dirty:  # go on until a step, so that gradient accumulation stays in phase
                return here.idle()
            if job.later is not None:
                if self._short_of(here, job.later["script"]):
                    return here.idle()
                job.arrive(job.later)
                self.link.at_epoch(here.ordinal)
            elif not job.join() or job.later is not None:
                continue
            here.reorder(key(self.seed, here.ordinal))
            here.go_to(self._given["position"])
            frames = auto_script.script_frames(self.root)
            auto_script.set_variables(frames, self._given["variables"], self.root)
            return None

    def _short_of(self, here: Pass, state: dict[str, Any]) -> int:
        """How many batches the script is behind, if its count of batches matters (negative: ahead)."""
        return int(state["position"]["batch"]) - here.drawn if state["counts"] else 0

    def is_at(self, state: dict[str, Any], steps: int) -> bool:
        """Whether the script stands where `state` was captured, after that many steps."""
        here = self._pass
        assert here is not None
        if self._founding:
            return steps == 0
        if here.ordinal != int(state["position"]["pass"]):
            return False
        short = self._short_of(here, state)
        if short < 0:  # the script has counted too many batches
            os._exit(RESPAWN)
        return short == 0

    # ------------------------------------------------------------------ state

    def capture(self) -> dict[str, Any]:
        """The script's position, its variables, and the states of its stateful objects."""
        assert self._pass is not None
        frames = auto_script.script_frames(self.root)
        return {
            "position": self._pass.position(),
            "seed": self.seed,
            "counts": self._counts,
            "variables": auto_script.variables(frames, self.root),
            "objects": {name: item.state_dict() for name, item in self._stateful(frames).items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `capture` gave; position and variables follow once the script has come there."""
        self.seed, self._counts = int(state["seed"]), bool(state["counts"])
        self._given = cloned(state)
        items = self._stateful(auto_script.script_frames(self.root))
        for name, value in self._given["objects"].items():
            if name in items:
                items[name].load_state_dict(value)

    def _stateful(self, frames: list[Any]) -> dict[str, Any]:
        assert self.job is not None
        own = {id(m) for m in self.job.model.modules()} | {id(self.job.optimizer)}
        return auto_script.stateful(frames, self.root, own)

    # ------------------------------------------------------------------ gradients and steps

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The script calls optimizer.step()."""
        if self.alone or os.getpid() != self._pid:
            return
        reason = self._why_not(optimizer, args, kwargs)
        if reason:
            self._run_alone(reason)
            return
        if self.job is None:
            self._begin(optimizer)
        assert self.job is not None
        here = self._pass
        if not self.job.forwarding and here is not None and here.window and not here.reduced:
            self._reduce()
        if any(p.grad is not None for p in self._strangers):
            raise SystemExit(_failed(f"--auto: {FROZEN}"))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        self._dirty = False
        if self.alone:
            self.link.step += 1
        elif self.job is not None and not self.job.forwarding:
            here = self._pass
            self.job.stepped(self._last, (here.loader.batch_size or len(here.window)) if here else 1)

    def _why_not(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> str:
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            return CLOSURE
        if self.job is not None:
            return "" if optimizer is self.job.optimizer else OPTIMIZERS
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return DISTRIBUTED
        if self._pass is None or not self._pass.window:
            return self._odd
        kinds = torch.optim.Optimizer
        named = auto_script.instances(auto_script.script_frames(self.root), kinds, self.root)
        return OPTIMIZERS if any(o is not optimizer for o in named) else ""

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the job, at the first step of the first training pass, which shows what is trained."""
        here = self._pass
        assert here is not None
        job = ScriptJob(self, auto_script.find_model(optimizer), optimizer, self.link, self.seed)
        trained = job.parameters()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        known = {id(p) for p in trained}
        self._strangers = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in known]
        self._founding, self.job = True, job
        self._begin_pass(here)
        found = job.begin()
        while not found and not job.rehearsing:
            found = job.join()
        self._founding = False
        if job.forwarding:
            return
        if job.rank != 0:  # every worker computes the first batch whole; only the leader's counts
            here.reorder(key(self.seed, 0))
            here.go_to(self._given["position"])
            here.window = here.batches[here.index]
            here.counts = False
        job.epoch = here.ordinal
        self.link.at_epoch(here.ordinal)

    def _on_gradient(self, _parameter: Tensor) -> None:
        """At the first gradient of a backward pass, ask for a call at its end, as torch's DDP does."""
        if not self._queued and not self.alone:
            self._queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._queued, self._dirty = False, True
        here = self._pass
        if self._forwarding or self.alone:
            return
        if here is not None and here.window and not here.training:  # this loader's first use in training
            self._begin_pass(here)
            here.counts = self.job is None or self.job.rank == 0
        self._reduce()

    def _reduce(self) -> None:
        """Average the gradients of the present batch over all workers that have a part of it."""
        job, here = self.job, self._pass
        assert job is not None
        if here is None or not here.window:  # no data in it: all workers computed the same
            header: Header = {"what": "step", "n": 1, "at": [-1, 0], "part": [0, 0]}
            size = job.world
        else:
            low, high = here.part
            at = [here.ordinal, here.index]
            header = {"what": "step", "n": high - low if here.counts else 0, "at": at, "part": [low, high]}
            size = len(here.window)
        header["steps"] = job.steps
        reduced = self._last = job.average(header, header["n"] / size, _tree)
        self._agreed = _common([h["candidate"] for h in reduced.headers])
        if header["candidate"] and not self._agreed:
            self.link.release()
        going = _going(reduced.headers)
        if going and (going[0]["at"], going[0]["steps"]) != (header["at"], header["steps"]):
            os._exit(RESPAWN)  # this worker's script is at another place: a new worker replaces it
        total = sum(h["n"] for h in going)
        if total and total != size:
            job.rescale(size / total)
        if here is None or not here.window:
            return
        here.reduced = True
        gaps = plan.missing(size, [(h["part"][0], h["part"][1]) for h in going])
        here.missing = [here.window[i] for low, high in gaps for i in range(low, high)]

    # ------------------------------------------------------------------ the end

    def leads(self) -> bool | None:
        """Whether this worker is the leader; None while that is not decided."""
        if self.alone:
            return True
        if self.job is None:
            return None
        return self.job.is_leader and not self.job.forwarding

    def finish(self) -> None:
        """The script has run to its end."""
        if self._left:
            return
        for pool in self._pools.values():
            pool.close()
        if self.job is None:
            if not self.alone:  # the script never trained
                self._be_the_only_one()
            self.link.done(0)
            self.link.flush()
        elif self.job.forwarding:
            self.job._quit_rehearsal()
        else:
            self.job._end()

    def _run_alone(self, reason: str) -> None:
        """Go on as a plain script, on one worker."""
        minimum = int(self.link.config["minimum"])
        line = f"--auto: this script cannot be shared among workers, because {reason}"
        if minimum > 1 or self.job is not None:
            more = "run it with --workers 1" if minimum > 1 or self.job is None else "run it without --auto"
            raise SystemExit(_failed(f"{line}; {more}"))
        self.alone = True
        sys.stderr.write(f"{line}; it runs on one worker\n")
        self._be_the_only_one()

    def _be_the_only_one(self) -> None:
        """Become the job's single worker; the coordinator ends the others."""
        with JobClient(self.link.directory, wait_s=10.0) as client:
            client.resize(1)
        epoch = int(self.link.welcome()["epoch"])
        while True:
            self.link.announce_ready(epoch)
            found = self.link.wait_join()
            if isinstance(found, int):
                epoch = found
            elif found.size == 1:
                self.link.entered(found, 0, epoch)
                return


def _going(headers: list[Header]) -> list[Header]:
    """Headers of the members with samples that are furthest and have stepped as often as the leader."""
    furthest = max(h["at"] for h in headers)
    steps = headers[0]["steps"]
    return [h for h in headers if h["n"] and h["at"] == furthest and h["steps"] == steps]


def _tree(headers: list[Header]) -> Tree | None:
    going = _going(headers)
    return plan.balanced([rank for rank, h in enumerate(headers) if any(h is g for g in going)])


def _common(candidates: list[int]) -> int:
    return candidates[0] if len(set(candidates)) == 1 else 0


def _failed(line: str) -> int:
    """Write the reason of a failure where the launcher looks for it; returns the exit code."""
    target = os.environ.get("SWELL_ERROR_FILE")
    if target:
        Path(target).write_text(f"{line}\n")
    sys.stderr.write(f"{line}\n")
    return 2


@contextlib.contextmanager
def watched(script: Path, directory: Path, worker: str) -> Iterator[None]:
    """Within this context the script that runs is one worker of the job in `directory`."""
    whole_iter, save, stdout = DataLoader.__iter__, torch.save, sys.stdout
    watch = Watch(script, Link(JobDirectory(directory), worker), whole_iter)
    output = LeaderOnly(stdout, watch.leads)

    def save_as_leader(*args: Any, **kwargs: Any) -> None:
        if os.getpid() != watch._pid or watch.leads() is not False:
            save(*args, **kwargs)

    patched: Any = DataLoader
    patched.__iter__ = lambda loader: watch.open(loader)
    torch.save = save_as_leader
    sys.stdout = output
    hooks = [
        register_optimizer_step_pre_hook(watch.before_step),
        register_optimizer_step_post_hook(watch.after_step),
    ]
    try:
        yield
    except SystemExit as stop:
        if stop.code in (None, 0):
            watch.finish()
        raise
    else:
        watch.finish()
    finally:
        if watch.leads() is not False:
            output.release()
        sys.stdout, torch.save = stdout, save
        patched.__iter__ = whole_iter
        for hook in hooks:
            hook.remove()
