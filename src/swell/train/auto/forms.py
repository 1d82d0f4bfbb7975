"""How the outputs of a call of a model are made of those of parts of the batch, found out by trying.

Before a call of a kind is divided for the first time, all workers compute it whole and in two parts,
without gradients, and compare. Random numbers (dropout, noise) are constants in a try, and batch norm uses
its running statistics, so that only what mixes samples, or depends on their number, makes a difference.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from swell.train.auto import confinement

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
            return Form(why=confinement.SPARSE)
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
            return Form(why=confinement.UNDIVIDED)
        (whole, made), (first, as_first), (second, as_second) = results
        if not made == as_first == as_second:
            return Form(why=confinement.UNDIVIDED)
        if not all(_close(one, other) for part in left[1:] for one, other in zip(part, left[0])):
            return Form(why=confinement.UNDIVIDED)  # it keeps something of the samples (a queue of them, say)
        kinds = [_judge(w, a, b, cut, size) for w, a, b in zip(whole, first, second)]
        if any(kind == "" for kind in kinds):
            return Form(why=confinement.UNDIVIDED)
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
