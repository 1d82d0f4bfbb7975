"""A worker's membership in its job: joining, going on in another generation, leaving.

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
from pathlib import Path
from typing import NamedTuple, NoReturn

from swell.train.agent.errors import LEFT, RESPAWN, Misfit, OutOfStep, PeerLost
from swell.train.learner import Learner
from swell.train.progress import Progress
from swell.train.saving import Saver
from swell.train.shares import Shares
from swell.train.state import statetree
from swell.train.sync.control import STOP, Link
from swell.train.sync.generation import Crew
from swell.train.sync.mesh import Header
from swell.train.travelling import TrainingState

log = logging.getLogger(__name__)

MOST_STRAYS, STRAYS_WITHIN_STEPS = 3, 1000
"""How often, within so many steps, members may be out of step before that ends a job that has trained."""


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
        """Write down all that may tell why members are out of step; raise `error` if that comes too often."""
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
        """Save the state and leave: the job was asked to stop, and may be started again later."""
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
        if number != STOP and self._link.config.get("slots") is None:  # nobody waits for this worker's slot
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
