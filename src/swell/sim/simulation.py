"""One simulation: the clock, and what happens at each moment."""

from __future__ import annotations

import math
from collections.abc import Callable

from swell.board import Board, Rhythm
from swell.domain import EventKind
from swell.sim.capacity import Capacity
from swell.sim.events import JobEvents
from swell.sim.explore import Exploration
from swell.sim.running import RunningJobs
from swell.sim.scheduler import Scheduler
from swell.sim.tally import Tally

ProgressSink = Callable[[float, int, int], None]
"""Called from time to time with the simulated seconds, the jobs that have ended, and all jobs."""

_PROGRESS_EVERY = 256
_IDLE_ROUNDS = 100
"""The run ends after this many decisions in a row with no job running and none to come: a policy that has not
started a waiting job by then never will."""


class Simulation:
    """Lets jobs come, run and go until all have ended."""

    def __init__(
        self,
        board: Board,
        running: RunningJobs,
        scheduler: Scheduler,
        rhythm: Rhythm,
        capacity: Capacity,
        events: JobEvents,
        explore: Exploration | None,
        on_progress: ProgressSink | None,
    ) -> None:
        self.board, self._table = board, board.table
        self._running = running
        self.scheduler, self._rhythm = scheduler, rhythm
        self.capacity = capacity
        self._events = events
        self._explore = explore
        self._on_progress = on_progress
        self.tally = Tally(board.table.submit_s)
        self.now_s = float(board.table.submit_s[0])
        self._began_s = self.now_s
        self._next_job = 0
        self._idle_rounds = 0
        self._busy_s = self.now_s
        """When a job last ran, or when jobs or changes of the cluster were last still to come."""

    def run(self) -> None:
        """Handle events in order of time until every job has ended or none can go on."""
        tally, turns = self.tally, 0
        while tally.ended < len(self._table):
            at_s = self._next_event_s()
            if at_s == math.inf:
                break
            tally.passed(at_s - self.now_s, len(self.board.active), self.board.cluster.capacity)
            self.now_s = at_s
            self._submissions()
            for row in self._running.finished(at_s):
                self._finish(row)
            if self.capacity.apply(at_s, self.scheduler.worth_nodes):
                self._rhythm.ask(at_s, urgent=True)
            if self._rhythm.due_s <= at_s:
                self._decide()
            turns += 1
            if turns % _PROGRESS_EVERY == 0:
                self._tell_progress()
        self._tell_progress()

    def _next_event_s(self) -> float:
        at_s = min(self._rhythm.due_s, self._running.ends.next_s())
        jobs_to_come = self._next_job < len(self._table)
        if jobs_to_come:
            at_s = min(at_s, self._table.submit_s[self._next_job])
        jobs_left = jobs_to_come or len(self.board.active) > 0
        return float(min(at_s, self.capacity.next_s(self.now_s, jobs_left=jobs_left)))

    def _tell_progress(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.now_s - self._began_s, self.tally.ended, len(self._table))

    # -- jobs that come and go ---------------------------------------------------------------------------

    def _submissions(self) -> None:
        table = self._table
        while self._next_job < len(table) and table.submit_s[self._next_job] <= self.now_s:
            row = self._next_job
            self._next_job += 1
            self.board.activate(row)
            self.capacity.jobs_changed(self.now_s)
            self.tally.came(row)
            self._events.submitted(self.now_s, row)
            if self._admitted(row):
                self._rhythm.ask(self.now_s)

    def _admitted(self, row: int) -> bool:
        """Whether the policy lets a job in that was just submitted; one that it refuses is gone."""
        if not self.scheduler.admits:
            self._events.write(self.now_s, EventKind.ADMITTED, row)
            return True
        answer = self.scheduler.admit(self.now_s)
        if answer.admitted:
            if answer.finish_s is not None:
                self.tally.promised_s[row] = answer.finish_s
            self._events.write(self.now_s, EventKind.ADMITTED, row, finish_s=answer.finish_s)
        else:
            self.tally.rejected[row] = 1
            self._leave(row)
            why = {"reason": answer.reason, "earliest_deadline_s": answer.earliest_deadline_s}
            self._events.write(self.now_s, EventKind.REJECTED, row, **why)
        return answer.admitted

    def _finish(self, row: int) -> None:
        table = self._table
        self.tally.finish_s[row] = self.now_s
        table.left[row] = 0.0
        self._leave(row)
        if self._events.wanted:
            deadline_s = table.deadline_s[row]
            met = None if math.isinf(deadline_s) else bool(self.now_s <= deadline_s)
            jct_s = self.now_s - table.submit_s[row]
            self._events.write(self.now_s, EventKind.FINISHED, row, jct_s=jct_s, met=met)
        self._rhythm.ask(self.now_s)

    def _leave(self, row: int) -> None:
        """Take a job that has ended or was refused off the board."""
        self.board.deactivate(row)
        self.capacity.jobs_changed(self.now_s)
        self._running.leave(row, self.now_s)
        self.tally.left(row, self.now_s)

    # -- decisions ---------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Let the policy decide, and follow it."""
        now_s, rhythm = self.now_s, self._rhythm
        rhythm.due_s = math.inf
        if not len(self.board.active):
            return
        self._running.replan_batches(now_s)
        self._bound()
        snapshot, decision = self.scheduler.decide(now_s)
        self._running.follow(self.board.carry_out(snapshot, decision), now_s)
        known_s = self._bound()
        rhythm.decided(now_s, self.scheduler.policy.next_wakeup_s(snapshot, decision))
        rhythm.due_s = min(rhythm.due_s, known_s)
        if self._in_vain():
            rhythm.due_s = math.inf
            self.capacity.stop()

    def _bound(self) -> float:
        """Bound each job's GPUs by what is known of its speed; returns when the next bound may rise."""
        if self._explore is None:
            return math.inf
        return self._explore.bound(self._table, self.board.active, self.now_s)

    def _in_vain(self) -> bool:
        """Whether the jobs that wait will never start, after another decision."""
        if self._running.ends or self._next_job < len(self._table) or self.capacity.pending:
            self._idle_rounds, self._busy_s = 0, self.now_s
        elif not self.capacity.worth_waiting(self.now_s - self._busy_s):
            self._idle_rounds += 1
        return self._idle_rounds >= _IDLE_ROUNDS
