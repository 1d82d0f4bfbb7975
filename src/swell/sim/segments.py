"""When the present segments of the running jobs end."""

from __future__ import annotations

import heapq
import math


class SegmentEnds:
    """A queue of the moments at which jobs' segments end.

    A job has at most one segment. The entry of a segment that was replaced or dropped stays in the heap until
    it comes to the front, and is passed over there: its stamp is not the job's any more.
    """

    def __init__(self, jobs: int) -> None:
        self._heap: list[tuple[float, int, int]] = []  # (ends at, row, stamp)
        self._stamp = [0] * jobs

    def set(self, row: int, at_s: float) -> None:
        """The job's segment ends at `at_s`, and not when it would have ended before."""
        self._stamp[row] += 1
        heapq.heappush(self._heap, (at_s, row, self._stamp[row]))

    def drop(self, row: int) -> None:
        """The job has no segment that ends."""
        self._stamp[row] += 1

    def next_s(self) -> float:
        """When the next segment ends; infinite if none does."""
        heap = self._heap
        while heap and self._stamp[heap[0][1]] != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def take(self, now_s: float) -> int | None:
        """Take out a segment that has ended by now; returns its job, or None if there is no such segment."""
        if self.next_s() > now_s:
            return None
        return heapq.heappop(self._heap)[1]

    def __bool__(self) -> bool:
        """Whether any segment may still end; one that was dropped counts until it is passed over."""
        return bool(self._heap)
