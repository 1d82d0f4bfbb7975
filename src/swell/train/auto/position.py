"""Where a script is: the passes that it is in, and its place in them.

The script's position is (training pass, batch). Nothing here knows of the job or of other workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from swell.train.agent.errors import LEFT
from swell.train.auto.by_hand import StepsByHand
from swell.train.auto.job import ScriptJob, ScriptRun, give_way
from swell.train.auto.loops import SourceLoop
from swell.train.auto.passes import Drawn, Pass, Stream, StreamPass
from swell.train.sync.mesh import Header


class Position:
    """The passes of a script, and its place in them."""

    def __init__(self) -> None:
        self.active: list[Pass] = []
        """Passes that the script is in: the present training passes, and others that were drawn from."""
        self.current: list[Drawn] = []
        """The batches whose gradients were computed last, one of each loader."""
        self.counts = False
        """True if the script does not step with every batch or leaves passes early: then its count of batches
        matters."""
        self._brief: set[SourceLoop] = set()
        """Loops that count batches and begin anew with every step, because no step is made inside them."""
        self._drawn_before = 0
        """Batches drawn from earlier passes of the loop that draws from the present one."""
        self._left: dict[int, list[Drawn]] = {}
        """By id of a loader: batches of its last pass that were drawn ahead and not used when it ended."""
        self._begun = 0
        """The number of training passes that have begun."""
        self._opened: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        """Loaders over which a pass has begun."""
        self._trains: weakref.WeakKeyDictionary[DataLoader[Any], bool] = weakref.WeakKeyDictionary()
        """Whether gradients are computed in passes over a loader, if that is known."""
        self._given: dict[str, Any] = {}
        """The position of the job, where the script goes once it has caught up."""
        self._given_more: list[dict[str, Any]] = []
        """The positions in further loaders of the same steps, which the script has not come to."""

    def trains(self, loader: DataLoader[Any]) -> bool | None:
        """Whether gradients are computed in passes over `loader`; None if that is not known."""
        return self._trains.get(loader)

    def open(self, loader: DataLoader[Any], draw: Callable[[Pass], Any]) -> Pass:
        """A pass over `loader`, which asks `draw` for its batches."""
        stays = loader.num_workers > 0 and loader.persistent_workers
        if not stays or loader not in self._opened:  # the loader itself draws a seed for its processes
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        self._opened.add(loader)
        return Pass(loader, self._begun, draw, training=bool(self.trains(loader)))

    def open_stream(self, loader: DataLoader[Any], draw: Callable[[Pass], Any], stream: Stream) -> Pass:
        """A pass over a loader that can only be read in order."""
        return StreamPass(loader, self._begun, draw, stream, training=bool(self.trains(loader)))

    def open_steps(self, rows: int) -> StepsByHand:
        """The steps of a script that draws its batches by hand, of so many rows."""
        return StepsByHand(self._begun, rows)

    def by_hand(self) -> StepsByHand | None:
        """The steps that the script is in, if it draws its batches by hand."""
        for here in self.active:
            if isinstance(here, StepsByHand):
                return here
        return None

    def evaluates(self, here: Pass) -> None:
        """The script draws from `here`, which is not (or not yet) a training pass."""
        if here not in self.active:
            self.active = [p for p in self.active if p.training or p.loader is not here.loader]
            self.active.append(here)

    def ended_untrained(self, here: Pass) -> None:
        """`here` came to its end without a gradient: later passes over its loader are evaluations."""
        self._trains.setdefault(here.loader, False)

    def main(self) -> Pass | None:
        """The training pass that the script is in: the first one, if it draws from several loaders."""
        for here in reversed(self.active):
            if here.training and here.main is None:
                return here
        return None

    def beside(self, main: Pass) -> list[Pass]:
        """The passes that go along with `main`."""
        return [p for p in self.active if p.main is main]

    def other_of_loop(self, here: Pass) -> Pass | None:
        """The training pass over another loader from which the loop draws that begins to draw from `here`.

        Most of such loops draw from all their loaders for each step; others draw from one of them at a time,
        or begin a shorter one again while the longer one goes on.
        """
        for other in [p for p in self.active if p.training and p.main is None and not p.over]:
            before = next((p for p in (other, *self.beside(other)) if p.loader is here.loader), None)
            if before is None:
                in_turn = other.drawn == 1 or bool(other.drawn_in & here.drawn_in)
            else:
                in_turn = before is not other and before.over
            if in_turn:
                return other
        return None

    @property
    def drawn(self) -> int:
        """How many batches the script has drawn in the loop that it is in, if that counts them."""
        here = self.main()
        if here is None:
            return self._drawn_before
        return self._drawn_before + here.drawn + sum(p.drawn for p in self.beside(here))

    def stepped_in(self, loops: frozenset[SourceLoop]) -> None:
        """The script makes the first step of a pass, and is in the middle of these loops."""
        for here in self.active:
            self._brief |= here.drawn_in - loops

    def begin(
        self, here: Pass, follows: Pass | None = None, *, forwarding: bool = False, ahead: int = 0
    ) -> None:
        """Begin a training pass; `follows`: the pass with which it shares its steps.

        `ahead`: how many batches the script draws ahead.
        """
        here.training = self._trains[here.loader] = True
        if here not in self.active:
            self.active.append(here)
        if follows is not None:
            ended = [p for p in self.beside(follows) if p.loader is here.loader]
            self._drawn_before += sum(p.drawn for p in ended)
            self.active = [p for p in self.active if p not in ended]
            here.main, here.ordinal = follows, follows.ordinal
            here.epoch, here.counted = follows.epoch, follows.counted
            here.flight.extendleft(reversed(self._left.pop(id(here.loader), [])))
            if self._given_more and not forwarding:  # the job was in the middle of it
                here.go_to(self._given_more.pop(0))
            return
        carried = self._carried(here)
        goes_on = self._goes_on(here, carried)
        for other in carried:
            other.main, other.counted = here, here.counted
        self._left.clear()
        for before in [p for p in self.active if p is not here and p not in carried]:
            if before.training and not before.over:
                self.counts = True  # the script has left a pass before its end
            elif before.training and ahead:
                self._left[id(before.loader)] = list(before.flight)[-ahead:]
            self.active.remove(before)
        here.flight.extendleft(reversed(self._left.pop(id(here.loader), [])))
        here.ordinal = self._begun
        if not goes_on:
            here.epoch = here.ordinal
        for other in carried:
            other.epoch = here.epoch
        self._begun += 1

    def _carried(self, here: Pass) -> list[Pass]:
        """Passes that go on beside `here` as they did beside the pass before over its loader."""
        before = next((p for p in self.active if p.loader is here.loader and p.over and p.main is None), None)
        if before is None:
            return []
        return [p for p in self.beside(before) if not p.over and p.drawn_in & here.drawn_in]

    def _goes_on(self, here: Pass, carried: list[Pass]) -> bool:
        """Whether the loop that drew from the pass before goes on with `here`; counts what it drew."""
        here.counted = bool(here.drawn_in - self._brief)
        before = next((p for p in self.active if p is not here and p.training and p.main is None), None)
        if before is None or not before.counted or not here.counted:
            self._drawn_before = 0
            return False
        ended = [before, *(p for p in self.beside(before) if p not in carried)]
        self._drawn_before += sum(p.drawn for p in ended)
        here.epoch = before.epoch
        return True

    def in_batch(self) -> bool:
        """Whether a batch was drawn for training whose gradients are not computed yet."""
        return torch.is_grad_enabled() and any(p.training and p.flight for p in self.active)

    def next_batch(self) -> Drawn | None:
        """The batch whose gradients the script computes next, or else the last one again."""
        head = next((p.flight[0] for p in self.active if p.training and p.flight), None)
        return head or (self.current[0] if self.current else None)

    def capture(self) -> dict[str, Any]:
        """What other workers and checkpoints need to know of the position."""
        here = self.main()
        assert here is not None
        more = [p.position() for p in self.beside(here)]
        return {
            "position": here.position(),
            "more": more,
            "counts": self.counts,
            "epoch": here.epoch,
            "drawn": self.drawn,
        }

    def short_of(self, here: Pass, state: dict[str, Any]) -> int:
        """How many batches the script is behind `state`, if their count matters (negative: ahead)."""
        if here.counted and "drawn" in state:  # checkpoints of earlier versions have none
            return int(state["drawn"]) - self.drawn
        return int(state["position"]["batch"]) - here.drawn if state["counts"] else 0

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `capture` gave; `arrive` goes there."""
        self.counts = bool(state["counts"])
        self._given, self._given_more = state["position"], state["more"]

    def arrive(self, here: Pass) -> None:
        """Go to the position that was taken over, in `here` and the passes beside it."""
        positions = [self._given, *self._given_more]
        passes = [here, *self.beside(here)]
        self._given_more = positions[len(passes) :]
        if here.counted:  # after the same number of batches the job may be in another pass
            self._begun = int(self._given["pass"]) + 1
        for mine, position in zip(passes, positions):
            mine.ordinal = int(position["pass"])
            mine.go_to(position)
        if isinstance(here, StepsByHand):
            self.current = [here.last()]

    def reorder(self, passes: list[Pass]) -> None:
        """Give these passes, the main one first, the orders that were taken over."""
        for mine, given in zip(passes, [self._given, *self._given_more]):
            mine.reorder(given["begun"])


# ---------------------------------------------------------------------- the rhythm of steps and draws
# The order in which a script draws batches, computes gradients and steps.
#
# Most scripts do each once in turn. Others accumulate the gradients of several batches for one step, or
# draw batches ahead of the one that they compute.


class Rhythm:
    """How many batches make a step of the script, and how many it has drawn ahead."""

    def __init__(self) -> None:
        self.pending = False
        """True if a backward pass has run since the last step."""
        self.backwards = 0
        """Backward passes since the script last called `optimizer.step()`, with those of its closure."""
        self.ahead = 0
        """How many batches the script has drawn ahead when its optimizer steps."""
        self.most_in_flight = 0
        """The most batches of one loader that were in flight after a backward pass."""

    def computed(self, passes: list[Pass]) -> None:
        """The gradients of a batch were computed, which came from these passes."""
        for here in passes:
            if len(here.flight) > self.most_in_flight:
                self.most_in_flight = len(here.flight)

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self.pending = False


# ---------------------------------------------------------------------- the same place on all workers
# Where a worker's script is, as it tells the others with everything that they exchange.
#
# All workers run the same script on the same numbers, so all must be at the same place. One that is
# elsewhere than the leader leaves, says what differed, and another one takes its place.


END = [2**60, 0]
"""The batch of a script that has come to its end."""
_INEXACT = 1e-5
_WORDS = {
    "step": "after a backward pass",
    "call": "at a call of its model",
    "trial": "at the first call of a model",
    "input": "in a backward pass",
    "norm": "in a SyncBatchNorm",
    "end": "at the end of the script",
}


def place(job: ScriptJob, position: Position, doing: str) -> Header:
    """What this worker tells of its place: what it does, at which batch, after how many steps."""
    drawn = position.next_batch() if doing != "step" else None
    drawn = drawn or (position.current[0] if position.current else None)
    at = [-1, 0] if drawn is None else [drawn.ordinal, drawn.index]
    return {"what": "step", "doing": doing, "at": at, "steps": job.steps}


def leave(run: ScriptRun, job: ScriptJob, headers: list[Header]) -> None:
    """End this worker if it is elsewhere than the leader."""
    mine, leader = headers[job.rank], headers[0]
    if leader.get("at") == END != mine.get("at"):
        stop_with_the_leader(run, job)
    if all(mine.get(name) == leader.get(name) for name in ("doing", "at", "steps")) and _fit(mine, leader):
        if _near(mine.get("given", []), leader.get("given", [])):
            return
        give_way(run.link, "its model is given other numbers than the leader's", steps=job.steps)
    why = f"it is {_in_words(mine)}, and the leader is {_in_words(leader)}"
    give_way(run.link, why, steps=job.steps)


def stop_with_the_leader(run: ScriptRun, job: ScriptJob) -> NoReturn:
    """End this worker's script, which would go on: the leader's has come to its end, and that counts.

    A script that stops early by a number of its own part does so on each worker at another time.
    """
    run.left = True
    job.end()
    raise SystemExit(LEFT)


def _near(mine: list[list[float]], leader: list[list[float]]) -> bool:
    """Whether sums are the same, as exactly as machines of different kinds compute them."""
    if len(mine) != len(leader):
        return False
    for (one, sizes, count), (other, _, as_many) in zip(mine, leader):
        if count != as_many or abs(one - other) > _INEXACT * sizes:
            return False
    return True


def _fit(mine: Header, leader: Header) -> bool:
    """Whether both send tensors of the same kinds; their numbers of samples may differ."""
    one, other = mine.get("shapes", []), leader.get("shapes", [])
    return not one or not other or [[s[0], *s[2:]] for s in one] == [[s[0], *s[2:]] for s in other]


def _in_words(header: Header) -> str:
    ordinal, index = header.get("at", [-1, 0])
    where = "" if ordinal < 0 or [ordinal, index] == END else f" of batch {index} in training pass {ordinal}"
    sizes = f", with tensors {header['shapes']}" if "shapes" in header else ""
    doing = _WORDS.get(str(header.get("doing")), "elsewhere")
    return f"{doing}{where}, after {header.get('steps')} steps{sizes}"
