"""A job's side of sharing its GPUs with other jobs: between two steps its leader looks whose turn it is.

The jobs on a GPU keep a small file together. Only leaders look at it: the other workers of a job wait in the
next sum for theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.train.turns import rules
from swell.train.turns.rules import Table

LOOK_S = 0.1
"""How often a job that trains side by side looks at the file."""
SPAN_S = 1.0
"""How long a job measures its speed side by side."""
SETTLE_S = 0.5
"""What is measured sooner after a change is not counted: the others may not have noticed yet."""
POLL_S = 0.002
"""How often a job that waits for its turn looks at the file."""
LONGEST_WAIT_S = 60.0
"""After this a job goes on without a turn."""
_LOCK_S = 0.05
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial came to."""

    in_turns: bool
    others: int
    """How many other jobs are on the GPU."""
    worth: float
    """What the speeds side by side added up to, relative to alone."""


class Span:
    """The steps of a job since it began to measure its speed."""

    def __init__(self, begun_s: float) -> None:
        self.begun_s = self._last_s = begun_s
        self.steps = self.samples = 0
        self._longest_s = 0.0

    def add(self, now_s: float, samples: int) -> None:
        """Note a step that ends now."""
        self._longest_s, self._last_s = max(self._longest_s, now_s - self._last_s), now_s
        self.steps += 1
        self.samples += samples

    @property
    def interrupted(self) -> bool:
        """Whether the job did something else meanwhile, such as to evaluate: a step was far longer."""
        others_s = self._last_s - self.begun_s - self._longest_s
        return self.steps > 3 and self._longest_s > 4.0 * others_s / (self.steps - 1)


class Turns:
    """Whose turn it is on the GPUs of one job."""

    def __init__(self, own: Path, synchronize: Callable[[], None], say: Callable[[Verdict], None]) -> None:
        """`own`: the file of this worker's GPU. `synchronize` waits until the device has done its work.
        `say` is told what a trial came to."""
        self._folder, self.gpu = own.parent, own.name
        self._synchronize, self._say = synchronize, say
        self._pid = os.getpid()
        self._gpus: dict[str, int] = {}
        """By GPU of the job, if this worker leads it: how many of the job's workers are there."""
        self._since: dict[str, float] = {}
        """By GPU in whose file this job is: when the way in which the jobs there train last changed."""
        self._between = True
        """Whether a step has ended and the next has not begun."""
        self._in_turns = False
        self._span = Span(0.0)
        self._looks_s = self._told = 0.0
        self._waited_s = 0.0
        """How long the wait before the present step took."""

    def after_step(self, headers: Sequence[Mapping[str, Any]], samples: int, *, leads: bool) -> float:
        """Note a step of the whole job; returns how long it waited for its turn before."""
        waited_s, self._waited_s, self._between = self._waited_s, 0.0, True
        if not leads:
            self.leave()
            return waited_s
        named = Counter(str(header.get("gpu", "")) for header in headers)
        named[self.gpu] = max(named[self.gpu], 1)
        self._gpus = {gpu: named[gpu] for gpu in sorted(named) if gpu.isdigit()}
        self._span.add(time.monotonic(), samples)
        return waited_s

    def before_step(self) -> None:
        """Return when the job may go on: at once, unless it is another's turn, or in the middle of a step."""
        now_s = time.monotonic()
        if not self._between:
            return
        self._between = False
        if not self._gpus or (now_s < self._looks_s and self._since.keys() == set(self._gpus)):
            return
        if self._in_turns:
            self._synchronize()  # a turn ends when its work is done, and only then its speed is known
            now_s = time.monotonic()
        for name in self._since.keys() - set(self._gpus):
            self._withdraw(name)
        before, self._in_turns = dict(self._since), False
        for name in self._gpus:
            with self._table(name) as table:
                self._look(name, table, now_s)
                if table.in_turns:
                    rules.end_turn(table, self._pid, now_s)
        if self._in_turns:
            for name in self._gpus:  # in order, so that no two jobs hold what the other waits for
                self._await(name)
            self._waited_s = time.monotonic() - now_s
        if self._in_turns or before != self._since:
            self._span = Span(now_s + self._waited_s)
        self._looks_s = now_s + (self._waited_s + self._slice_s if self._in_turns else LOOK_S)

    def leave(self) -> None:
        """This worker leads no job that trains on these GPUs any more."""
        for name in list(self._since):
            self._withdraw(name)
        self._gpus, self._in_turns = {}, False

    @property
    def _slice_s(self) -> float:
        """How long this job's turns are: it has one at the same time on all its GPUs."""
        return rules.SLICE_S * max(self._gpus.values(), default=1)

    def _look(self, name: str, table: Table, now_s: float) -> None:
        """Bring the table of a GPU up to date, and this job's view of it."""
        me, span = rules.enter(table, self._pid, _lives, now_s, self._gpus[name]), self._span
        if span.steps and self._since.get(name) == table.since_s:
            me.step_s = (now_s - span.begun_s) / span.steps
            settled_s = max(self._since.values()) + SETTLE_S
            if span.begun_s < settled_s:
                if not table.in_turns and now_s >= settled_s:
                    self._span = Span(now_s)
            elif now_s - span.begun_s >= (rules.SLICE_S if table.in_turns else SPAN_S):
                if not span.interrupted:
                    rules.measured(table, self._pid, span.samples / (now_s - span.begun_s))
                self._span = Span(now_s)
        rules.judge(table, now_s)
        if table.worth and not table.trial and self._told != table.since_s:
            self._told = table.since_s
            self._say(Verdict(table.in_turns, len(table.jobs) - 1, table.worth))
        self._since[name] = table.since_s
        self._in_turns |= table.in_turns

    def _await(self, name: str) -> None:
        """Wait for this job's turn on a GPU."""
        until_s = time.monotonic() + LONGEST_WAIT_S
        while True:
            now_s = time.monotonic()
            with self._table(name) as table:
                rules.enter(table, self._pid, _lives, now_s, self._gpus[name])
                if rules.may_go(table, self._pid, now_s) or now_s > until_s:
                    return
            time.sleep(POLL_S)

    def _withdraw(self, name: str) -> None:
        self._since.pop(name, None)
        with self._table(name) as table:
            rules.leave(table, self._pid, time.monotonic())

    @contextlib.contextmanager
    def _table(self, name: str) -> Iterator[Table]:
        """The table of a GPU, to be changed. Where the file cannot be had, one in which nobody else is."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield Table()
            return
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            if not _locked(file.fileno()):  # its holder was stopped at that moment: do not stop too
                yield Table()
                return
            before = file.read(_MOST_BYTES)
            try:
                table = Table.from_json(json.loads(before), time.monotonic())
            except (ValueError, KeyError, TypeError):
                table = Table()
            yield table
            after = json.dumps(table.to_json()).encode()
            if after != before:
                with contextlib.suppress(OSError):  # a full disk: the next look tries again
                    os.pwrite(file.fileno(), after, 0)
                    os.ftruncate(file.fileno(), len(after))


def _locked(descriptor: int) -> bool:
    """Lock a file; False if another process keeps it locked for longer than it should."""
    until_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.0002)


def _lives(pid: int) -> bool:
    """Whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
