"""How a newcomer on another host becomes level with the job while the others train.

Where the network is slow, handing the state over in the pause of a switch would stop all members for many
steps. So the state is cut into one part for each member (`Source`). A member copies its part between two
steps and sends that copy in the background. From then on it also sends the gradients of every step, as its
optimizer used them, and the newcomer (`follow`) makes the same optimizer steps on the same numbers: its part
stays equal bit for bit. The members agree to switch once at most the last step is on its way. What the
optimizer does not change (buffers, positions in the data, schedulers) is small and still goes in the pause.

This holds for every optimizer whose step on a parameter depends only on that parameter, its gradient, its
state and the options of its group. A fingerprint of the result is compared at the switch; if it differs, the
newcomer gets the whole state in the pause.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swell.train.agent.errors import PeerLost
from swell.train.state import statetree
from swell.train.sync.memory import HostBytes, describe, let_go
from swell.train.sync.mesh import LEVEL, Header, Mesh

LEAST_BYTES = 2 << 20
"""Gradients of at least this size are worth it; below, a hand-over in the pause takes milliseconds."""
_MOST_RECORDS = 4
"""Steps that a member keeps for newcomers. With more to send, its training waits for the network."""
_PATIENCE_S = 4.0
"""How long it waits before it leaves its part to the pause."""
_MOST_TRIES = 3
_BROKEN_S = 2.0
"""How long a member waits, after it lost a newcomer, for the coordinator to withdraw the candidate."""
_SAMPLE = 1 << 14


@dataclass(frozen=True, slots=True)
class Optimized:
    """What an optimizer changes: the parameters by name, and the optimizer with its state."""

    parameters: dict[str, Tensor]
    optimizer: torch.optim.Optimizer


def divide(parameters: dict[str, Tensor], parts: int) -> list[list[str]]:
    """The parameters' names in `parts` lists of about equal numbers of elements."""
    out: list[list[str]] = [[] for _ in range(parts)]
    total = max(sum(p.numel() for p in parameters.values()), 1)
    position = 0
    for name, parameter in parameters.items():
        out[min(parts - 1, (2 * position + parameter.numel()) * parts // (2 * total))].append(name)
        position += parameter.numel()
    return out


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """A hash of a sample of each tensor's bits."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].cpu().contiguous()
        found.update(name.encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(optimized: Optimized, names: list[str]) -> dict[tuple[str, str], Tensor]:
    """The parameters of a part and the tensors of their optimizer state, by name and key."""
    out: dict[tuple[str, str], Tensor] = {}
    for name in names:
        parameter = optimized.parameters[name]
        out[name, ""] = parameter
        state = optimized.optimizer.state.get(parameter, {})
        out |= {(name, key): value for key, value in state.items() if isinstance(value, Tensor)}
    return out


def _plain(optimized: Optimized, names: list[str]) -> dict[str, dict[str, Any]]:
    """The optimizer state of a part that is no tensor."""
    state = optimized.optimizer.state
    found = {name: state.get(optimized.parameters[name], {}) for name in names}
    return {n: {k: v for k, v in s.items() if not isinstance(v, Tensor)} for n, s in found.items()}


def _document(values: Any) -> Any:
    """Plain values for JSON; None if there is anything else among them."""
    try:
        document, tensors = statetree.split(values)
    except statetree.UnsupportedState:
        return None
    return None if tensors else document


def _roles(headers: list[Header]) -> tuple[list[int], list[int]]:
    """The members with state, and the newcomers that need the background: all members say the same."""
    live = [rank for rank, header in enumerate(headers) if header["live"]]
    if not live:
        return [], []
    giver = live[0]
    wanting = []
    for rank, header in enumerate(headers):
        near = giver in header["reads"] and rank in headers[giver]["reads"]
        if not header["live"] and not near and header["tries"] < _MOST_TRIES:
            wanting.append(rank)
    return live, wanting


@dataclass(slots=True)
class _Record:
    """The gradients of one step, for the parameters of a part."""

    gradients: list[Tensor]
    header: Header = field(default_factory=dict)
    waiting: int = 0
    """Newcomers to which this is still to be sent."""


def _behind(queue: deque[_Record | None]) -> bool:
    """Whether more than the last step is still to be sent; the copy of the state is a record without any."""
    return len(queue) > 1 or (len(queue) == 1 and not (queue[0] and queue[0].gradients))


class Source:
    """A member's side: sends its part of the state, and what changes it, to the newcomers of a candidate."""

    def __init__(self, mesh: Mesh, optimized: Optimized, reads: list[int]) -> None:
        self.mesh = mesh
        self.newcomers: list[int] = []
        """The newcomers that become level; known once all members of the candidate have said who they are."""
        self._optimized = optimized
        self._names: list[str] = []
        self._copies: list[Tensor] = []
        self._snapshot: Header | None = None
        self._records: list[_Record] = []
        self._free: list[_Record] = []
        self._queues: dict[int, deque[_Record | None]] = {}
        self._hook: Any = None
        self.gave_up = False
        """True if the newcomers will get this member's part in the pause."""
        self._known = self._over = self._closed = False
        self._failed_s: float | None = None
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._start(self._begin, reads)

    def _start(self, target: Any, *arguments: Any) -> None:
        def run() -> None:
            try:
                target(*arguments)
            except (PeerLost, OSError):
                with self._changed:
                    self._failed_s = time.monotonic()
                    self._changed.notify_all()

        thread = threading.Thread(target=run, name="swell-level", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ------------------------------------------------------------------ the main thread, between two steps

    def at_boundary(self) -> bool:
        """Whether the members may switch as far as this one is concerned; takes the copy when it is time."""
        with self._changed:
            if self._failed_s is not None:
                return time.monotonic() - self._failed_s > _BROKEN_S
            if not self._known:
                return False
            if not self.newcomers or self.gave_up:
                return True
            if self._snapshot is not None:
                return not any(map(_behind, self._queues.values()))
        self._take()
        return False

    @torch.no_grad()
    def _take(self) -> None:
        """Copy this member's part of the state, and record all steps from now on."""
        tensors = _tensors(self._optimized, self._names)
        plain = _document(_plain(self._optimized, self._names))
        if plain is None or len(tensors) != len(self._copies):
            self._give_up()  # the optimizer keeps something else, or has built its state only now
            return
        for copy, tensor in zip(self._copies, tensors.values()):
            copy.copy_(tensor)
        optimizer = self._optimized.optimizer
        self._hook = optimizer.register_step_pre_hook(self._record)
        with self._changed:
            self._queues = {rank: deque([_Record([])]) for rank in self.newcomers}  # the copy itself
            self._snapshot = {
                "names": self._names,
                "keys": [list(key) for key in tensors],
                "tensors": describe(self._copies),
                "plain": plain,
            }
            self._changed.notify_all()

    @torch.no_grad()
    def _record(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """The optimizer is about to step: keep what it uses of this member's part."""
        if self._over or self.gave_up or self._failed_s is not None:
            return
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        document, record = _document(groups), self._fresh_record()
        if record is None or document is None:
            self._give_up()
            return
        unused = []
        for index, (name, place) in enumerate(zip(self._names, record.gradients)):
            gradient = self._optimized.parameters[name].grad
            if gradient is None:
                unused.append(index)
            else:
                place.copy_(gradient)
        record.header = {"groups": document, "unused": unused}
        with self._changed:
            record.waiting = len(self._queues)
            for queue in self._queues.values():
                queue.append(record)
            self._changed.notify_all()

    def _fresh_record(self) -> _Record | None:
        with self._changed:
            if len(self._records) >= _MOST_RECORDS:
                self._changed.wait_for(lambda: self._free or self._failed_s is not None, _PATIENCE_S)
            if self._free:
                return self._free.pop()
        if len(self._records) >= _MOST_RECORDS:
            return None
        places = [torch.empty_like(self._optimized.parameters[n], device="cpu") for n in self._names]
        self._records.append(_Record([place.detach() for place in places]))
        return self._records[-1]

    def _give_up(self) -> None:
        """Leave this member's part to the pause."""
        with self._changed:
            self.gave_up = True
            self._snapshot = self._snapshot or {}
            self._queues = self._queues or {rank: deque() for rank in self.newcomers}
            for queue in self._queues.values():
                queue.append(None)
            self._changed.notify_all()

    def finish(self) -> None:
        """After the step in which all members agreed: wait until the newcomers have all of it."""
        with self._changed:
            self._over = True
            if not self.gave_up:
                for queue in self._queues.values():
                    queue.append(None)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.close()

    def close(self) -> None:
        """Record no more, and have the threads end that wait for something to send."""
        with self._changed:
            self._over = self._closed = True
            self._changed.notify_all()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        let_go([*self._copies, *self._records])
        self._copies, self._records, self._free = [], [], []

    # ------------------------------------------------------------------ threads

    def _begin(self, reads: list[int]) -> None:
        """Find out who needs what, and allocate memory, while the main thread trains."""
        said: Header = {"live": True, "reads": reads, "tries": 0}
        live, newcomers = _roles(self.mesh.exchange(0, LEVEL, said))
        if newcomers:
            self._names = divide(self._optimized.parameters, len(live))[live.index(self.mesh.rank)]
            tensors = _tensors(self._optimized, self._names).values()
            self._copies = [torch.zeros(t.shape, dtype=t.dtype) for t in tensors]
        for rank in newcomers:
            self._start(self._stream, rank)
        with self._changed:
            self.newcomers, self._known = newcomers, True

    def _is_closed(self) -> bool:
        """Whether the main thread has called `close`, which may happen at any moment."""
        return self._closed

    def _stream(self, rank: int) -> None:
        """Send everything to one newcomer."""
        pair, number = self.mesh.pair(rank), 3
        other = next(iter(pair.peers))
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot is not None or self._over)
            if self._is_closed():
                return
            hello = dict(self._snapshot or {})
        pair.exchange(0, LEVEL, hello)
        if not hello:
            return
        if not pair.exchange(1, LEVEL, {})[other]["fits"]:
            self._give_up()
            return
        pair.exchange(2, LEVEL, {}, {other: HostBytes(self._copies, filled=True).views}, {})
        queue = self._queues[rank]
        self._sent(queue)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._closed)
                if self._is_closed():
                    return
                record = queue[0]
            if record is None:
                pair.exchange(number, LEVEL, {"over": True, "level": not self.gave_up})
                return
            pair.exchange(number, LEVEL, record.header)
            views = HostBytes(record.gradients, filled=True).views
            pair.exchange(number + 1, LEVEL, {}, {other: views}, {})
            number += 2
            self._sent(queue)

    def _sent(self, queue: deque[_Record | None]) -> None:
        with self._changed:
            record = queue.popleft()
            assert record is not None
            record.waiting -= 1
            if not record.waiting and record.gradients:
                self._free.append(record)
            self._changed.notify_all()


def follow(mesh: Mesh, optimized: Optimized, reads: list[int], tries: int) -> bool:
    """A newcomer's side: become level with the members of a candidate, until they switch to it.

    False if the state will come in the pause instead; PeerLost if the candidate was given up.
    """
    live, newcomers = _roles(mesh.exchange(0, LEVEL, {"live": False, "reads": reads, "tries": tries}))
    if mesh.rank not in newcomers:
        return False
    level, errors, lock = list[bool](), list[Exception](), threading.Lock()

    def run(rank: int) -> None:
        try:
            level.append(_follow(mesh.pair(rank), optimized, lock))
        except Exception as error:  # raised again in the main thread
            errors.append(error)
            mesh.abandon()  # the other sources' threads end too

    threads = [threading.Thread(target=run, args=(r,), name="swell-level", daemon=True) for r in live]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # their tracebacks lead to this frame: only the collector would free both
    return all(level)


@torch.no_grad()
def _follow(pair: Mesh, optimized: Optimized, lock: threading.Lock) -> bool:
    """Take one member's part and make its steps; True if that part is level at the end."""
    source = next(iter(pair.peers))
    hello = pair.exchange(0, LEVEL, {})[source]
    if not hello:
        return False
    names = [str(name) for name in hello["names"]]
    mine = _tensors(optimized, names) if set(names) <= optimized.parameters.keys() else {}
    keys = [(str(a), str(b)) for a, b in hello["keys"]]
    fits = list(mine) == keys and describe(mine.values()) == hello["tensors"]
    pair.exchange(1, LEVEL, {"fits": fits})
    if not fits:
        return False
    sink = HostBytes(list(mine.values()))
    pair.exchange(2, LEVEL, {}, {}, {source: sink.views})
    sink.store()
    for name, values in statetree.join(hello["plain"], {}).items():
        optimized.optimizer.state[optimized.parameters[name]].update(values)
    parameters = [optimized.parameters[name] for name in names]
    gradients = [torch.empty_like(p, device="cpu").detach() for p in parameters]
    number = 3
    while True:
        said = pair.exchange(number, LEVEL, {})[source]
        if "over" in said:
            return bool(said["level"])
        pair.exchange(number + 1, LEVEL, {}, {}, {source: HostBytes(gradients).views})
        number += 2
        with lock:
            _step(optimized, parameters, gradients, said)


def _step(optimized: Optimized, parameters: list[Tensor], gradients: list[Tensor], said: Header) -> None:
    """Make the optimizer step of a record on its parameters alone."""
    optimizer = optimized.optimizer
    for group, values in zip(optimizer.param_groups, statetree.join(said["groups"], {})):
        group.update(values)
    for parameter in optimized.parameters.values():
        parameter.grad = None
    unused = set(said["unused"])
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients)):
        if index not in unused:
            parameter.grad = gradient.to(parameter.device)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
