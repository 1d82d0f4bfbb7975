"""How the script of a newcomer comes to the job's position, and what it takes over there.

A newcomer runs the same script, gets a single batch in every pass that is over (or as many as the job, in a
loop that counts its draws: see `replay`), waits in the running pass, and receives the model, the optimizers
and what the script holds (`held`); then it goes on like the others.
It takes them at the same line of the script at which the others hand them over: where the script asks for its
next batch, or, if the script draws batches ahead, after the optimizer's step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import UserDict
from typing import Any

import torch
from torch import Tensor, nn

from swell.train.agent.client import JobClient
from swell.train.auto import by_hand, held
from swell.train.auto.by_hand import StepsByHand
from swell.train.auto.fingerprint import contents
from swell.train.auto.held import Data, Holder, OfRuntime
from swell.train.auto.job import ScriptJob, ScriptRun, ScriptStage, give_way, say
from swell.train.auto.packing import Packed, Packer, Unpacker
from swell.train.auto.passes import Pass, Readings, StreamPass
from swell.train.auto.position import Position, Rhythm
from swell.train.auto.trained import Trained, is_stale, is_that_of_members
from swell.train.sync.control import Link
from swell.train.sync.memory import _cloned as cloned

_TRIES = 3
"""So many times gradients are computed after all, to see what the script uses them for."""
_NEAR = 10
"""A newcomer that is so few batches behind may join."""


class Replay:
    """Draws as often as the job did."""

    def __init__(self, link: Link, position: Position) -> None:
        self._link = link
        self._position = position
        self._target = -1
        """How many batches the job had drawn when it was asked last."""
        self._lag: int | None = None
        """How far this worker was behind then."""
        self._tried = 0
        self._plain = True
        """True if gradients are only those of parameters, and dense."""

    def samples(self, here: Pass) -> list[Any]:
        """A few samples in place of the next batch; ends the pass where the job ended it."""
        if here.order.peek(here.drawn) is None:
            here.over = True
            raise StopIteration
        return here.idle()

    def is_behind(self) -> bool:
        """Whether the job is known to be further, and this worker to come nearer."""
        drawn = self._position.drawn
        if drawn < self._target:
            return True
        lag = self._drawn_by_job() - drawn
        if lag <= _NEAR or (self._lag is not None and lag > self._lag / 2):
            return False
        self._target, self._lag = drawn + lag, lag
        return True

    def _drawn_by_job(self) -> int:
        drawn = self._reported().get("drawn")
        return drawn if isinstance(drawn, int) else 0

    def drawn_in_pass(self, epoch: int) -> int:
        """How many batches the job is known to have drawn in that pass; 0 if it is in another one."""
        report = self._reported()
        drawn = report.get("drawn")
        return drawn if isinstance(drawn, int) and report.get("drawn_in") == epoch else 0

    def _reported(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError), JobClient(self._link.directory, wait_s=10.0) as client:
            return client.status()["last_report"] or {}
        return {}

    def skips(self, roots: Any, job: ScriptJob) -> bool:
        """Whether the gradients of `roots` need not be computed; they are zero then."""
        here = self._position.main()
        if here is None or not here.counted or not self._plain:
            return False
        parameters = job.parameters()
        if self._tried < _TRIES:
            self._tried += 1
            self._plain = _reaches_parameters_only(roots)
            return False
        self._plain = not any(p.grad is not None and p.grad.is_sparse for p in parameters)
        if self._plain:
            for parameter in parameters:  # scripts read them, and gradient scalers want them
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return self._plain


def _reaches_parameters_only(roots: Any) -> bool:
    """Whether only parameters get gradients, and not the inputs (as for adversarial examples)."""
    ahead = [root.grad_fn for root in ((roots,) if isinstance(roots, Tensor) else roots)]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not isinstance(getattr(node, "variable", None), nn.Parameter | None):
            return False
        ahead += [inner for inner, _ in node.next_functions]
    return True


# ---------------------------------------------------------------------- from the beginning to the job's place


log = logging.getLogger(__name__)

_MOST_IDLE = 8
"""A script that trains a new model steps with it after so many batches."""
_AHEAD = "batches drawn ahead"
_MOST_WAITS = 3
_MOST_ELSEWHERE = 1_000
_LOOK_S = 0.2


class CatchingUp:
    """What one worker's script hands over, and another's takes over once it has come there."""

    def __init__(
        self,
        run: ScriptRun,
        position: Position,
        rhythm: Rhythm,
        trained: Trained,
        readings: Readings,
    ) -> None:
        self._run = run
        self._position = position
        self._rhythm = rhythm
        self._trained = trained
        self._readings = readings
        self.replay = Replay(run.link, position)
        self._data = Data()
        self._held: Packed | None = None
        """What the script of another worker held. This worker's script gets it when it has caught up."""
        self._files: dict[str, int] = {}
        """How long the files were that it kept open."""
        self._random: dict[str, Any] = {}
        """The states of its generators."""
        self._ahead: list[Any] = []
        """Sums over the batches that the other worker had drawn ahead, to compare with this worker's."""
        self._spot: dict[str, Any] = {}
        """Where it was, if it draws by hand (see `by_hand`)."""
        self._over: dict[str, Any] = {}
        """The sequences that the other worker's loops go over."""
        self._elsewhere = 0
        """How many steps this worker has made elsewhere in its script."""
        self._waited = 0
        """For how many passes this worker has waited because the others train other layers."""

    def begin(self) -> None:
        """The script is at its first step: remember the data that every worker's script makes by itself."""
        survey = Packer(self._runtime(), None)
        survey.pack(self._places())
        self._data.note(survey.large)

    # ------------------------------------------------------------------ going there

    def forward(self, here: Pass, job: ScriptJob) -> Any:
        """Samples to compute without effect while catching up; None once caught up. May end the pass."""
        if here.main is not None:
            return self.replay.samples(here) if here.counted else here.idle()
        while True:
            if here.epoch > job.epoch:
                there, theirs = here.epoch, job.epoch
                why = f"its script has come to pass {there} while the others are in pass {theirs}"
                give_way(self._run.link, why, steps=job.steps)
            if here.counted:
                if self._may_arrive(here, job) and self._arrive(here, job):
                    return None
                return self.replay.samples(here)
            if here.epoch < job.epoch:
                if here.drawn <= self._rhythm.ahead:
                    return here.idle()
                here.over = True
                if isinstance(here, StreamPass) and (why := self._readings.go_through(here)):
                    give_way(self._run.link, why, steps=job.steps)
                raise StopIteration
            if isinstance(here, StreamPass) and job.script_state.later is None:  # the others are alive
                here.stream.skip(self.replay.drawn_in_pass(here.epoch))
            # Go on until a step, so that accumulation stays in phase; arrive there if batches are in flight.
            if self._rhythm.pending or self._rhythm.ahead:
                return here.idle()
            if self._arrive(here, job):
                return None
            if here.epoch == job.epoch:
                return here.idle()

    def _may_arrive(self, here: Pass, job: ScriptJob) -> bool:
        """Whether a script that draws as often as the job did may be where the job is."""
        if here.epoch != job.epoch or self._rhythm.pending or self._rhythm.ahead:
            return False
        return job.script_state.later is not None or not self.replay.is_behind()

    def arrive_after_step(self, here: Pass, job: ScriptJob) -> None:
        """Catch up after a step, if the script draws batches ahead."""
        if here.counted and job.script_state.later is None and self.replay.is_behind():
            return
        while here.epoch == job.epoch:
            if self._arrive(here, job):
                return
            if job.script_state.later is not None:  # there are batches to count
                return
            if not is_that_of_members(job, self._run.link):
                return

    def arrive_by_hand(self, here: StepsByHand, job: ScriptJob) -> None:
        """Catch up after a step of a script that draws by hand, if it is in the same spot as the job."""
        link, state = self._run.link, job.script_state
        if here.epoch != job.epoch:
            return  # the others are done with this, and draw from a loader
        if is_stale(job):
            self._trained.lay_out(job)
        if not is_that_of_members(job, link):
            give_way(link, "the others train other layers than its script", steps=job.steps)
        if state.later is None and not job.join():
            return
        if state.later is not None:
            if not self.is_at(state.later["script"], job.steps):
                self._elsewhere += 1
                if self._elsewhere > _MOST_ELSEWHERE:
                    give_way(link, "its script does not come to where the others are", steps=job.steps)
                return
            state.arrive(state.later)
            link.at_epoch(here.epoch)
        self._position.arrive(here)
        state.resumed = False
        self._take_over()
        why = by_hand.go_to(self._spot, self._over)
        if why:
            give_way(link, why, steps=job.steps)
        self._run.randomness.restore(here, self._random)
        job.arrived()

    def _arrive(self, here: Pass, job: ScriptJob) -> bool:
        """Take over the job's state if the script is at the job's position, waiting to join if need be."""
        link = self._run.link
        if is_stale(job):
            self._trained.lay_out(job)
        if not is_that_of_members(job, link):
            if here.drawn >= _MOST_IDLE + self._rhythm.ahead:
                self._wait_for_the_next_pass(here, job)
            return False  # its script has not stepped with what the others train now
        state = job.script_state
        if state.later is not None:
            short = self._position.short_of(here, state.later["script"])
            if short < 0:  # the script has counted too many batches
                give_way(link, f"its script is {-short} batches ahead of the others'", steps=job.steps)
            if short:
                return False
            state.arrive(state.later)
            link.at_epoch(here.epoch)
        elif not job.join() or state.later is not None:
            return False
        self._position.arrive(here)
        for mine in (here, *self._position.beside(here)):
            if mine.astray:
                give_way(link, mine.astray, steps=job.steps)
        state.resumed = False
        self._take_over()
        self._run.randomness.restore(here, self._random)
        job.arrived()
        return True

    def _wait_for_the_next_pass(self, here: Pass, job: ScriptJob) -> None:
        """Layers were unfrozen in the middle of the running pass, so this worker can join in a later one."""
        self._waited += 1
        if self._waited > _MOST_WAITS:
            give_way(self._run.link, "the others train other layers than its script", steps=job.steps)
        while True:
            with contextlib.suppress(OSError, ValueError), JobClient(self._run.link.directory) as client:
                epoch = client.status()["epoch"]
                if epoch > here.epoch:
                    job.turn_to(epoch)
                    return
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------------ the script's part of the job's state

    def is_at(self, state: dict[str, Any], steps: int) -> bool:
        """Whether the script stands where `state` was captured, after that many steps."""
        if self._run.stage is ScriptStage.FOUNDING:
            return steps == 0
        if self._position.by_hand() is not None:
            return state.get("spot") is not None and by_hand.is_there(state["spot"])
        here = self._position.main()
        assert here is not None
        if here.epoch != int(state.get("epoch", state["position"]["pass"])):
            return False
        short = self._position.short_of(here, state)
        if short < 0:  # the script has counted too many batches
            give_way(self._run.link, f"its script is {-short} batches ahead of the others'", steps=steps)
        return short == 0

    def capture(self) -> dict[str, Any]:
        """The script's position and what it holds."""
        places, spot = self._places(), None
        if self._position.by_hand() is not None:
            spot, over = by_hand.spot()
            places.append(over)
        return self._position.capture() | {
            "random": self._run.randomness.capture(self._position.main()),
            "files": self._run.files.positions() if self._run.files is not None else {},
            "held": Packer(self._runtime(), self._data).pack(places),
            "spot": spot,
            "ahead": self._sums_ahead(),
        }

    def drawn(self) -> int:
        """How many batches the script has drawn in the loop that it is in, for newcomers."""
        return self._position.drawn

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `capture` gave; position and variables follow once the script has come there."""
        given = cloned(state)
        self._position.restore(given)
        self._random = given.get("random", {})  # checkpoints of earlier versions have none
        self._held = given.get("held")
        self._spot = given.get("spot") or {}
        self._files = given.get("files", {})
        self._ahead = given.get("ahead", [])
        if self._run.stage is ScriptStage.FOUNDING:
            self._take_over()

    def _take_over(self) -> None:
        """Put what another worker's script held into this worker's."""
        packed, self._held = self._held, None
        if packed is None:
            return
        if self._run.files is not None:
            self._run.files.arrive(self._files)
        unpacker = Unpacker(packed, self._runtime())
        self._over.clear()
        unpacker.unpack([*self._places(), by_hand.over(self._over)])
        if unpacker.keeps:
            log.info("worker %s goes on without %s", self._run.link.name, ", ".join(unpacker.keeps))
        if unpacker.lacks:
            self._lacks(
                f"it has not what the script holds, and that cannot be copied: {'; '.join(unpacker.lacks)}"
            )
        if self._ahead != self._sums_ahead():
            self._lacks("what is in the batches that the script has drawn ahead cannot be copied")

    def _lacks(self, what: str) -> None:
        """This worker's script lacks something that the others' holds."""
        job = self._run.job
        assert job is not None
        if job.world > 1:
            give_way(self._run.link, what, steps=job.steps)
        say(f"worker {self._run.link.name} goes on from the checkpoint, but {what}")

    def _places(self) -> list[Holder]:
        job = self._run.job
        assert job is not None
        found = held.places(held.script_frames(), held.script_modules(), job.model)
        return [*found, self._batches_ahead()]

    def _batches_ahead(self) -> Holder:
        """The batches that the script has drawn ahead, wherever it (or a framework) keeps them.

        A newcomer's script has drawn as many, of other samples: what is in them is replaced.
        """
        flights = [here.flight for here in self._position.active if here.training]
        found = [drawn.batch for flight in flights for drawn in flight]
        batches = {f"{i}": b.data if isinstance(b, UserDict) else b for i, b in enumerate(found)}

        def put(key: str, batch: Any) -> None:
            before = batches[key]
            if isinstance(before, Tensor) and isinstance(batch, Tensor):
                before.data = batch

        return Holder(_AHEAD, batches, put, must=True)

    def _sums_ahead(self) -> list[Any]:
        return [contents(batch) for batch in self._batches_ahead().values.values()]

    def _runtime(self) -> OfRuntime:
        job = self._run.job
        assert job is not None
        return OfRuntime(job.model, self._trained.optimizers)
