"""The work of a batch, divided among the workers where the script calls its model.

All workers run the same script on the same numbers. Each draws the whole batch; a call of a model computes
this worker's part of the batch (a range of the first dimension of what the call is given), and gives the
script the outputs of all parts. So whatever the script computes of them, a loss over the whole batch of any
form for example, is what a single worker would have, and the same number on all.

Gradients. What the script computes of the outputs, all workers compute alike, and so the gradients of the
outputs are alike. From there each worker goes on through its own part only. Its gradients of the parameters
are then made of two kinds: those that came through its parts of calls, and those that all workers have alike,
of a penalty on the weights for example. The first must be added over the workers, the second must not. So
the first are multiplied by the number of workers (`scale`) where backward enters a part, and the average over
the workers is right for both. Where an input of a call needs a gradient (a generator's output in its critic),
its parts are gathered in backward, divided by `scale` again, so that what lies before the call is alike too.
The two ways across the border are each other's derivatives (`_Gather`, `_Scatter`), so gradients of gradients
are right as well.

A model can only be divided if its outputs of a batch are made of those of the batch's parts. That is tried
(`Forms`), and a script whose model cannot be divided runs on one worker.

Deaths. If a member is lost while outputs are gathered, the call is made again by those that are left. If it
is lost later, its parts have no gradients: the leader computes these again (`settle`), from what the call was
given and the gradients of its outputs. What all compute alike then counts for fewer workers than before, so
the leader's counts more often.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from swell.train.agent.errors import RESPAWN
from swell.train.auto.fingerprint import LateSums, sums
from swell.train.auto.job import (
    NO_CALL,
    SPARSE,
    UNDIVIDED,
    MembersChangedError,
    ScriptJob,
    ScriptRun,
    ScriptStage,
    confine,
    say,
)
from swell.train.auto.position import Position, leave, place
from swell.train.data import plan
from swell.train.data.plan import Range

ROWS, MEAN, SUM, ALIKE, OTHER = "rows", "mean", "sum", "alike", "other"
"""A row for each sample; a mean or a sum over them; the same for any samples; no tensor, and the same."""
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_OF_ONE_NUMBER = 0.1
"""A mean over samples is one number, that much more exact than the largest of many."""
_ZEROS = 50
"""So many tries may be without an answer because a loss is 0."""
_NORMS = (nn.modules.batchnorm._BatchNorm,)


@dataclass
class Form:
    """How a module's outputs are made of those of its parts."""

    kinds: list[str] = field(default_factory=list)
    """For each output."""
    random: bool = False
    """Whether the module draws random numbers of torch."""
    why: str = ""
    """Why the module cannot be divided, or ''."""
    open: bool = False
    """True if an output was 0, so that nothing can be said."""
    uses: int = 0

    @property
    def due(self) -> bool:
        """Whether to try again: a mean over samples may turn out to be one over something else."""
        if not any(kind in (MEAN, SUM) for kind in self.kinds):
            return False
        return self.uses & (self.uses - 1) == 0 if self.uses < 128 else self.uses % 128 == 0


class Forms:
    """What was found out of each module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._of: weakref.WeakKeyDictionary[nn.Module, dict[Any, Form]] = weakref.WeakKeyDictionary()
        self._zeros = 0
        self._generation = -1

    def known(self, module: nn.Module, leaves: list[Any], spec: Any, generation: int) -> Form | None:
        """The form of such a call, if it is known and need not be tried again.

        Newcomers have tried nothing, and all must try at the same time: so all begin anew with them.
        """
        if generation != self._generation:
            self._generation, self._zeros = generation, 0
            self._of.clear()
        form = self._of.get(module, {}).get(_kind(module, leaves, spec))
        if form is None:
            return None
        form.uses += 1
        return None if form.due else form

    def keep(self, module: nn.Module, leaves: list[Any], spec: Any, form: Form) -> Form | None:
        """Remember a form that all workers agree on; None if it says nothing yet."""
        if not form.kinds:
            return None
        before = self._of.setdefault(module, {}).get(_kind(module, leaves, spec))
        form.uses = before.uses if before is not None else 1
        self._of[module][_kind(module, leaves, spec)] = form
        return form

    def find(self, module: nn.Module, leaves: list[Any], spec: Any, size: int) -> Form:
        """Try the call whole and in two parts."""
        tried = getattr(module, "_orig_mod", module)
        if any(getattr(m, "sparse", False) is True for m in tried.modules()):
            return Form(why=SPARSE)
        cut = max(2, size // 2 - 1)
        quiet = _Quiet()
        results: list[Any] = []
        left: list[list[Tensor]] = []
        try:
            with _as_it_was(tried), torch.no_grad(), quiet:
                for low, high in ((0, size), (0, cut), (cut, size)):
                    with kept_buffers(tried), _same_choices():
                        part = [x[low:high] if is_cut(x, size) else x for x in leaves]
                        args, kwargs = pytree.tree_unflatten(part, spec)
                        results.append(pytree.tree_flatten(self._call(tried, *args, **kwargs)))
                        left.append([t.detach().clone() for t in _changing(tried)])
        except Exception:
            return Form(why=UNDIVIDED)
        (whole, made), (first, as_first), (second, as_second) = results
        if not made == as_first == as_second:
            return Form(why=UNDIVIDED)
        if not all(_close(one, other) for part in left[1:] for one, other in zip(part, left[0])):
            return Form(why=UNDIVIDED)  # it keeps something of the samples (a queue of them, say)
        kinds = [_judge(w, a, b, cut, size) for w, a, b in zip(whole, first, second)]
        if any(kind == "" for kind in kinds):
            return Form(why=UNDIVIDED)
        if any(kind is None for kind in kinds):
            self._zeros += 1
            if self._zeros < _ZEROS:
                return Form(open=True)
        return Form([kind or ALIKE for kind in kinds], quiet.seen)


def batch_size(leaves: list[Any]) -> int:
    """The length of the first dimension of the first tensor that has one; 0 if there is none."""
    return next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()), 0)


def is_cut(leaf: Any, size: int) -> bool:
    """Whether something that a module is given has a row for each sample."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


def _kind(module: nn.Module, leaves: list[Any], spec: Any) -> Any:
    """What calls have in common that are divided alike."""
    inputs = tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else type(x) for x in leaves)
    return module.training, inputs, str(spec)


def _judge(whole: Any, first: Any, second: Any, cut: int, size: int) -> str | None:
    """How an output of the whole batch is made of those of two parts; '' if it is not, None if unknown."""
    if not isinstance(whole, Tensor):
        plain = whole is None or type(whole) in (bool, int, float, str)
        same = plain and whole == first == second
        cache = type(whole).__module__.startswith("transformers.cache_utils")
        return OTHER if same or (cache and type(whole) is type(first)) else ""
    if [x.shape[:1] for x in (whole, first, second)] == [(size,), (cut,), (size - cut,)]:
        fit = whole.shape[1:] == first.shape[1:] == second.shape[1:]
        return ROWS if fit and _close(torch.cat([first, second]), whole) else ""
    if not whole.shape == first.shape == second.shape:
        return ""
    if not whole.is_floating_point():
        return ALIKE if torch.equal(whole, first) and torch.equal(whole, second) else ""
    exact = _OF_ONE_NUMBER if whole.numel() == 1 else 1.0
    if _close(first, whole, exact) and _close(second, whole, exact):
        return None if not whole.any() else ALIKE
    if _close((first.double() * cut + second.double() * (size - cut)) / size, whole, exact):
        return MEAN
    return SUM if _close(first.double() + second.double(), whole, exact) else ""


def _close(one: Tensor, other: Tensor, exact: float = 1.0) -> bool:
    if one.shape != other.shape:
        return False
    if not other.is_floating_point() and not other.is_complex():
        return torch.equal(one, other)
    finite = other[torch.isfinite(other)].abs()
    most = float(finite.max()) if finite.numel() else 0.0
    allowed = most * exact * _TOLERANCE.get(other.dtype, 1e-3)
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=allowed, equal_nan=True)


class _Quiet(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random numbers become constants, which do not depend on how many there are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        """Whether there were any."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [a.name for a in func._schema.arguments]
        name = func._schema.name
        if "dropout_p" in names:  # attention
            at = names.index("dropout_p")
            self.seen = self.seen or bool(
                (args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)) or 0.0
            )
            if at < len(args):
                args = (*args[:at], 0.0, *args[at + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
            return func(*args, **kwargs)
        self.seen = True
        if "native_dropout" in name:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            if out.is_floating_point():
                out.fill_(1.0 if "bernoulli" in name else 0.5)
            elif "randperm" not in name and "multinomial" not in name:
                out.zero_()
        return out


@contextlib.contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Try with batch norm's running statistics, and set all random numbers back."""
    norms = [m for m in module.modules() if isinstance(m, _NORMS) and m.training]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


@contextlib.contextmanager
def _same_choices() -> Iterator[None]:
    """What is chosen by Python's or numpy's random numbers (layers that are left out) is chosen alike."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Afterwards all that a call may change is as before: buffers, averages of parameters, counters."""
    kept = [(t, t.detach().clone()) for t in _changing(module)]
    attributes = [
        (vars(m), {k: _copied(v) for k, v in vars(m).items() if k not in _OF_TORCH}) for m in module.modules()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        for present, before in attributes:
            for name in present.keys() - before.keys() - _OF_TORCH:
                del present[name]
            present.update(before)


def _changing(module: nn.Module) -> list[Tensor]:
    """Buffers, and frozen parameters, which may be averages of others."""
    return [*module.buffers(), *(p for p in module.parameters() if not p.requires_grad)]


_OF_TORCH = frozenset(vars(nn.Module()))
"""What every module of torch has."""


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value


# ---------------------------------------------------------------------- a call, divided


_LARGE_BYTES = 256 << 10
_TWICE = "computes gradients of gradients"
_MIXED = "normalizes over the whole batch (SyncBatchNorm)"
"""What a step may do that makes a worker's lost part impossible to compute again."""
_WITHOUT = 3
"""After so many batches without a call that could be divided, more than one worker is of no use."""


class DividedCall:
    """One call of a model that was divided: all that is needed to compute a part of it again."""

    def __init__(
        self,
        own: Callable[..., Any],
        module: nn.Module,
        leaves: list[Any],
        spec: Any,
        size: int,
        form: Form,
    ) -> None:
        self._own = own
        self.module = module
        self.leaves = leaves
        self.spec = spec
        self.size = size
        self.form = form
        self.owners: list[str] = []
        """The workers that computed the parts."""
        self.ranges: list[Range] = []
        self.mine = 0
        """The part that this worker computed."""
        self.counts = True
        """False if that part is another worker's: there are more workers than parts."""
        self.holders: list[str] = []
        """The workers that have the gradients of the parts, in the present backward pass."""
        self.mixes = False
        """True if its parts know of each other (`Dividing.norm`): none can be computed again alone."""
        self.grads: dict[int, Tensor] = {}
        """By place among the outputs: their gradients, of the whole batch, in the present backward pass."""
        self._buffers = [(b, b.detach().clone()) for b in module.buffers() if b.nbytes <= _LARGE_BYTES]
        """Large ones are tables and masks, which no call changes."""
        self._random = _random_states(self._device)
        self._casts = _casts(self._device)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def inputs(self, part: int, scatter: Callable[[int, Tensor], Tensor] | None = None) -> tuple[Any, Any]:
        """Arguments of the module for a part; `scatter` takes the part of a tensor that needs a gradient."""
        low, high = self.ranges[part]
        cut = [
            leaf
            if not is_cut(leaf, self.size)
            else scatter(index, leaf)
            if scatter is not None and leaf.requires_grad
            else leaf[low:high]
            for index, leaf in enumerate(self.leaves)
        ]
        args, kwargs = pytree.tree_unflatten(cut, self.spec)
        return args, kwargs

    @contextlib.contextmanager
    def randomness(self, part: int) -> Iterator[None]:
        """Random numbers of torch for a part: of its own, and afterwards the same on all workers."""
        kept = _random_states(self._device)
        if self.form.random:
            _set_random(self._device, self._random)
            digest = hashlib.blake2b(self._random[0].numpy().tobytes() + bytes([part % 256]), digest_size=8)
            torch.manual_seed(int.from_bytes(digest.digest()) >> 1)
        begun = _random_states(self._device) if self.form.random else kept
        try:
            yield
        finally:
            if any(not torch.equal(a, b) for a, b in zip(_random_states(self._device), begun)):
                self.form.random = True
            _set_random(self._device, kept)

    def again(self, part: int, wanted: Sequence[Tensor], *, inputs: bool = False) -> list[Tensor | None]:
        """Gradients that come through a part: of `wanted`, and with `inputs` of each input that needs one."""
        low, high = self.ranges[part]
        own: dict[int, Tensor] = {}

        def detached(index: int, leaf: Tensor) -> Tensor:
            own[index] = leaf.detach()[low:high].clone().requires_grad_()
            return own[index]

        with torch.enable_grad(), kept_buffers(self.module), self.randomness(part), self._cast():
            self.set_buffers_back()
            args, kwargs = self.inputs(part, detached)
            outputs = pytree.tree_leaves(self._own(self.module, *args, **kwargs))
            roots, begin = [], []
            for place, grad in self.grads.items():
                by_rows = self.form.kinds[place] == ROWS
                roots.append(outputs[place] if by_rows else outputs[place].unsqueeze(0))
                begin.append(grad[low:high] if by_rows else grad[part : part + 1])
            of = [*wanted, *(own.values() if inputs else ())]
            if not roots or not of:
                return [None] * len(of)
            return list(torch.autograd.grad(roots, of, begin, allow_unused=True))

    @torch.no_grad()
    def set_buffers_back(self) -> None:
        """Give the module's buffers what they had before the call."""
        for buffer, value in self._buffers:
            buffer.copy_(value)

    def place_among_inputs(self, leaf: int) -> int:
        """Which of the inputs that need a gradient `leaf` is."""
        needing = [i for i, x in enumerate(self.leaves) if is_cut(x, self.size) and x.requires_grad]
        return needing.index(leaf)

    @contextlib.contextmanager
    def _cast(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, on, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on))
            yield


class Dividing:
    """Divides the calls of the script's models, and makes their gradients those of the whole batch."""

    def __init__(self, run: ScriptRun, position: Position) -> None:
        self._run = run
        self._position = position
        self._pid = os.getpid()
        self._own = nn.Module.__call__
        self._forms = Forms(self._own)
        self._trained: weakref.WeakKeyDictionary[nn.Module, tuple[set[int], bool]] = (
            weakref.WeakKeyDictionary()
        )
        """By module: whether it has parameters that the job trains, and in which layout that was seen."""
        self.scale = 0
        """How many workers there were when the present backward pass entered the first part; 0: none yet."""
        self._noted: list[DividedCall] = []
        """The calls through which the present backward pass has gone."""
        self._repeated = 1
        """How often this worker's gradients have what all workers compute alike."""
        self._alike: dict[int, Tensor] | None = None
        self._present: DividedCall | None = None
        """The call whose part is being computed."""
        self._twice = False
        """True if gradients of gradients are computed, so that a lost part cannot be computed again."""
        self._calls = 0
        self._without = 0
        self.given: list[list[float]] = []
        """Sums over what models were given in calls of this batch that were not divided."""
        self._late = LateSums()
        self.rows = 1
        """How many rows the model was given last, before there was a job."""
        self.tried = False
        """True if this batch was computed whole to see whether a model can be divided."""

    @property
    def _job(self) -> ScriptJob:
        job = self._run.job
        assert job is not None
        return job

    # ------------------------------------------------------------------ calls

    def watch(self, *, on: bool) -> None:
        """Replace `nn.Module.__call__` by `call`, or restore it: one worker alone is not slowed down."""
        module: Any = nn.Module
        if on and module.__call__ is self._own:
            dividing = self

            def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                return dividing.call(module, args, kwargs)

            module.__call__ = called
        elif not on and module.__call__ is not self._own:
            module.__call__ = self._own
            self._forget_batch()  # others had it too when its calls were noted

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Modules that are called here are computed as they are."""
        module: Any = nn.Module
        watched, module.__call__ = module.__call__, self._own
        try:
            yield
        finally:
            module.__call__ = watched

    def leave_uncompiled(self, compiled: Any) -> None:
        """Have modules that `torch.compile` makes, of the class `compiled`, compile none of what is here.

        They take `__call__` of the module that they are made of, once and for all, when they are made.
        """
        initialize = compiled._initialize

        def unwatched(module: Any) -> None:
            with self._unwatched():
                initialize(module)

        compiled._initialize = unwatched

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The script calls `module`."""
        if self._run.job is None:
            return self._first_call(module, args, kwargs)
        if not self._divides(module):
            return self._own(module, *args, **kwargs)
        if self._job.confined:
            return self._alike_call(module, args, kwargs)
        with self._unwatched():
            while True:
                try:
                    return self._divided(module, args, kwargs)
                except MembersChangedError:
                    if self._job.world == 1:
                        return self._own(module, *args, **kwargs)

    def _first_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Compute a call before there is a job, and note how many rows it has."""
        if self._run.stage is ScriptStage.ALONE:
            self.watch(on=False)
        if not torch.is_grad_enabled() or threading.current_thread() is not threading.main_thread():
            return self._own(module, *args, **kwargs)
        self.rows = batch_size(pytree.tree_leaves((args, kwargs))) or self.rows
        with self._unwatched():
            return self._own(module, *args, **kwargs)

    def _divides(self, module: nn.Module) -> bool:
        job = self._run.job
        if job is None or self._run.stage is not ScriptStage.SHARED or not torch.is_grad_enabled():
            return False
        if job.world == 1 or job.forwarding:
            return False
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            return False
        if torch._C._current_graph_task_id() != -1:  # a checkpointed layer, computed again in backward
            return False
        main = self._position.main()
        if main is None or (main.over and not main.flight and not self._position.current):
            return False
        known = job.parameters_by_id()
        layout, trained = self._trained.get(module, (None, False))
        if layout is not known:
            trained = any(id(p) in known for p in module.parameters())
            self._trained[module] = known, trained
        return trained

    def _alike_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Compute a call as it is, as all workers do; what it is given is compared with the next step."""
        leaves = pytree.tree_leaves((args, kwargs))
        self.given += sums(leaves)
        self._late.add(leaves)
        with self._unwatched():
            return self._own(module, *args, **kwargs)

    def _divided(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        job = self._job
        leaves, spec = pytree.tree_flatten((args, kwargs))
        size = batch_size(leaves)
        form = self._form(module, leaves, spec, size) if size >= 4 else None
        ranges = plan.parts(size, max(1, min(job.world, size // 2)))
        if form is None or len(ranges) < 2:
            return self._alike_call(module, args, kwargs)
        call = DividedCall(self._own, module, leaves, spec, size, form)
        call.ranges, call.owners = ranges, list(job.members[: len(ranges)])
        call.mine, call.counts = job.rank % len(ranges), job.rank < len(ranges)
        with _back_if_lost(call), call.randomness(call.mine), self._computing(call):
            args, kwargs = call.inputs(call.mine, lambda i, leaf: _scattered(self, call, i, leaf))
            outputs = self._own(module, *args, **kwargs)
            found, out_spec = pytree.tree_flatten(outputs)
            if len(found) != len(form.kinds):
                self._confine(UNDIVIDED)
                raise MembersChangedError  # and so it is computed whole
            divided = [i for i, kind in enumerate(form.kinds) if kind in (ROWS, MEAN, SUM)]
            mine = [found[i] if form.kinds[i] == ROWS else found[i].unsqueeze(0) for i in divided]
            parts = self._gather("call", mine if call.counts else [], leaves)
        if form.random:
            torch.rand(1)  # other random numbers next time, on all workers
        for at, index in enumerate(divided):
            whole = torch.cat([parts[owner][at].to(mine[at].device) for owner in range(len(ranges))])
            if mine[at].requires_grad:
                whole = _gathered(self, call, index, mine[at], whole)
            if form.kinds[index] == MEAN:
                weights = [(high - low) / size for low, high in ranges]
                whole = (whole * whole.new_tensor(weights).view(-1, *[1] * (whole.dim() - 1))).sum(0)
            elif form.kinds[index] == SUM:
                whole = whole.sum(0)
            found[index] = whole
        self._calls += 1
        return pytree.tree_unflatten(found, out_spec)

    # ------------------------------------------------------------------ batch norm over all parts

    @contextlib.contextmanager
    def _computing(self, call: DividedCall) -> Iterator[None]:
        before, self._present = self._present, call
        try:
            yield
        finally:
            self._present = before

    def norm(self, module: nn.SyncBatchNorm, given: Tensor) -> Tensor:
        """SyncBatchNorm: where a call is divided, with the statistics of all its parts."""
        module._check_input_dim(given)
        job, call = self._run.job, self._present
        if call is None and torch._C._current_graph_task_id() != -1 and self._noted:
            call = self._noted[-1]  # a checkpointed layer, computed again in backward
        if not module.training or job is None or call is None:
            return nn.modules.batchnorm._BatchNorm.forward(module, given)
        call.mixes = True
        wide = given.double() if given.dtype is torch.float64 else given.float()
        over = [d for d in range(given.dim()) if d != 1]
        shape = [1, -1, *[1] * (given.dim() - 2)]
        count = wide.new_tensor([given.numel() // given.shape[1]])
        sums = _summed(self, call, torch.cat([wide.sum(over), count]))
        total = sums[-1]
        mean = sums[:-1] / total
        centered = wide - mean.view(shape)
        variance = _summed(self, call, centered.square().sum(over)) / total
        with torch.no_grad():
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
            if module.running_mean is not None and module.running_var is not None:
                part = module.momentum
                if part is None:
                    assert module.num_batches_tracked is not None
                    part = 1.0 / float(module.num_batches_tracked)
                module.running_mean.lerp_(mean.to(module.running_mean.dtype), part)
                unbiased = variance * total / (total - 1)
                module.running_var.lerp_(unbiased.to(module.running_var.dtype), part)
        out = centered * (variance + module.eps).rsqrt().view(shape)
        if module.weight is not None:
            out = out * module.weight.view(shape)
        if module.bias is not None:
            out = out + module.bias.view(shape)
        return out.to(given.dtype)

    def summed(self, call: DividedCall, mine: Tensor) -> Tensor:
        """The sum of such a tensor over all parts of a call, forward or backward."""
        backward = torch._C._current_graph_task_id() != -1
        if backward:
            self.scale = self.scale or self._job.world
            if not set(call.owners) <= set(self._job.members):
                self._go_back(_MIXED)
        try:
            parts = self._gather("norm", [mine] if call.counts else [])
        except MembersChangedError:
            if backward:
                self._go_back(_MIXED)
            raise
        members = self._job.members
        return torch.stack([parts[members.index(o)][0].to(mine.device) for o in call.owners]).sum(0)

    def _form(self, module: nn.Module, leaves: list[Any], spec: Any, size: int) -> Form | None:
        """How the module's outputs are made of its parts'; None if the call is not divided."""
        known = self._forms.known(module, leaves, spec, self._job.generation)
        if known is not None:
            return known
        self.tried = True
        form = self._forms.find(module, leaves, spec, size)
        said = {"kinds": form.kinds, "why": form.why, "random": form.random}
        verdict = self._job.share(self._header("trial") | {"verdict": said}, self._check)[0]["verdict"]
        form.kinds, form.why, form.random = verdict["kinds"], verdict["why"], verdict["random"]
        if form.why:
            self._confine(form.why)
            return None
        return self._forms.keep(module, leaves, spec, form)

    def _confine(self, reason: str) -> None:
        if not self._job.confined:
            confine(self._run, self._job, reason)

    def batch_computed(self) -> None:
        """A batch was computed and exchanged: are workers of any use to this script?"""
        if self._job.world > 1 and not self.tried:
            self._without = 0 if self._calls else self._without + 1
            if self._without >= _WITHOUT:
                self._confine(NO_CALL)
        self._forget_batch()

    def told(self) -> list[list[float]]:
        """What all workers were given alike: in this batch, and, where a device was, in the one before."""
        return self.given + self._late.read(self._job.generation)

    def _forget_batch(self) -> None:
        job = self._run.job
        self._late.batch_computed(-1 if job is None else job.generation)
        self._calls, self.tried, self.given = 0, False, []

    # ------------------------------------------------------------------ across the border, and back

    def _header(self, doing: str) -> dict[str, Any]:
        return place(self._job, self._position, doing)

    def _check(self, headers: list[dict[str, Any]]) -> None:
        leave(self._run, self._job, headers)

    def _gather(self, doing: str, mine: list[Tensor], given: Sequence[Any] = ()) -> list[list[Tensor]]:
        self._late.add(given)
        return self._job.gather(self._header(doing) | {"given": sums(given)}, mine, self._check)

    def begin_backward(self) -> None:
        """The script computes gradients that are added to those of its parameters."""
        for call in self._noted:
            call.grads.clear()
        self._noted = []

    def entered(self, call: DividedCall, leaf: int | None, grad: Tensor) -> float:
        """Backward enters a part of `call`; returns the factor of this worker's gradients."""
        self.scale = self.scale or self._job.world
        self._twice = self._twice or torch.is_grad_enabled()
        if leaf is not None:
            if call not in self._noted:
                self._noted.append(call)
                call.grads.clear()
                call.holders = list(call.owners)
            call.grads[leaf] = call.grads[leaf] + grad if leaf in call.grads else grad.detach()
        return float(self.scale) if call.counts else 0.0

    def left(self, call: DividedCall, leaf: int | None, grad: Tensor) -> Tensor:
        """Backward leaves a part of `call` by an input; returns the gradient of the whole of that."""
        self.scale = self.scale or self._job.world
        true = grad / self.scale
        while True:
            members = self._job.members
            lost = [i for i, owner in enumerate(call.owners) if owner not in members]
            if lost and call.mixes:
                self._go_back(_MIXED)
            if lost and (torch.is_grad_enabled() or leaf is None):
                self._go_back(_TWICE)
            parts: list[list[Tensor]] = [[]] * len(members)
            if len(members) > 1:
                try:
                    parts = self._gather("input", [true] if call.counts else [])
                except MembersChangedError:
                    continue
            pieces = []
            for index, owner in enumerate(call.owners):
                if owner == self._job.name:
                    pieces.append(true.detach())
                elif owner in members:
                    pieces.append(parts[members.index(owner)][0].to(true.device))
                else:
                    assert leaf is not None
                    with self._unwatched():
                        found = call.again(index, [], inputs=True)[call.place_among_inputs(leaf)]
                    low, high = call.ranges[index]
                    pieces.append(true.new_zeros(high - low, *true.shape[1:]) if found is None else found)
            whole = torch.cat(pieces)
            if torch.is_grad_enabled() and true.requires_grad:
                whole = _gathered(self, call, None, true, whole)
            return whole

    def _go_back(self, doing: str) -> NoReturn:
        """A part is lost that cannot be computed again: all go back to the last checkpoint."""
        why = f"a worker was lost within a step that {doing}"
        self._run.link.event("went_back", step=self._job.steps, reason=why)
        say(f"{why}; the job goes on from its last checkpoint")
        self._run.link.flush()
        os._exit(RESPAWN)

    # ------------------------------------------------------------------ gradients that are missing

    def settle(self) -> None:
        """Make up for members that were lost since backward began: before every try to add the gradients."""
        job = self._job
        members, me = job.members, job.name
        if not self.scale:
            return
        lost = [call for call in self._noted if not set(call.holders) <= set(members)]
        missing = self.scale - len(members)
        if lost and self._twice:
            self._go_back(_TWICE)
        if missing and any(call.mixes for call in self._noted):
            self._go_back(_MIXED)
        leads = me == members[0]
        if leads and missing + 1 > self._repeated:
            self._repeat_alike(missing + 1 - self._repeated)
            self._repeated = missing + 1
        for call in lost:
            for part, holder in enumerate(call.holders):
                if holder not in members:
                    call.holders[part] = members[0]
                    if leads:
                        self._add(call, part, self.scale)

    def _repeat_alike(self, times: int) -> None:
        """Count what all workers compute alike `times` more often: fewer workers are left to add it."""
        wanted = self._job.trained()
        if self._alike is None:
            alike = {id(p): p.grad.detach().clone() for p in wanted if p.grad is not None}
            for call in self._noted:
                for part, holder in enumerate(call.holders):
                    if holder == self._job.name:
                        with self._unwatched():
                            again = call.again(part, wanted)
                        for p, grad in zip(wanted, again):
                            if grad is not None and id(p) in alike:
                                alike[id(p)] -= self.scale * grad
            self._alike = alike
        for p in wanted:
            if p.grad is not None and id(p) in self._alike:
                p.grad.add_(self._alike[id(p)], alpha=times)

    @torch.no_grad()
    def _add(self, call: DividedCall, part: int, factor: float) -> None:
        wanted = self._job.trained()
        with self._unwatched():
            again = call.again(part, wanted)
        for p, grad in zip(wanted, again):
            if grad is not None:
                p.grad = factor * grad if p.grad is None else p.grad.add_(grad, alpha=factor)

    def done(self) -> None:
        """The gradients of a backward pass are those of all workers now."""
        self.begin_backward()
        self.scale, self._repeated, self._alike, self._twice = 0, 1, None, False


class _Gather(torch.autograd.Function):
    """From this worker's part to the whole batch; backward takes this worker's part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, dividing: Dividing, call: DividedCall, leaf: int | None, mine: Tensor, whole: Tensor
    ) -> Tensor:
        ctx.dividing, ctx.call, ctx.leaf, ctx.rows = dividing, call, leaf, mine.shape[0]
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        factor = ctx.dividing.entered(ctx.call, ctx.leaf, grad)
        return None, None, None, _scattered(ctx.dividing, ctx.call, None, grad) * factor, None


class _Scatter(torch.autograd.Function):
    """From the whole batch to this worker's part; backward gathers the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, dividing: Dividing, call: DividedCall, leaf: int | None, whole: Tensor) -> Tensor:
        ctx.dividing, ctx.call, ctx.leaf = dividing, call, leaf
        if whole.shape[0] == len(call.ranges) != call.size:  # a number of each part, and not of each sample
            return whole[call.mine : call.mine + 1].clone()
        low, high = call.ranges[call.mine]
        return whole[low:high].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, ctx.dividing.left(ctx.call, ctx.leaf, grad)


class _Sum(torch.autograd.Function):
    """The sum over all parts of a call; its gradient is the sum of those that all parts have of it."""

    @staticmethod
    def forward(ctx: Any, dividing: Dividing, call: DividedCall, mine: Tensor) -> Tensor:
        ctx.dividing, ctx.call = dividing, call
        return dividing.summed(call, mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        whole = _summed(ctx.dividing, ctx.call, grad)
        return None, None, whole if ctx.call.counts else whole * 0.0


_summed: Any = _Sum.apply
_gathered: Any = _Gather.apply
_scattered: Any = _Scatter.apply


@contextlib.contextmanager
def _back_if_lost(call: DividedCall) -> Iterator[None]:
    """Set the module's buffers back if members are lost, because the call is made again then."""
    try:
        yield
    except MembersChangedError:
        call.set_buffers_back()
        raise


def _random_states(device: torch.device) -> tuple[Tensor, ...]:
    host = torch.get_rng_state()
    return (host,) if device.type != "cuda" else (host, torch.cuda.get_rng_state(device))


def _set_random(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _casts(device: torch.device) -> list[tuple[str, bool, torch.dtype]]:
    kinds = dict.fromkeys(("cpu", device.type))
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
