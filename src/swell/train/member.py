"""A worker's membership in its job: joining, going on in another generation, leaving.

docs/runtime.md explains it ("Generations", "Death"); the coordinator's side is `membership`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from swell.train.agent.errors import LEFT, RESPAWN, Misfit, OutOfStep, PeerLost
from swell.train.data.loader import ElasticLoader
from swell.train.data.samples import key, seed_all
from swell.train.modes.ranks import LogicalRanks
from swell.train.saving import Saving
from swell.train.shares import Shares
from swell.train.state import statetree
from swell.train.sync.flat import FlatModel
from swell.train.sync.link import STOP
from swell.train.turns import Turns

if TYPE_CHECKING:
    from swell.train.modes.adaptation import Adaptation

log = logging.getLogger(__name__)

MOST_STRAYS, STRAYS_WITHIN_STEPS = 3, 1000
"""How often, within so many steps, members may be out of step before that ends a job that has trained."""


class Member(Saving):
    """A worker's side of membership; `Job` sets the fields."""

    epoch: int
    seed: int
    _flat: FlatModel
    _shares: Shares
    _ranks: LogicalRanks | None
    _adaptive: Adaptation | None
    _loaders: dict[str, ElasticLoader]
    _entered: bool
    _rehearsed: bool
    _turned: int | None
    """The epoch that the job has gone on to, for a newcomer that waited in an earlier one."""
    _ended: bool
    _turns: Turns | None
    """Whose turn it is, where several jobs share a GPU."""
    _preparing: tuple[int, threading.Thread] | None = None
    """The candidate for whose newcomers this worker allocates memory, and the thread that does it."""
    _agreed: tuple[int, int] | None = None
    """A candidate that all members agreed on and have not switched to yet, and the epoch they were in."""
    _strays: tuple[int, ...] = ()
    """The latest steps in which this worker found the members out of step."""

    def _offer(self) -> int:
        if self._link is None:
            return 0
        number = self._link.offer(self.epoch)
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
        if not self._crew.levelled(mesh):
            return False
        if not self._crew.needs_staging(mesh):
            return True
        if self._preparing is None or self._preparing[0] != number:
            alike = mesh.members[self._replica.position :: self._replica.size]
            if next(m for m in alike if m in self._crew.mesh.members) != self._link.name:
                return True  # another member hands the state over
            state = statetree.split(self.capture())[1]
            thread = threading.Thread(target=self._crew.prepare, args=(mesh, state), daemon=True)
            thread.start()
            self._preparing = (number, thread)
        return not self._preparing[1].is_alive()

    def _enter(self) -> None:
        """Become part of the job: at once, or after a rehearsal if the job is training already."""
        if self._entered or self._rehearsing:
            return
        if self._link is None:
            self._crew.enter(self._crew.mesh, {})
            self._entered = True
            self._begin_random()
            return
        welcome = self._link.welcome()
        self.epoch, live = self._replica.first(int(welcome["epoch"]), int(welcome["live"]))
        if live:
            self._rehearsing = True
            return
        while not self._join():
            assert self._turned is not None
            self.epoch, self._turned = self._turned, None

    def _join(self) -> bool:
        """Wait to become a member; False if the job has gone on to another epoch (`_turned`)."""
        assert self._link is not None
        self._link.announce_ready(self.epoch)
        while True:
            found = self._link.wait_join()
            if isinstance(found, int):
                self._turned = self._replica.largest(found)
                return False
            standing = self.epoch
            try:
                self._crew.follow(found)
                entered = self._crew.enter(found, {})
            except PeerLost:
                found.close()
                self._link.release()
                continue
            except Misfit as error:
                self._begin_anew(error)
            if self._rehearsed and self.epoch != standing:
                os._exit(RESPAWN)  # the script's loop variable says otherwise
            self._rehearsing, self._entered = False, True
            self._link.entered(found, self.steps, self.epoch)
            self._shares.settle(entered.covered, self.rank, self.world)
            self._begin_random()
            return True

    def _between_steps(self) -> None:
        """Where the script draws a batch: switch to the candidate that all members agreed on, if any. Where
        the job shares a GPU, wait for its turn.

        Newcomers wait at this point of their script. So members enter a generation with newcomers here, and
        not in `job.step`, after which the script may still call `job.reduce` or `job.agree`.
        """
        if self._agreed is not None and self._link is not None:
            (number, epoch), self._agreed = self._agreed, None
            if epoch == self.epoch:
                self._switch(number)
            else:
                self._link.release()  # the script left its loop; the newcomers wait in the epoch before
        if self._turns is not None:
            self._turns.before_step()

    def _switch(self, number: int) -> None:
        """Enter candidate `number`, on which all members agreed in the last step."""
        assert self._link is not None
        if number == STOP:
            self._leave_all()
        try:
            mesh = self._link.take(number)
        except PeerLost:
            self._recover()
            return
        if mesh is None:
            self._leave(number)
        self._flat.settle()  # the device may still be computing the last step, which is no pause
        begin = time.perf_counter()
        old = self._crew.mesh
        try:
            entered = self._crew.enter(mesh, {})
        except PeerLost:
            old.close()
            self._recover()
            return
        old.close()
        self._link.entered(mesh, self.steps, self.epoch)
        self._shares.settle(entered.covered, self.rank, self.world)
        if self.rank == 0:
            self._link.event(
                "switch",
                step=self.steps,
                world=self.world,
                pause_s=time.perf_counter() - begin,
                waited_s=entered.waited_s,
                level=entered.level,
            )

    def _leave_all(self) -> NoReturn:
        """Save the state and leave: the job was asked to stop, and may be started again later."""
        assert self._link is not None
        self._ended = True  # this script's end is not the end of training
        self.save(wait=True)
        if self.rank < self._replica.size:
            self._replica.wait()  # until the leader has written
        if self.is_leader:
            self._link.stopped()
            self._end_here()
        self._leave(STOP)

    def _brings_newcomers(self, number: int) -> bool:
        """Whether candidate `number` has members that the present generation has not."""
        return self._link is not None and self._link.brings_newcomers(number)

    def _leave_if_out(self, number: int) -> None:
        """Leave if this worker is not in candidate `number`, on which all members agreed."""
        assert self._link is not None
        with contextlib.suppress(PeerLost):
            if number != STOP and self._link.take(number) is None:
                self._leave(number)

    def _recover(self, error: Exception | None = None) -> bool:
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
                self._begin_anew(misfit)
        self._link.entered(mesh, self.steps, self.epoch)
        if entered.complete:
            self._shares.others = dict(entered.covered)
        else:
            self._shares.settle(entered.covered, self.rank, self.world)
        if self.rank == 0:
            self._link.event(
                "recovery",
                step=self.steps,
                world=self.world,
                connect_s=round(connected - begin, 6),
                pause_s=round(time.perf_counter() - begin, 6),
                noticed_s=round(noticed, 6),
            )
        return entered.complete

    def _note_stray(self, error: OutOfStep) -> None:
        """Write down all that may tell why members are out of step; raise `error` if that comes too often."""
        assert self._link is not None
        mesh = self._crew.mesh
        log.error(
            f"worker {self._link.name} is out of step: {error}. It is at step {self.steps} of epoch "
            f"{self.epoch}, operation {self._crew.operation}; the latest candidate is "
            f"{self._link.candidate()}; {mesh.history()}"
        )
        recent = [step for step in self._strays if step > self.steps - STRAYS_WITHIN_STEPS]
        self._strays = (*recent, self.steps)
        if len(self._strays) > MOST_STRAYS or not self._crew.proven:
            raise error
        fields = {"step": self.steps, "generation": mesh.number, "operation": self._crew.operation}
        self._link.event("out_of_step", **fields, tries=len(self._strays), error=str(error))

    def _begin_anew(self, error: Misfit) -> NoReturn:
        """Ask for a new process in place of this one, which stands at another point of the script."""
        log.error("worker %s is started again: %s", self._link.name if self._link else "", error)
        os._exit(RESPAWN)

    def _begin_random(self) -> None:
        if self._ranks is not None:
            self._ranks.between(self.steps)
        elif self._link is not None:
            seed_all(key(self.seed, self._link.name, self._crew.mesh.number))

    def _quit_rehearsal(self) -> None:
        """Ask for a new process, because the script left its loop before this worker was part of the job."""
        os._exit(RESPAWN)

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
        self._ended = True
        if self._turns is not None:
            self._turns.leave()
        for loader in self._loaders.values():
            loader.close()
        raise SystemExit(LEFT)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._turns is not None:
            self._turns.leave()
        if self.is_leader:
            self._keeper.wait()
        for loader in self._loaders.values():
            loader.close()
        if self._link is not None:
            self._link.done(self._crew.operation)
            self._link.flush()


def step_aside() -> None:
    """Lower the priority of this process before it ends, because freeing its memory takes a lot of CPU time.

    This applies to all threads, because the last thread to end does the work.
    """
    if sys.platform != "linux":
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
