"""One worker of a job: its parts, its membership (joining, going on in another generation, leaving), and the
state that it gives to newcomers and to checkpoints.

docs/how/runtime.md explains it ("Generations", "Death"); the coordinator's side is `membership`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from swell.train.agent.errors import LEFT, RESPAWN, Misfit, OutOfStep, PeerLost, UsageError
from swell.train.data.loader import ElasticLoader
from swell.train.learner import Learner
from swell.train.options import DEFAULT_CHECKPOINT_S, CheckpointOptions
from swell.train.replicas.group import Replica
from swell.train.reporting import Progress, Reporter
from swell.train.shares import Shares
from swell.train.state import statetree
from swell.train.state.keeper import Keeper
from swell.train.sync.control import STOP, Link
from swell.train.sync.generation import Crew
from swell.train.sync.level import Optimized
from swell.train.sync.memory import load_model, load_optimizer, model_tensors
from swell.train.sync.mesh import Header


class Worker:
    """The parts of a worker, put together."""

    def __init__(
        self, learner: Learner, progress: Progress, state: TrainingState, keeper: Keeper, link: Link | None
    ) -> None:
        self._learner = learner
        self._progress = progress
        self._state = state
        self._link = link
        facts: Header = {"model": learner.flat.digest, "mode": learner.mode, "logical_ranks": learner.logical}
        self._crew = Crew(link, learner.flat, state, facts)
        logical = learner.logical if learner.ranks is not None else None
        self._shares = Shares(logical, learner.sums, learner.replica.size)
        self._saver = Saver(keeper, state, progress, self._crew, learner.replica, link)
        self._member = Member(link, self._crew, learner, progress, state, self._shares, self._saver)
        self._reporter = Reporter(learner, progress, self._crew, link)

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._learner.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or all of several as one."""
        return self._learner.optimizer

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler, if the script gave one."""
        return self._learner.updater.scheduler

    @property
    def mode(self) -> str:
        """The batch mode: 'fixed', 'adaptive' or 'consistent'."""
        return self._learner.mode

    @property
    def epoch(self) -> int:
        """The epoch that the job is in."""
        return self._progress.epoch

    @property
    def steps(self) -> int:
        """Committed optimizer steps."""
        return self._progress.steps

    @property
    def loss(self) -> float | None:
        """The loss of the whole job, averaged over some fifty steps: the same on every worker."""
        return self._progress.loss.value

    @property
    def rank(self) -> int:
        """This worker's place in the present generation (changes when membership does)."""
        return self._crew.mesh.rank

    @property
    def world(self) -> int:
        """Workers in the present generation."""
        return self._crew.mesh.size

    @property
    def generation(self) -> int:
        """The number of the present generation; grows with every change of membership."""
        return self._crew.mesh.number

    @property
    def rehearsing(self) -> bool:
        """Whether this worker prepares and is not yet part of the job."""
        return self._member.rehearsing

    @property
    def is_leader(self) -> bool:
        """True on exactly one worker: the one that prints and saves."""
        return self._crew.mesh.rank == 0 and not self._member.rehearsing

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now: call this on every worker. The leader, helped by its replica, writes it."""
        if not self._member.rehearsing:
            self._saver.save(wait=wait)

    def capture(self) -> dict[str, Any]:
        """Everything that makes up the training state; tensors are live ones, not copies."""
        return self._state.capture()

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a captured state."""
        self._state.restore(state)


def keeper_of(options: CheckpointOptions, link: Link | None) -> Keeper:
    """Where and when a worker saves: by the script's options, else by the job's settings."""
    directory, every_s = options.checkpoint_dir, options.checkpoint_every_s
    if link is not None:
        directory = directory or link.config.checkpoints or link.directory.path / "checkpoints"
        if every_s == DEFAULT_CHECKPOINT_S:  # the script left it to the job's settings
            every_s = every_s if link.config.checkpoint_s is None else link.config.checkpoint_s
    return Keeper(directory, every_s, options.checkpoint_every_steps, options.keep_checkpoints)


# ---------------------------------------------------------------------- membership
# A worker's membership in its job: joining, going on in another generation, leaving.
#
# docs/how/runtime.md explains it ("Generations", "Death"); the coordinator's side is `membership`.


log = logging.getLogger(__name__)

MOST_STRAYS, STRAYS_WITHIN_STEPS = 3, 1000
"""How often, within so many steps, members may be out of step before that ends a job that has trained."""


T = TypeVar("T")


class Stage(enum.Enum):
    """How far a worker's process has come. The stages follow each other; REHEARSING may be left out."""

    NEW = "new"
    """Its script has not come to its training loop."""
    REHEARSING = "rehearsing"
    """The job trains already. This worker prepares, and waits to be let in."""
    MEMBER = "member"
    """It trains with the others."""
    ENDED = "ended"
    """It has left the job, or training is over; evaluations at the end are still made together."""


class Change(NamedTuple):
    """A candidate that all members agreed on in a step."""

    number: int
    at_next_batch: bool
    """Whether to switch where the script draws its next batch, instead of in `job.step`.

    Newcomers wait at that point of their script. After `job.step` the script may still call `job.reduce` or
    `job.agree`.
    """


class Member:
    """One worker's side of membership."""

    def __init__(
        self,
        link: Link | None,
        crew: Crew,
        learner: Learner,
        progress: Progress,
        state: TrainingState,
        shares: Shares,
        saver: Saver,
    ) -> None:
        self._link = link
        self._crew = crew
        self._learner = learner
        self._progress = progress
        self._state = state
        self._shares = shares
        self._saver = saver
        self.stage = Stage.NEW
        self._turned: int | None = None
        """The epoch that the job has gone on to, for a newcomer that waited in an earlier one."""
        self._preparing: tuple[int, threading.Thread] | None = None
        """The candidate for whose newcomers this worker allocates memory, and the thread that does it."""
        self._agreed: tuple[int, int] | None = None
        """A candidate that all members agreed on and have not switched to yet, and the epoch they were in."""
        self._strays: tuple[int, ...] = ()
        """The latest steps in which this worker found the members out of step."""

    @property
    def rehearsing(self) -> bool:
        """Whether this worker prepares and is not yet part of the job."""
        return self.stage is Stage.REHEARSING

    # ------------------------------------------------------------------ coming in

    def enter(self) -> None:
        """Become part of the job: at once, or after a rehearsal if the job is training already."""
        if self.stage is not Stage.NEW:
            return
        if self._link is None:
            self._crew.enter(self._crew.mesh, {})
            self._begin()
            return
        welcome = self._link.welcome()
        self._progress.epoch, live = self._learner.replica.first(welcome.epoch, int(welcome.live))
        if live:
            self.stage = Stage.REHEARSING
            return
        while not self.join():
            self.turn()

    def join(self) -> bool:
        """Wait to become a member; False if the job has gone on to another epoch (see `turn`)."""
        assert self._link is not None
        self._link.announce_ready(self._progress.epoch)
        while True:
            found = self._link.wait_join()
            if isinstance(found, int):
                self._turned = self._learner.replica.largest(found)
                return False
            standing = self._progress.epoch
            try:
                self._crew.levelling.follow(found)
                entered = self._crew.enter(found, {})
            except PeerLost:
                found.close()
                self._link.release()
                continue
            except Misfit as error:
                self.begin_anew(str(error))
            if self._learner.rehearsed and self._progress.epoch != standing:
                self.begin_anew()  # the script's loop variable says otherwise
            self._link.entered(found, self._progress.steps, self._progress.epoch)
            self._shares.settle(entered.covered, found.rank, found.size)
            self._begin()
            return True

    def _begin(self) -> None:
        self.stage = Stage.MEMBER
        name = self._link.name if self._link is not None else None
        self._learner.begin_random(self._progress.steps, name, self._crew.mesh.number)

    def turn(self) -> bool:
        """Go to the epoch that the job has gone on to while this worker waited; False if it has not."""
        if self._turned is None:
            return False
        self._progress.epoch, self._turned = self._turned, None
        return True

    def begin_anew(self, why: str = "") -> NoReturn:
        """Ask for a new process in place of this one, which stands at another point of the script."""
        if why and self._link is not None:
            log.error("worker %s is started again: %s", self._link.name, why)
        os._exit(RESPAWN)

    # ------------------------------------------------------------------ going on

    def offer(self) -> int:
        """The number of the candidate that this worker could switch to after this step, or 0."""
        if self._link is None:
            return 0
        number = self._link.offer(self._progress.epoch)
        if number > 0 and not self._prepared(number):
            self._link.release()
            return 0
        return number

    def _prepared(self, number: int) -> bool:
        """Whether the members may switch to a candidate, as far as this one is concerned.

        Newcomers on other hosts are level, and the memory for handing the state to others is ready: threads
        see to both while this worker trains.
        """
        assert self._link is not None
        try:
            mesh = self._link.take(number)
        except PeerLost:
            return True  # replaced by a newer candidate: no member will agree on this one
        if mesh is None or set(mesh.members) <= set(self._crew.mesh.members):
            return True
        if not self._crew.levelling.done(mesh):
            return False
        if not self._crew.needs_staging(mesh):
            return True
        if self._preparing is None or self._preparing[0] != number:
            replica = self._learner.replica
            alike = mesh.members[replica.position :: replica.size]
            if next(m for m in alike if m in self._crew.mesh.members) != self._link.name:
                return True  # another member hands the state over
            state = statetree.split(self._state.capture())[1]
            thread = threading.Thread(target=self._crew.handover.prepare, args=(mesh, state), daemon=True)
            thread.start()
            self._preparing = (number, thread)
        return not self._preparing[1].is_alive()

    def agreed_on(self, offered: int, headers: list[Header], *, same_generation: bool) -> Change | None:
        """The change that all members of a step agreed on, if any. Leaves if this worker is not in it: the
        step's update is for those who go on."""
        if not offered or not same_generation or any(h["candidate"] != offered for h in headers):
            return None
        assert self._link is not None
        change = Change(offered, self._link.brings_newcomers(offered))
        if offered != STOP and not change.at_next_batch:
            with contextlib.suppress(PeerLost):
                if self._link.take(offered) is None:
                    self._leave(offered)
        return change

    def after_step(self, offered: int, change: Change | None) -> None:
        """After the update: make the change that all members agreed on, or free the candidate offered."""
        if change is None:
            if offered and self._link is not None:
                self._link.release()
        elif change.at_next_batch:
            self._agreed = (change.number, self._progress.epoch)
        else:
            self.switch(change.number)

    def between_steps(self) -> None:
        """Where the script draws a batch: switch if members agreed to."""
        if self._agreed is not None and self._link is not None:
            (number, epoch), self._agreed = self._agreed, None
            if epoch == self._progress.epoch:
                self.switch(number)
            else:
                self._link.release()  # the script left its loop; the newcomers wait in the epoch before

    def switch(self, number: int) -> None:
        """Enter candidate `number`, on which all members agreed in the last step."""
        assert self._link is not None
        if number == STOP:
            self._leave_all()
        try:
            mesh = self._link.take(number)
        except PeerLost:
            self.recover()
            return
        if mesh is None:
            self._leave(number)
        self._learner.flat.settle()  # the device may still be computing the last step, which is no pause
        begin = time.perf_counter()
        old = self._crew.mesh
        try:
            entered = self._crew.enter(mesh, {})
        except PeerLost:
            old.close()
            self.recover()
            return
        old.close()
        self._link.entered(mesh, self._progress.steps, self._progress.epoch)
        self._shares.settle(entered.covered, mesh.rank, mesh.size)
        if mesh.rank == 0:
            self._link.event(
                "switch",
                step=self._progress.steps,
                world=mesh.size,
                pause_s=time.perf_counter() - begin,
                waited_s=entered.waited_s,
                level=entered.level,
            )

    def survive(self, operation: Callable[[], T], held: Callable[[], T]) -> T | None:
        """The result of an operation of all members; None if a death means that it must be made again.

        `held`: the result, if the operation is complete after all.
        """
        try:
            return operation()
        except (PeerLost, OutOfStep) as error:
            return held() if self.recover(error) else None

    def recover(self, error: Exception | None = None) -> bool:
        """Form the next generation after a death; True if the present operation is complete after all.

        `error`: what the operation ended with. Members that are out of step (`OutOfStep`) try it again too,
        and those that do not fit are replaced (`misfits`), but not for ever.
        """
        if self._link is None:
            raise PeerLost("a job of one has no peers to lose")
        if isinstance(error, OutOfStep):
            self._note_stray(error)
        begin, noticed = time.perf_counter(), time.time()
        self._agreed = None
        covered = self._shares.coverage()
        while True:
            self._crew.close()
            mesh = self._link.wait_recovery(self._crew.mesh, self._crew.operation)
            connected = time.perf_counter()
            try:
                entered = self._crew.enter(mesh, covered)
                break
            except PeerLost:
                continue
            except Misfit as misfit:
                self.begin_anew(str(misfit))
        self._link.entered(mesh, self._progress.steps, self._progress.epoch)
        if entered.complete:
            self._shares.others = dict(entered.covered)
        else:
            self._shares.settle(entered.covered, mesh.rank, mesh.size)
        if mesh.rank == 0:
            self._link.event(
                "recovery",
                step=self._progress.steps,
                world=mesh.size,
                connect_s=round(connected - begin, 6),
                pause_s=round(time.perf_counter() - begin, 6),
                noticed_s=round(noticed, 6),
            )
        return entered.complete

    def _note_stray(self, error: OutOfStep) -> None:
        """Write down all that may show why members are out of step; raise `error` if that comes too often."""
        assert self._link is not None
        mesh, steps = self._crew.mesh, self._progress.steps
        log.error(
            f"worker {self._link.name} is out of step: {error}. It is at step {steps} of epoch "
            f"{self._progress.epoch}, operation {self._crew.operation}; the latest candidate is "
            f"{self._link.candidate()}; {mesh.history()}"
        )
        self._strays = (*(s for s in self._strays if s > steps - STRAYS_WITHIN_STEPS), steps)
        if len(self._strays) > MOST_STRAYS or not self._crew.proven:
            raise error
        fields = {"step": steps, "generation": mesh.number, "operation": self._crew.operation}
        self._link.event("out_of_step", **fields, tries=len(self._strays), error=str(error))

    # ------------------------------------------------------------------ leaving

    def _leave_all(self) -> NoReturn:
        """Save the state and leave: the job is to stop, and may be started again later."""
        assert self._link is not None
        replica, rank = self._learner.replica, self._crew.rank
        self.stage = Stage.ENDED  # this script's end is not the end of training
        self._saver.save(wait=True)
        if rank < replica.size:
            replica.wait()  # until the leader has written
        if rank == 0:
            self._link.stopped()
            self._end_here()
        self._leave(STOP)

    def _leave(self, number: int) -> NoReturn:
        """Leave the job, because candidate `number` was agreed on without this worker."""
        assert self._link is not None
        if number != STOP and self._link.config.slots is None:  # nobody waits for this worker's slot
            step_aside()
        self._link.leaving(number)
        self._end_here()

    def _end_here(self) -> NoReturn:
        """End this worker's script; that its loop is left is not the end of training for the others."""
        self._crew.close()
        self._close()
        raise SystemExit(LEFT)

    def end(self) -> None:
        """Training is over, because the script has come to the end of its loop."""
        if self.stage is Stage.ENDED:
            return
        self._saver.wait()
        self._close()
        if self._link is not None:
            self._link.done(self._crew.operation)
            self._link.flush()

    def _close(self) -> None:
        self.stage = Stage.ENDED
        self._state.close()


def step_aside() -> None:
    """Lower the priority of this process before it ends, because freeing its memory takes a lot of CPU time.

    This applies to all threads, because the last thread to end does the work.
    """
    if sys.platform != "linux":
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


# ---------------------------------------------------------------------- the state that travels and is saved
# The state of a job: what newcomers receive and checkpoints hold, and how a job begins without any.


class TrainingState:
    """Everything that must be the same on all members; the `Carrier` of a crew."""

    def __init__(self, learner: Learner, progress: Progress, keeper: Keeper) -> None:
        self._learner = learner
        self._progress = progress
        self._keeper = keeper
        self.loaders: dict[str, ElasticLoader] = {}
        self._objects: dict[str, Any] = {}
        """Objects that the script gave to `register`."""
        self._positions: dict[str, Any] = {}
        """By name: the positions of loaders that the script has not made yet."""

    def add(self, loader: ElasticLoader) -> None:
        """Let the position of a loader travel, and take over the one that it had, if any."""
        self.loaders[loader.name] = loader
        if loader.name in self._positions:
            loader.load(self._positions.pop(loader.name))

    def free_name(self, name: str | None) -> str:
        """The name of a new loader; UsageError if another one has it."""
        name = name or f"loader{len(self.loaders)}"
        if name in self.loaders:
            raise UsageError(f"name: there are two loaders called {name!r}; give each its own")
        return name

    def register(self, name: str, value: Any) -> None:
        """Let anything with state_dict and load_state_dict travel."""
        if name in self._objects:
            raise UsageError(f"name: there are two objects called {name!r}; give each its own")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise UsageError(f"{name}: a {type(value).__name__} has no {method}(), so it cannot travel")
        self._objects[name] = value

    def close(self) -> None:
        """End the loaders' processes and threads."""
        for loader in self.loaders.values():
            loader.close()

    def capture(self) -> dict[str, Any]:
        """The whole state; tensors are live ones, not copies, and sharded ones as this worker has them."""
        return self._learner.form.local(self.all())

    def gathered(self, *, keep: bool) -> dict[str, Any]:
        """The state with whole tensors, where `keep`; all workers of a replica must call this together."""
        return self._learner.form.gathered(self.all(), keep=keep)

    def all(self) -> dict[str, Any]:
        """The state as the model and the optimizer hold it."""
        learner, progress = self._learner, self._progress
        state: dict[str, Any] = {
            "model": model_tensors(learner.model),
            "optimizer": learner.optimizer.state_dict(),
            "objects": {name: value.state_dict() for name, value in self._objects.items()},
            "loaders": {name: ld.state() for name, ld in self.loaders.items()} | self._positions,
            "epoch": progress.epoch,
            "steps": progress.steps,
            "loss": progress.loss.state_dict(),
        }
        state |= learner.updater.state()
        if learner.adaptive is not None:
            state["adaptive"] = learner.adaptive.state_dict()
        if learner.ranks is not None:
            state["rank_buffers"] = learner.ranks.buffers
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a captured state."""
        learner, progress = self._learner, self._progress
        load_model(learner.model, state["model"])
        load_optimizer(learner.optimizer, learner.form.for_optimizer(state["optimizer"]))
        learner.updater.load(state)
        for name, value in self._objects.items():
            if name in state["objects"]:
                value.load_state_dict(state["objects"][name])
        self._positions = dict(state["loaders"])
        for name, loader in self.loaders.items():
            if name in self._positions:
                loader.load(self._positions.pop(name))
        if learner.adaptive is not None and "adaptive" in state:
            learner.adaptive.load_state_dict(state["adaptive"])
        progress.epoch, progress.steps = int(state["epoch"]), int(state["steps"])
        if "loss" in state:  # checkpoints of earlier versions have none
            progress.loss.load_state_dict(state["loss"])
        if learner.ranks is not None:
            learner.ranks.restore(state["rank_buffers"])
        learner.flat.clear()

    def steady(self) -> dict[str, Tensor]:
        """The tensors of the captured state that change only in the optimizer's step; buffers do not."""
        parameters = dict(self._learner.model.named_parameters())
        state = {"model": parameters, "optimizer": self._learner.optimizer.state_dict()}
        return statetree.split(self._learner.form.local(state))[1]

    def optimized(self) -> Optimized | None:
        """Tensors that the optimizer changes, for newcomers that make its steps by themselves."""
        if self._learner.form.sharded:
            return None
        return Optimized(dict(self._learner.model.named_parameters()), self._learner.optimizer)

    def found(self) -> int:
        """Begin without live state: from the newest checkpoint, or from what the script built. Returns the
        number of the job's next operation."""
        if self._learner.rehearsed:
            os._exit(RESPAWN)  # the rehearsal for another position has changed this worker's weights
        self._progress.epoch = 0
        state = self._keeper.load(self._learner.form.targets)
        if state is None:
            return 0
        self.restore(self._learner.form.local(state))
        return int(state["operation"])


# ---------------------------------------------------------------------- checkpoints
# Checkpoints: the worker in the first place writes them, helped by the others of its replica.


class Saver:
    """Saves the state of a job from one of its members."""

    def __init__(
        self,
        keeper: Keeper,
        state: TrainingState,
        progress: Progress,
        crew: Crew,
        replica: Replica,
        link: Link | None,
    ) -> None:
        self._keeper = keeper
        self._state = state
        self._progress = progress
        self._crew = crew
        self._replica = replica
        self._link = link

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint now; every member calls this."""
        if self._crew.rank >= self._replica.size:
            return
        state = self._state.gathered(keep=self._crew.rank == 0)
        if self._crew.rank == 0:
            state = {"operation": self._crew.operation} | state
            self._keeper.save(self._progress.steps, state, wait=wait)
            self._report()

    def due_with(self, header: Header) -> None:
        """As the leader of a job with replicas, say in a step's header that the step is to be saved."""
        if self._replica.size > 1 and self._crew.rank == 0 and self._keeper.due(self._progress.steps + 1):
            header["save"] = True

    def save_if_due(self, headers: list[Header]) -> None:
        """Between two steps: save a checkpoint if it is time, and report one that was completed.

        In a job with replicas the leader has announced it in the step's header, because others help it.
        """
        steps, alone = self._progress.steps, self._replica.size == 1
        if (self._crew.rank == 0 and self._keeper.due(steps)) if alone else headers[0].get("save"):
            self.save()
        self._report()

    def wait(self) -> None:
        """As the leader, wait until the last checkpoint is on disk."""
        if self._crew.rank == 0:
            self._keeper.wait()

    def _report(self) -> None:
        step = self._keeper.newly_saved()
        if step is not None and self._link is not None:
            self._link.event("checkpoint", step=step)
