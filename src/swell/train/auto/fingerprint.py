"""State that must be equal on all workers of an unmodified script: it is set, or it is compared.

The optimizers' settings (learning rate, momentum, betas, any plain value of a group) follow the leader's at
each step. A script may set them by a number of its own part: `ReduceLROnPlateau` on the training loss, say.

Weights, buffers and the optimizers' state are compared by sums, a few tensors in each step and each of them
once in `ROTATION` steps. The sums are taken right after the gradients were averaged, when nothing may differ,
and go along with the header of the next step. A worker that differs from most of the others (of two workers:
from the leader) reports the event `differs` and is replaced by a new one, which gets the job's state.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from swell.train.agent.errors import RESPAWN
from swell.train.agent.saying import first_to_say
from swell.train.auto.job import ScriptJob
from swell.train.sync.control import Link
from swell.train.sync.mesh import Header

_MOST_LEAVES = 1_000
"""Of a batch at most about so many things are compared."""
_LOOKED_AT = 1 << 18
"""Of a large tensor at most about so many elements are compared."""


def sums(given: Sequence[Any]) -> list[list[float]]:
    """Sums over the tensors on this machine that a model is given, and over their sizes."""
    found = []
    for tensor in given:
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.numel():
            values = tensor.detach().to(torch.float64)
            found.append([float(values.sum()), float(values.abs().sum()), tensor.numel()])
    return found


class LateSums:
    """Sums over tensors on a device, which are read with the next batch: reading them at once would wait for
    all that the device has to do."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._copied: tuple[int, Tensor, Any] | None = None
        """Those of the batch before: its generation, the sums, and the event of their arrival here."""

    def add(self, given: Sequence[Any]) -> None:
        """Take the sums over these tensors, those on a device."""
        for tensor in given:
            if isinstance(tensor, Tensor) and tensor.device.type not in ("cpu", "meta") and tensor.numel():
                values = tensor.detach()
                if values.is_complex():
                    values = torch.view_as_real(values.resolve_conj())
                elif values.element_size() == 1:  # these have no absolute values
                    values = values.float()
                self._sums += [values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)]

    def batch_computed(self, generation: int) -> None:
        """The batch is over: its sums begin to be copied."""
        taken, self._sums = self._sums, []
        self._copied = None
        if taken:
            sums_ = torch.stack(taken)
            event = torch.cuda.Event() if sums_.device.type == "cuda" else None  # type: ignore[no-untyped-call]
            copied = sums_.to("cpu", non_blocking=event is not None)
            if event is not None:
                event.record()
            self._copied = generation, copied, event

    def read(self, generation: int) -> list[list[float]]:
        """The sums of the batch before, if the members are the same as then."""
        if self._copied is None or self._copied[0] != generation:
            return []
        _, copied, event = self._copied
        if event is not None:
            event.synchronize()
        values = copied.tolist()
        return [[total, sizes, 1] for total, sizes in zip(values[::2], values[1::2])]


def contents(batch: Any) -> list[list[float]]:
    """Numbers that differ if two batches do: sums over tensors, and sums of the bits of anything else."""
    found: list[list[float]] = []
    ahead: list[Any] = [batch]
    while ahead and len(found) < _MOST_LEAVES:
        item = ahead.pop()
        item = item.item() if isinstance(item, np.generic) else item
        if isinstance(item, np.ndarray) and item.dtype.kind in "biuf":
            item = torch.from_numpy(np.ascontiguousarray(item))
        if isinstance(item, Tensor) and item.layout is torch.strided:
            flat = item.reshape(-1)
            found += [*sums([flat[:: max(1, flat.numel() // _LOOKED_AT)]]), [float(flat.numel()), 0.0, 1]]
        elif isinstance(item, Mapping):
            ahead += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            ahead += item
        elif isinstance(item, bool | int | float):
            found.append([float(item), abs(float(item)), 1])
        elif item is None or isinstance(item, str | bytes):
            found.append([float(zlib.crc32(repr(item).encode())), 0.0, 1])
        elif hasattr(item, "__dict__"):
            ahead += [type(item).__name__, vars(item)]
    return found


# ---------------------------------------------------------------------- what the workers compare in each step


ROTATION = 40
"""Each tensor is compared once in so many steps."""
_TRIES = 3
"""After so many workers that differed in the same tensor, it is left alone: the script makes it differ."""
_INEXACT = 1e-4
"""On machines that compute differently, sums may differ by this much of the tensor's mean size."""
_NOT_SETTINGS = ("params", "param_names")

Setting = bool | int | float | str | None | list[Any]
Settings = list[dict[str, Setting]]
"""The plain values of an optimizer's groups."""


# ---------------------------------------------------------------------- the optimizers' settings


def settings(optimizer: torch.optim.Optimizer) -> Settings:
    """All plain values of the optimizer's groups, as JSON knows them."""
    found: Settings = []
    for group in optimizer.param_groups:
        plain: dict[str, Setting] = {}
        for name, value in group.items():
            if name not in _NOT_SETTINGS and _is_plain(value):
                plain[name] = _plain(value)
        found.append(plain)
    return found


def follow(optimizer: torch.optim.Optimizer, theirs: Settings) -> list[str]:
    """Set the values of the optimizer's groups to those of the leader's; returns what was different."""
    changed: list[str] = []
    groups = optimizer.param_groups
    if len(groups) != len(theirs):
        return changed  # the script is adding or removing a group
    for index, (group, wanted) in enumerate(zip(groups, theirs)):
        for name, value in wanted.items():
            mine = group.get(name)
            if name in _NOT_SETTINGS or not _is_plain(mine) or _same(_plain(mine), value):
                continue
            changed.append(f"{name} of group {index}: {_plain(mine)!r:.40}, on the leader {value!r:.40}")
            if isinstance(mine, Tensor):
                with torch.no_grad():
                    mine.fill_(value)  # type: ignore[arg-type]
            else:
                group[name] = tuple(value) if isinstance(value, list) and isinstance(mine, tuple) else value
    return changed


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value)) and not any(isinstance(item, Tensor) for item in value)
    if isinstance(value, Tensor):  # a learning rate for compiled optimizers; reading a device takes long
        return value.numel() == 1 and value.device.type == "cpu"
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Setting:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, float):  # and numpy's, which is one
        return float(value)
    kept: Setting = value
    return kept


def _same(one: Setting, other: Setting) -> bool:
    return one == other or (one != one and other != other)


# ---------------------------------------------------------------------- sums of tensors


class Subjects:
    """The tensors that are compared, by their turn in the rotation."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._buffers: list[tuple[str, Tensor]] = []

    def of(self, job: ScriptJob, turn: int) -> list[tuple[str, list[Tensor]]]:
        """Names and tensors for the turn of that number."""
        turn %= ROTATION
        if turn == 0 or self._model is not job.model:  # walking through a large model takes a millisecond
            self._model, self._parameters = job.model, list(job.model.named_parameters())
            kept = job.model.state_dict(keep_vars=True)  # others are tables, which may grow
            self._buffers = [(name, b) for name, b in job.model.named_buffers() if name in kept]
        found: list[tuple[str, list[Tensor]]] = []
        for name, parameter in self._parameters[turn::ROTATION]:
            found.append((f"weights of {name}", [parameter]))
            own = [o.state.get(parameter, {}) for o in getattr(job.optimizer, "parts", [job.optimizer])]
            tensors = [v for state in own for v in state.values() if isinstance(v, Tensor)]
            found.append((f"optimizer state of {name}", tensors))
        found += [(f"buffer {name}", [buffer]) for name, buffer in self._buffers[turn::ROTATION]]
        return [(n, [t.detach() for t in tensors if t.layout is torch.strided]) for n, tensors in found]


def exact(tensor: Tensor) -> int | Tensor:
    """A sum of the tensor's bits, which any change of one element changes; on a device it is not read yet."""
    if tensor.device.type != "cpu":
        flat = tensor.contiguous().reshape(-1)
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
        return flat.view(kind).sum(dtype=torch.int64)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(raw) // 8 * 8
    with np.errstate(over="ignore"):
        total = int(np.add.reduce(raw[:whole].view(np.uint64), initial=np.uint64(0)))
    return (total + int.from_bytes(raw[whole:].tobytes(), "little")) & (2**64 - 1)


def rough(tensor: Tensor) -> tuple[float, float]:
    """The sum of a tensor, and of its elements' sizes."""
    values = tensor.to(torch.float64)
    return float(values.sum()), float(values.abs().sum())


def _machine(job: ScriptJob) -> str:
    """Workers with the same one of these compute the same bits."""
    device = next(job.model.parameters()).device
    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )
    return f"{zlib.crc32(f'{torch.__version__} {kind}'.encode()):x}"


def odd_ones(values: Sequence[Any]) -> set[int]:
    """Which ranks differ from most of the others; the lower ranks are right where there are as many of each.

    A rank without a value (None) differs from nobody.
    """
    texts = [None if value is None else repr(value) for value in values]
    counts = Counter(text for text in texts if text is not None)
    if len(counts) < 2:
        return set()
    most = max(counts, key=lambda text: (counts[text], -texts.index(text)))
    return {rank for rank, text in enumerate(texts) if text not in (None, most)}


def far_from(values: Sequence[list[tuple[float, float]] | None]) -> set[int]:
    """As `odd_ones`, for the rough sums of machines that compute differently: those far from the middle."""
    known = [value for value in values if value is not None]
    odd: set[int] = set()
    for index in range(min(map(len, known), default=0)):
        ordered = sorted(value[index][0] for value in known)
        middle = ordered[len(ordered) // 2] if len(known) > 2 else known[0][index][0]
        for rank, value in enumerate(values):
            if value is not None and not abs(value[index][0] - middle) <= _INEXACT * value[index][1]:
                odd.add(rank)
    return odd


# ---------------------------------------------------------------------- one worker's


class Fingerprint:
    """What one worker tells of its state, and what it does about those of the others."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._machine = ""
        self._told: tuple[int, str] = (-1, "")
        """As the leader: in which generation these settings were sent."""
        self._theirs: Settings | None = None
        """The leader's settings, as it sent them last."""
        self._turn = 0
        """How many headers this worker has sent; the leader's number says what all of them compare next."""
        self._subjects = Subjects()
        self._sums: tuple[int, list[Any], list[tuple[str, list[Any]]]] | None = None
        """The generation, what the sums are of (turn, step, whether exact), and names and sums."""
        self._reported: dict[str, int] = {}
        """The step of the latest report of each setting that differed."""

    def tell(self, job: ScriptJob, header: Header) -> None:
        """Add what this worker has to the header of the present step."""
        if job.world == 1:
            return
        self._machine = self._machine or _machine(job)
        mine = settings(job.optimizer)
        digest = f"{zlib.crc32(repr(mine).encode()):x}"
        self._turn += 1
        alike: dict[str, Any] = {"machine": self._machine, "settings": digest, "turn": self._turn}
        if job.rank == 0 and self._told != (job.generation, digest):
            self._told = job.generation, digest
            alike["groups"] = mine
        if self._sums is not None and self._sums[0] == job.generation:
            _, of, sums = self._sums
            alike |= {"of": of, "sums": [_read(values) for _, values in sums]}
        header["alike"] = alike

    def take(self, job: ScriptJob, headers: list[Header]) -> None:
        """Follow the leader's settings, compare the sums of the last step, and take those of this one."""
        told = [header.get("alike") or {} for header in headers]
        if job.world == 1 or len(told) != job.world:
            self._sums = None
            return
        self._follow(job, told)
        self._compare(job, told)
        machines = {one.get("machine") for one in told}
        turn, is_exact = int(told[0].get("turn", 0)), len(machines) == 1
        take = exact if is_exact else rough
        sums = [(name, [take(t) for t in tensors]) for name, tensors in self._subjects.of(job, turn)]
        self._sums = job.generation, [turn, job.steps, is_exact], sums

    def _follow(self, job: ScriptJob, told: list[dict[str, Any]]) -> None:
        theirs = told[0].get("groups")
        if theirs is not None:
            self._theirs = theirs
        mine = told[job.rank].get("settings")
        if job.rank == 0 or self._theirs is None or mine == told[0].get("settings"):
            return
        for what in follow(job.optimizer, self._theirs):
            kind = what.partition(":")[0]
            last = self._reported.get(kind)
            if last is None or job.steps - last >= ROTATION:
                self._reported[kind] = job.steps
                self._report(job, what, "it follows the leader", aloud=last is None)

    def _compare(self, job: ScriptJob, told: list[dict[str, Any]]) -> None:
        mine = told[job.rank]
        if "sums" not in mine or self._sums is None:
            return
        alike = [one if one.get("of") == mine["of"] else {} for one in told]
        odd_in = odd_ones if mine["of"][2] else far_from
        for index, (name, _) in enumerate(self._sums[2]):
            if job.rank in odd_in([_at(one.get("sums"), index) for one in alike]):
                self._give_way(job, name)

    def _give_way(self, job: ScriptJob, what: str) -> None:
        """Ask for another worker in the place of this one, unless that has not helped before."""
        note = self._link.directory.path / "private" / "differs"
        if _times(note, what) >= _TRIES:
            if first_to_say(self._link.directory.path, f"differs {what}"):
                self._report(job, what, "it goes on: that differs again and again")
            return
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            with note.open("a") as file:
                file.write(f"{what}\n")
        self._report(job, what, "it is replaced")
        self._link.flush()
        sys.stderr.flush()
        os._exit(RESPAWN)

    def _report(self, job: ScriptJob, what: str, then: str, *, aloud: bool = True) -> None:
        name = self._link.name
        self._link.event("differs", worker=name, step=job.steps, what=what, then=then)
        if not aloud:
            return
        line = f"--auto: worker {name} differs from the others in step {job.steps} ({what}); {then}\n"
        sys.__stderr__.write(line)  # type: ignore[union-attr]


def _read(values: list[Any]) -> list[Any]:
    """Sums as plain numbers, in the form in which they are compared."""
    return [int(value) if isinstance(value, Tensor) else value for value in values]


def _at(sums: list[Any] | None, index: int) -> Any:
    return None if sums is None or index >= len(sums) else sums[index]


def _times(note: Path, what: str) -> int:
    try:
        return note.read_text().splitlines().count(what)
    except OSError:
        return 0
