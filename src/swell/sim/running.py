"""The jobs that run, in virtual time.

A job's row in the table holds its state as of the job's last change and is brought up to date only when the
job changes again (`settle`), so an event costs no more than the jobs it affects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from swell.board import Board, Move, with_reasons
from swell.domain import EventKind
from swell.sim.events import JobEvents
from swell.sim.segments import SegmentEnds
from swell.sim.world import World


class RunningJobs:
    """Lets jobs make progress where the board has placed them, one segment after the other."""

    def __init__(self, board: Board, world: World, events: JobEvents) -> None:
        self._board, self._table = board, board.table
        self._world = world
        self._events = events
        self.ends = SegmentEnds(len(board.table))

    def settle(self, row: int, now_s: float) -> None:
        """Bring a job's row up to now."""
        self._ran(row, self._table.settle(row, now_s))

    def _ran(self, row: int, ran_s: float) -> None:
        if ran_s > 0:
            self._world.advance(row, ran_s)

    def _start_segment(self, row: int, now_s: float, new_plan: bool = False) -> None:
        speed, togo = self._world.start_segment(row, self._board.cluster, new_plan)
        if speed > 0:
            begins_s = max(now_s, float(self._table.paused_until_s[row]))
            # A job that is timed anew at the end of its segment may be a rounding error beyond it.
            self.ends.set(row, begins_s + max(togo, 0.0) / speed)
        else:
            self.ends.drop(row)

    def finished(self, now_s: float) -> Iterator[int]:
        """Start the next segments of the jobs whose segment has ended; yields the jobs that have finished."""
        while (row := self.ends.take(now_s)) is not None:
            self.settle(row, now_s)
            if self._world.segment_over(row):
                yield row
            else:
                self._tell_progress(row, now_s)
                self._start_segment(row, now_s)

    def follow(self, moves: Sequence[Move], now_s: float) -> None:
        """Let jobs go on at the placements that the board gave them, and their neighbours beside them."""
        shared = self._world.shared
        changed = [] if shared is None else shared.place((move.row, move.after) for move in moves)
        for move in with_reasons(moves) if self._events.wanted else moves:
            self._follow(move, now_s)
        if changed:
            moved = {move.row for move in moves}
            self._retime((row for row in changed if row not in moved), now_s)

    def _follow(self, move: Move, now_s: float) -> None:
        row = move.row
        self._ran(row, move.ran_s)
        if move.before:
            self._tell_progress(row, now_s)
        if move.after:
            self._start_segment(row, now_s, new_plan=True)
        else:
            self.ends.drop(row)
        self._events.moved(now_s, move, self._board.cluster)

    def leave(self, row: int, now_s: float) -> None:
        """A job that the board has taken off has ended, or was refused: its neighbours go on without it."""
        self.ends.drop(row)
        if self._world.shared is not None:
            self._retime(self._world.shared.place([(row, ())]), now_s)

    def _retime(self, rows: Iterable[int], now_s: float) -> None:
        """Let jobs go on with another speed, because their neighbours on a GPU have changed."""
        for row in rows:
            if self._table.gpus[row]:
                self.settle(row, now_s)
                self._start_segment(row, now_s)

    def replan_batches(self, now_s: float) -> None:
        """Let each job's agent that has learnt something since it chose its batch size choose again."""
        if not self._world.agents_plan:
            return
        for row in self._board.active.tolist():
            if self._table.gpus[row] and self._world.wants_new_plan(row):
                self.settle(row, now_s)
                self._start_segment(row, now_s, new_plan=True)

    def _tell_progress(self, row: int, now_s: float) -> None:
        """How far a job is goes into the log when it is resized and at the end of each of its epochs."""
        if self._events.wanted:
            done, of, batch_size = self._world.progress(row)
            figures = {"done": done, "of": of, "workers": int(self._table.gpus[row])}
            self._events.write(now_s, EventKind.PROGRESS, row, **figures, batch_size=batch_size)
