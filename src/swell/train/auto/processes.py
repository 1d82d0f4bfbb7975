"""Scripts made for several processes, one per GPU: `torchrun`, DistributedDataParallel and their like.

Such a script runs unchanged in each worker, as the first of its processes (rank 0). Usually it is told that
it is the only one. Everything between processes then costs nothing: collectives of one member return what
they are given, and DistributedDataParallel only calls the module that it wraps, because swell divides that.

A line such as `torchrun --nproc-per-node 8 train.py` (`swell.domain.launch_line`) asks for 8 processes. They
need not exist: every step trains on the batches of all 8, one after the other in one batch, and that is
divided over the workers, however many there are. The script is told that there are 8 of them, so learning
rates and lengths are what they would be. DistributedDataParallel averages gradients over processes, and the
mean of a loss over 8 batches has that average as its gradient.

In collectives all 8 have the same numbers. A sum of floats counts as one of means, which the script divides
by the number of processes: it is multiplied by 8. An integer is a count over all 8 batches already, and
stays.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from swell.domain.launch_line import PROCESSES
from swell.train.agent.saying import first_to_say
from swell.train.auto.job import DISTRIBUTED, ScriptRun, ScriptStage, fail, run_alone

_BACKEND = "swell"
_dist: Any = dist


def asked() -> int:
    """How many processes the script was made for, as far as its job says."""
    text = os.environ.get(PROCESSES, "1")
    return max(1, int(text)) if text.isdigit() else 1


def announce(run: ScriptRun) -> None:
    """Say once in the job's output what several processes mean here."""
    count = run.processes
    if count > 1 and first_to_say(run.link.directory.path, PROCESSES):
        sys.__stderr__.write(  # type: ignore[union-attr]
            f"--auto: {count} processes were asked for: each step trains on the batches of all {count}, "
            f"divided over the workers. The loss must be a mean over its batch. What the script adds up over "
            f"processes is multiplied by {count} if it is a float (a mean, to be divided by the number of "
            f"processes), and stays if it is an integer (a count over all {count} batches). "
            f"More in docs/guides/frameworks.md\n"
        )


def check(run: ScriptRun, loader: DataLoader[Any]) -> None:
    """End the job if the script trains with a loader that does not give the batches of all its processes."""
    if run.processes == 1:
        return
    batches = loader.batch_sampler
    whole = isinstance(batches, BatchSampler) and type(batches).__iter__ is BatchSampler.__iter__
    if whole and _is_split(getattr(batches, "sampler", None), run.processes):
        return
    sampler = type(getattr(batches, "sampler", batches)).__name__
    found = (
        "data set is iterable" if isinstance(loader.dataset, IterableDataset) else f"sampler is a {sampler}"
    )
    fail(
        f"--auto: {run.processes} processes were asked for, and the script trains with a DataLoader whose "
        f"{found}, so each step would have the batch of one process only. Give the DataLoader "
        f"sampler=DistributedSampler(dataset) of torch.utils.data.distributed, or ask for one process and "
        f"multiply the batch size by {run.processes}"
    )


def check_drawn(run: ScriptRun) -> None:
    """End the job if batches that are drawn by hand are to be those of several processes."""
    if run.processes > 1:
        fail(
            f"--auto: {run.processes} processes were asked for, and the script draws its batches by hand, so "
            f"each step would have the batch of one process only. Ask for one process and multiply the batch "
            f"size by {run.processes}"
        )


def _is_split(sampler: Any, count: int) -> bool:
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas == count and sampler.rank == 0


# ---------------------------------------------------------------------- what torchrun sets


class _Environment(type(os.environ)):  # type: ignore[misc]
    """The environment of a script, with what torchrun sets beside it where nobody has set that.

    Accelerate and Lightning find nothing of it: in scripts that are run by plain python they would set up
    process groups of their own, or print ranks.
    """

    given: ClassVar[dict[str, str]] = {}

    def __getitem__(self, key: str) -> str:
        try:
            found: str = super().__getitem__(key)
        except KeyError:
            if key not in self.given or _reader().startswith(_NOT_TOLD):
                raise
            return self.given[key]
        return found

    def __delitem__(self, key: str) -> None:
        if self.given.pop(key, None) is None or key in list(self):
            super().__delitem__(key)


_NOT_TOLD = ("accelerate", "lightning", "pytorch_lightning", "transformers")


def _reader() -> str:
    """The module that reads the environment."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in ("os", "collections.abc", "_collections_abc"):
            return name
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def environment(run: ScriptRun) -> Iterator[None]:
    """Within this context the script finds the variables that torchrun sets."""
    count = str(run.processes)
    given = {"RANK": "0", "WORLD_SIZE": count, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": count}
    given["MASTER_ADDR"] = "127.0.0.1"
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as probe:
        given["MASTER_PORT"] = str(probe.getsockname()[1])
    kind, _Environment.given = type(os.environ), given
    os.environ.__class__ = _Environment
    try:
        yield
    finally:
        os.environ.__class__ = kind


# ---------------------------------------------------------------------- a process group of alike members

_to_kwargs: Any = getattr(importlib.import_module("torch.distributed.utils"), "_to_kwargs", None)
_ProcessGroup: Any = dist.ProcessGroup if dist.is_available() else object


class AlikeGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose members all have the same numbers; this process is its first member."""

    def __init__(self, size: int, gathering: Callable[[Tensor], None]) -> None:
        super().__init__(0, size)
        self._count = size
        self._gathering = gathering

    def getBackendName(self) -> str:
        """How torch calls this kind of group."""
        return _BACKEND

    @property
    def group_name(self) -> str:
        """How torch calls this group."""
        return str(_dist.distributed_c10d._world.pg_names.get(self, _BACKEND))

    def size(self) -> int:
        """How many members there are."""
        return self._count

    def rank(self) -> int:
        """The first one."""
        return 0

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Sums of alike numbers."""
        for tensor in tensors:
            self._add(tensor, opts)
        return _done(tensors)

    allreduce_coalesced = reduce = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """All have the same already."""
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        """All are here."""
        return _done([])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """A copy for each member."""
        for places, tensor in zip(outputs, inputs):
            self._gathering(tensor)
            for place in places:
                place.data.copy_(tensor)
        return _done(outputs)

    gather = allgather

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        """As `allgather`, into one tensor."""
        return self.allgather([list(output.chunk(self._count))], [given])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """As `all_gather_single`, of several."""
        for output, given in zip(outputs, inputs):
            self.all_gather_single(output, given)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """What the first member gives itself."""
        for output, parts in zip(outputs, inputs):
            output.data.copy_(parts[0])
        return _done(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """The sum of what all members give the first one."""
        for output, parts in zip(outputs, inputs):
            output.data.copy_(parts[0])
            self._add(output, opts)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        """As `reduce_scatter`, from one tensor."""
        return self.reduce_scatter([output], [list(given.chunk(self._count))], opts)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """What each member gives the first one: the first part of what it has."""
        first = inputs[0].clone()
        for output in outputs:
            output.data.copy_(first)
        return _done(outputs)

    def shutdown(self) -> None:
        """Nothing is open."""

    def _add(self, tensor: Tensor, opts: Any) -> None:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM:
            if self._count > 1 and (tensor.is_floating_point() or tensor.is_complex()):
                tensor.data.mul_(self._count)
        elif self._count > 1 and op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.BXOR, dist.ReduceOp.PREMUL_SUM):
            raise NotImplementedError(
                f"--auto: {op} over {self._count} processes: allowed are SUM, AVG, MIN, MAX, BAND and BOR"
            )


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)


class _Nothing:
    """In place of DistributedDataParallel's reducer and logger, which have nothing to do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None


# ---------------------------------------------------------------------- in place of torch's own


class Processes:
    """The process groups of one worker's script."""

    def __init__(self, run: ScriptRun, in_batch: Callable[[], bool], norm: Callable[..., Any]) -> None:
        """`in_batch`: whether a batch is drawn whose gradients are not computed; `norm`: see `installed`."""
        self._run = run
        self._in_batch = in_batch
        self._norm = norm
        self._pid = os.getpid()
        self._backend: Any = None
        """The backend that the script asked for."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this context groups are of alike members, and loaders give the batches of all of them.

        SyncBatchNorm asks `norm` for the statistics of the whole batch.
        """
        kept: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            if hasattr(owner, name):
                kept.append((owner, name, getattr(owner, name)))
                setattr(owner, name, make(getattr(owner, name)))

        replace(nn.SyncBatchNorm, "forward", lambda own: lambda module, x: self._norm(module, x))
        if dist.is_available():
            with contextlib.suppress(RuntimeError, AssertionError):  # it is known from an earlier script
                dist.Backend.register_backend(_BACKEND, self._make, devices=["cpu", "cuda"])
            dist.Backend._plugins[_BACKEND.upper()] = dist.Backend._BackendPlugin(self._make, False)
            ddp = nn.parallel.DistributedDataParallel
            module = sys.modules[ddp.__module__]
            replace(ddp, "_ddp_init_helper", _if_alike(_no_reducer))
            replace(ddp, "forward", _forward)
            replace(ddp, "register_comm_hook", _if_alike(_hook))
            replace(ddp, "join", _if_alike(lambda *_, **__: contextlib.nullcontext()))
            replace(module, "_verify_param_shape_across_processes", _unless_alike)
            replace(module, "_sync_module_states", _unless_alike)
            for owner in (dist, dist.distributed_c10d):
                replace(
                    owner,
                    "init_process_group",
                    lambda own: functools.wraps(own)(functools.partial(self._begin, own)),
                )
                replace(
                    owner,
                    "new_group",
                    lambda own: functools.wraps(own)(functools.partial(self._new_group, own)),
                )
                replace(
                    owner, "get_backend", lambda own: functools.wraps(own)(functools.partial(self._name, own))
                )
        if self._run.processes > 1:
            replace(BatchSampler, "__iter__", self._all_batches)
        try:
            yield
        finally:
            for owner, name, own in reversed(kept):
                setattr(owner, name, own)

    def leave_uncompiled(self, dynamo: Any) -> None:
        """Have `torch.compile` call SyncBatchNorm as it is: what that does depends on the workers."""
        self._norm = dynamo.disable(self._norm)

    def _make(self, store: Any, rank: int, size: int, timeout: Any) -> AlikeGroup:
        return AlikeGroup(size, self._gathering)

    def _begin(self, own: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The script calls `init_process_group`."""
        names = ("backend", "init_method", "timeout", "world_size", "rank", "store")
        given = dict(zip(names, args)) | options
        if os.getpid() != self._pid:
            return own(*args, **options)
        if _place_in_group(given) == (0, self._run.processes):
            self._backend = given.get("backend")
            own(_BACKEND, store=_dist.HashStore(), rank=0, world_size=self._run.processes)
            return None
        if self._run.stage is not ScriptStage.ALONE:
            run_alone(self._run, DISTRIBUTED)
        return own(*args, **options)

    def _new_group(self, own: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if is_alike():
            args = (*args[:2], None, *args[3:]) if len(args) > 2 else args
            options.pop("backend", None)
            options.pop("device_id", None)
        return own(*args, **options)

    def _name(self, own: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The backend that the script asked for, which it may look at."""
        found = own(*args, **options)
        if found != _BACKEND:
            return found
        wanted = self._backend or ("nccl" if torch.cuda.is_available() else "gloo")
        return str(wanted).lower()

    def _gathering(self, tensor: Tensor) -> None:
        """Refuse a loss over all processes' samples: each of them would count several times."""
        if self._run.processes > 1 and tensor.is_floating_point() and tensor.numel() > 1 and self._in_batch():
            count = self._run.processes
            fail(
                f"--auto: {count} processes were asked for, and the script gathers numbers of all of them in "
                f"the middle of a training batch, as losses over several processes do. Its batch has the "
                f"samples of all {count} already. Ask for one process and multiply the batch size by {count}"
            )

    def _all_batches(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Batches of a sampler for several processes: those of all of them, one after the other."""
        count = self._run.processes

        def batches(sampler: BatchSampler) -> Iterator[list[Any]]:
            if not _is_split(sampler.sampler, count):
                yield from own(sampler)
                return
            one_by_one = []
            for rank in range(count):
                mine = copy.copy(sampler)
                mine.sampler = copy.copy(sampler.sampler)
                mine.sampler.rank = rank  # type: ignore[attr-defined]
                one_by_one.append(own(mine))
            for of_all in zip(*one_by_one, strict=True):
                yield [index for batch in of_all for index in batch]

        return batches


def is_alike() -> bool:
    """Whether the script's process group is one of alike members."""
    return dist.is_available() and dist.is_initialized() and type(dist.group.WORLD) is AlikeGroup


def is_real() -> bool:
    """Whether the script has a process group of other processes."""
    return dist.is_available() and dist.is_initialized() and type(dist.group.WORLD) is not AlikeGroup


def shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a model or its optimizer is divided among processes (FSDP, ZeroRedundancyOptimizer)."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kinds = {type(optimizer), *map(type, parameters)}
    flat = any(hasattr(p, "_is_flat_param") for p in parameters)
    return flat or any(kind.__module__.startswith("torch.distributed") for kind in kinds)


def _place_in_group(given: dict[str, Any]) -> tuple[int, int]:
    """The rank and the size that a call of `init_process_group` names; -1 where it names none."""
    query = parse_qs(urlsplit(str(given.get("init_method") or "")).query)

    def find(name: str, variable: str) -> int:
        value = given.get(name, -1)
        if value in (-1, None):
            value = query.get(name, [os.environ.get(variable, -1)])[0]
        try:
            return int(value)
        except ValueError:
            return -1

    return find("rank", "RANK"), find("world_size", "WORLD_SIZE")


def _if_alike(instead: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replaces a method of DistributedDataParallel where its group is one of alike members."""

    def make(own: Any) -> Any:
        @functools.wraps(own)
        def method(self: Any, *args: Any, **options: Any) -> Any:
            chosen = instead if type(self.process_group) is AlikeGroup else own
            return chosen(self, *args, **options)

        return method

    return make


def _unless_alike(own: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is sent between alike members when a model is wrapped."""

    @functools.wraps(own)
    def function(*args: Any, **options: Any) -> Any:
        if any(type(a) is AlikeGroup for a in (*args, *options.values())):
            return None
        return own(*args, **options)

    return function


def _no_reducer(ddp: Any, parameters: Any, sparse: Any, names: Any, static_graph: bool = False) -> None:
    ddp.reducer = ddp.logger = _Nothing()
    ddp._members_are_alike = True
    ddp._static_graph_delay_allreduce_enqueued = False


def _forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """Call the module, with what it is given on its device. `torch.compile` reads this function."""

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_members_are_alike", False):
            return own(self, *inputs, **kwargs)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0][0], moved[1][0]
        return self.module(*inputs, **kwargs)

    return forward


def _hook(ddp: Any, state: Any, hook: Any) -> None:
    """A hook that compresses gradients on their way changes nothing: there is no way."""
    module = str(getattr(hook, "__module__", ""))
    if ddp.mixed_precision is not None or not module.startswith("torch.distributed.algorithms"):
        what = "mixed_precision" if ddp.mixed_precision is not None else "a communication hook of its own"
        fail(
            f"--auto: the script gives DistributedDataParallel {what}, which computes gradients in another "
            f"way; take it out (torch.autocast is fine), or run the script without --auto"
        )
