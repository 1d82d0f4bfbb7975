"""The randomness of an unmodified script: the same numbers on every worker.

A script that shuffles, splits or initializes without a seed must do the same on all workers, or the held-out
data of one are another's training data. So before the script's first line `random`, numpy and torch are
seeded with the job's seed, which is in a file that outlives the workers (Python's hash seed is set where the
process is made, see `RunConfig.order`). Generators that the script makes without a seed get one derived from
the job's seed, from the place in the script that makes them, and from how many were made there. Another job
has another seed, as another plain run has.

A newcomer runs the script with one batch a pass, so it draws fewer numbers in a pass. Therefore the leader
leaves a note of the states at the end of each pass from which numbers were drawn, and newcomers take them
from there: what the script draws between two passes (it shuffles a list in each epoch, say) a newcomer draws
as well. The states of the others travel with the position; the newcomer takes them where it comes to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import secrets
import shutil
import sys
import sysconfig
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from swell.train.auto import held
from swell.train.data.samples import key, seed_all

_STDLIB = f"{Path(sysconfig.get_paths()['stdlib']).resolve()}{os.sep}"
_SWELL = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_MOST_DIGITS = 20
_LARGEST = 2**53 - 1
_MOST_NOTES = 3_000
"""After so many passes no more notes of them are left: each takes up to 20 kB."""


def job_seed(home: Path, launch: str, *, anew: bool) -> int:
    """The seed of the job, from the file in `home`; decided now if there is none, or if the job begins anew.

    All workers of a launch would decide on the same one, so it does not matter which of them writes it.
    """
    file = home / "seed"
    if not anew:
        with contextlib.suppress(OSError, ValueError):
            return int(file.read_text()[:_MOST_DIGITS]) & _LARGEST
    shutil.rmtree(home / "passes", ignore_errors=True)
    seed = key(launch, "randomness") & _LARGEST
    with contextlib.suppress(OSError):  # a full disk must not end the job
        home.mkdir(parents=True, exist_ok=True)
        new = home / f".seed.{os.getpid()}"
        new.write_text(f"{seed}\n")
        new.replace(file)
    return seed


# ---------------------------------------------------------------------- the generators that all have


class SharedGenerator(NamedTuple):
    """A generator that scripts draw from without naming it."""

    get: Callable[[], Any]
    """Its state."""
    set: Callable[[Any], object]
    seed: Callable[[int], object]
    draw: Callable[[], int]
    same: Callable[[Any, Any], bool]
    """Whether two states are equal."""


def _on_device() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _memory_of_numpy() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The memory of numpy's legacy generator: its words, and how many of them are used up.

    Asking numpy for the state takes 25 microseconds, and it is asked for several times in each step.
    """
    words = ctypes.c_uint32 * (_WORDS + 1)
    legacy: Any = np.random.mtrand
    return np.ctypeslib.as_array(words.from_address(legacy._rand._bit_generator.ctypes.state_address))


def _set_numpy(state: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
    _NUMPY[:] = state


_WORDS = 624
_NUMPY = _memory_of_numpy()
_OF_PYTHON = SharedGenerator(
    random.getstate, random.setstate, random.seed, lambda: random.getrandbits(62), lambda a, b: bool(a == b)
)
_OF_NUMPY = SharedGenerator(
    _NUMPY.copy,
    _set_numpy,
    lambda seed: np.random.seed(seed & 0xFFFFFFFF),  # noqa: NPY002 - scripts use the legacy generator
    lambda: int.from_bytes(np.random.bytes(8), "little"),  # noqa: NPY002
    lambda a, b: bool(a.tobytes() == b.tobytes()),
)
_OF_TORCH = SharedGenerator(
    torch.default_generator.get_state,
    torch.default_generator.set_state,
    torch.default_generator.manual_seed,
    lambda: int(torch.empty((), dtype=torch.int64).random_()),
    torch.equal,
)
_OF_DEVICE = SharedGenerator(
    lambda: _on_device().get_state(),
    lambda state: _on_device().set_state(state),
    lambda seed: _on_device().manual_seed(seed),
    lambda: int.from_bytes(bytes(_on_device().get_state().tolist()), "little") & (2**62 - 1),
    torch.equal,
)

States = dict[str, Any]
"""The states of the generators, by kind."""


def _kinds() -> dict[str, SharedGenerator]:
    """The generators that there are; a GPU's once the script uses it."""
    kinds = {"python": _OF_PYTHON, "numpy": _OF_NUMPY, "torch": _OF_TORCH}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        kinds["device"] = _OF_DEVICE
    return kinds


def states() -> States:
    """The present states of all generators."""
    return {name: kind.get() for name, kind in _kinds().items()}


def _state_of_numpy() -> tuple[Any, ...]:
    """All of it: with the normal number that numpy has in store."""
    return tuple(np.random.get_state())  # noqa: NPY002


def _go_on_from(kind: SharedGenerator, state: Any) -> int:
    """Bring a generator to a state that follows from `state` alone; returns a number that does so too."""
    kind.set(state)
    drawn = kind.draw()
    kind.seed(key(drawn, "on"))
    return drawn


def _packed(states_: States) -> dict[str, Any]:
    """States as tensors and plain values, which travel and are stored."""
    packed = dict(states_)
    if "python" in packed:
        version, numbers, gauss = packed["python"]
        packed["python"] = [version, torch.tensor(numbers, dtype=torch.int64), gauss]
    if "numpy" in packed:
        packed["numpy"] = torch.from_numpy(packed["numpy"].astype(np.int64))
    return packed


def _unpacked(packed: dict[str, Any]) -> States:
    found = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in packed.items()}
    if "python" in found:
        version, numbers, gauss = found["python"]
        found["python"] = version, tuple(numbers.tolist()), gauss
    if "numpy" in found:
        found["numpy"] = found["numpy"].numpy().astype(np.uint32)
    return found


class StateNotes:
    """The states of generators at the ends of passes: leaders leave them, and newcomers take them.

    Each leader appends to a file of its own, because a short pass takes no longer than making a file would:
    a line that says what follows, and the bytes of the states.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None
        """What this worker writes to, as the leader."""
        self._read: dict[str, int] = {}
        """By name of a file: how much of it is known."""
        self._known: dict[int, tuple[str, int, list[Any]]] = {}
        """By pass: the file, the place of the states in it, and what they are."""

    def leave(self, number: int, states_: States) -> None:
        """Write down the states after pass `number`."""
        about, content = [], []
        for name, state in states_.items():
            raw, more = _as_bytes(name, state)
            about.append((name, len(raw), more))
            content.append(raw)
        line = json.dumps([number, about]).encode() + b"\n"
        with contextlib.suppress(OSError):  # a full disk must not end the job
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                made = self._folder / f"{time.time_ns():020}-{secrets.token_hex(4)}"
                self._file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            os.write(self._file, line + b"".join(content))

    def take(self, number: int) -> States:
        """The states that were written down after pass `number`; empty if there are none."""
        self._read_on()
        if number not in self._known:
            return {}
        name, place, about = self._known[number]
        found: States = {}
        with (self._folder / name).open("rb") as file:
            file.seek(place)
            for kind, length, more in about:
                found[kind] = _from_bytes(kind, file.read(length), more)
        return found

    def _read_on(self) -> None:
        """Look for notes that are new; of a pass that was made again the last one counts."""
        for path in sorted(self._folder.glob("*-*")):
            with path.open("rb") as file:
                end, place = os.fstat(file.fileno()).st_size, self._read.get(path.name, 0)
                file.seek(place)
                for line in file:
                    try:  # the leader may have died while it wrote, or is writing just now
                        number, about = json.loads(line)
                    except ValueError:
                        break
                    begin = place + len(line)
                    place = begin + sum(length for _, length, _ in about)
                    if place > end:
                        break
                    self._known[number] = path.name, begin, about
                    self._read[path.name] = place
                    file.seek(place)


def _as_bytes(name: str, state: Any) -> tuple[bytes, Any]:
    """A state as bytes, and what JSON can say of it."""
    if name == "python":
        version, numbers, gauss = state
        return np.array(numbers, np.uint32).tobytes(), [version, gauss]
    return (state.numpy() if isinstance(state, Tensor) else state).tobytes(), None


def _from_bytes(name: str, raw: bytes, more: Any) -> Any:
    if name == "python":
        return more[0], tuple(np.frombuffer(raw, np.uint32).tolist()), more[1]
    if name == "numpy":
        return np.frombuffer(raw, np.uint32)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


# ---------------------------------------------------------------------- one worker's randomness


class Randomness:
    """What one worker's script draws from."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.seed = 0
        """The job's seed."""
        self._pid = os.getpid()
        self._own: States = {}
        """This worker's own randomness, where it goes on the next time."""
        self._begun: weakref.WeakKeyDictionary[Any, States] = weakref.WeakKeyDictionary()
        """By pass: the states at its begin."""
        self._inside = 0
        """How many `own` contexts the main thread is in."""
        self._stretch = 0
        """The number of the present stretch of the script: a pass, or what is between two of them."""
        self._ended = 0
        """How many passes have come to their end."""
        self._notes: StateNotes | None = None
        """The states of generators at the ends of passes."""
        self._made: Counter[str] = Counter()
        """By place in the script: generators that were made there without a seed in this stretch."""

    def begin(self, seed: int, notes: Path | None = None) -> None:
        """Give the script the job's randomness, before its first line."""
        self.seed, self._notes = seed, None if notes is None else StateNotes(notes)
        seed_all(seed)

    # ------------------------------------------------------------------ a worker's own

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Within this context the numbers are this worker's own; afterwards they go on as before."""
        kept, kinds = states(), _kinds()
        for name in kept:
            if name in self._own:
                kinds[name].set(self._own[name])
            else:
                kinds[name].seed(key(self.seed, self._worker, name, secrets.randbits(62)))
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            for name, state in kept.items():
                self._own[name] = kinds[name].get()
                kinds[name].set(state)

    # ------------------------------------------------------------------ passes and newcomers

    def pass_begins(self, here: Any) -> None:
        """The script draws the first batch of a pass."""
        self._begun[here] = states()
        self._next_stretch()

    def pass_ends(self, here: Any, *, leads: bool, forwarding: bool) -> None:
        """The pass is over: newcomers, which draw only one batch of it, have the same states from here on."""
        begun = self._begun.pop(here, None)
        if begun is None:  # the script was told of the end before
            return
        number, self._ended = self._ended, self._ended + 1
        if self._notes is None or number >= _MOST_NOTES:
            self.after(begun)
        elif forwarding:
            self._take_note(number, begun)
        elif leads:
            self._leave_note(number, begun)
        self._next_stretch()

    def _leave_note(self, number: int, begun: States) -> None:
        """Write down the generators that were drawn from in a pass."""
        assert self._notes is not None
        kinds = _kinds()
        changed = {n: now for n, now in states().items() if n in begun and not kinds[n].same(now, begun[n])}
        if changed:
            self._notes.leave(number, changed)

    def _take_note(self, number: int, begun: States) -> None:
        """Have the states that the others had at the end of a pass; as at its begin if they drew nothing."""
        assert self._notes is not None
        noted = self._notes.take(number)
        for name, kind in _kinds().items():
            if name in begun:
                kind.set(noted.get(name, begun[name]))

    def after(self, begun: States) -> None:
        """Go on from the states `begun`, for those generators that have been drawn from since then."""
        for name, kind in _kinds().items():
            if name in begun and not kind.same(kind.get(), begun[name]):
                _go_on_from(kind, begun[name])

    def _next_stretch(self) -> None:
        self._stretch += 1
        self._made.clear()

    def capture(self, here: Any) -> dict[str, Any]:
        """The states now and at the begin of the pass `here`, for newcomers and checkpoints."""
        return {
            "now": _packed(states()),
            "ended": self._ended,
            "stretch": self._stretch,
            "made": dict(self._made),
            "gauss": list(_state_of_numpy()[3:]),
            "begun": _packed(self._begun.get(here, {})),
        }

    def restore(self, here: Any, given: dict[str, Any]) -> None:
        """Take over what `capture` gave, where the script has come to that position."""
        kinds = _kinds()
        for name, state in _unpacked(given.get("now", {})).items():
            if name in kinds:
                kinds[name].set(state)
        if "gauss" in given:
            np.random.set_state((*_state_of_numpy()[:3], *given["gauss"]))  # noqa: NPY002
        self._ended = int(given.get("ended", self._ended))
        if "made" in given:  # generators without a seed are counted
            self._stretch, self._made = int(given["stretch"]), Counter(given["made"])
        if given.get("begun"):
            self._begun[here] = _unpacked(given["begun"])

    # ------------------------------------------------------------------ generators without a seed

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within this context generators that are made or seeded without a seed get one of the job's.

        `os.urandom`, `secrets`, `uuid4` and `random.SystemRandom` stay what they are.
        """
        bits: Any = np.random.bit_generator
        python: Any = random.Random
        module: Any = random
        seed_python, entropy, generator, seed_torch = python.seed, bits.randbits, torch.Generator, torch.seed

        def seed(self_: random.Random, a: Any = None, version: int = 2) -> None:
            given = self._next(8) if a is None else None
            seed_python(self_, a if given is None else given, version)

        def randbits(k: int) -> int:  # numpy asks for them whenever it makes a generator without a seed
            given = self._next(-(-k // 8))
            found: int = entropy(k) if given is None else given & ((1 << k) - 1)
            return found

        def seed_default() -> int:
            given = self._next(7)
            if given is None:
                return int(seed_torch())
            torch.manual_seed(given)
            return given

        class Kindred(type(generator)):  # type: ignore[misc]
            """Every generator of torch, also those that torch makes, is an instance of the class below."""

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, generator)

            def __subclasscheck__(cls, kind: Any) -> bool:
                return issubclass(kind, generator)

        class Generator(generator, metaclass=Kindred):  # type: ignore[misc, valid-type]
            """torch's generator, whose `seed` gives the same to all workers."""

            def seed(self_) -> int:
                given = self._next(7)
                if given is None:
                    return int(generator.seed(self_))
                self_.manual_seed(given)
                return given

        patched: Any = torch
        python.seed = seed
        module.seed = module._inst.seed
        bits.randbits = randbits
        patched.Generator = Generator
        patched.seed = patched.random.seed = seed_default
        try:
            yield
        finally:
            python.seed = seed_python
            module.seed = module._inst.seed
            bits.randbits = entropy
            patched.Generator = generator
            patched.seed = patched.random.seed = seed_torch

    def _next(self, size: int) -> int | None:
        """A seed of so many bytes for a generator that is being made; None if it is to be random indeed.

        That are those of the standard library (names of temporary files) and of a library that makes one when
        it is imported, and all that are made while a part of a batch is loaded or in another process.
        """
        if os.getpid() != self._pid or self._inside:
            return None
        place = _place(sys._getframe(2))
        if place is None:
            return None
        if threading.current_thread() is not threading.main_thread():
            place = f"{place} in {threading.current_thread().name}"
        number, self._made[place] = self._made[place], self._made[place] + 1
        text = repr((self.seed, self._stretch, place, number)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=size).digest(), "big")


def _place(frame: FrameType | None) -> str | None:
    """Where the script makes a generator: module, function and line. None if it is not the script's doing."""
    maker = True
    while frame is not None:
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if module.partition(".")[0] not in ("random", "numpy", "torch"):
            if held.is_own(module, file):
                return f"{module} {frame.f_code.co_name} {frame.f_lineno}"
            if frame.f_code.co_name == "<module>" or file.startswith(_SWELL):
                return None
            if maker and file.startswith(_STDLIB) and "site-packages" not in file:
                return None
            maker = False
        frame = frame.f_back
    return None
