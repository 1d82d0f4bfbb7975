"""Which jobs go to which GPU type: the assignment with the largest product of the jobs' speeds. Ours.

Within one type every job is taken to get the same share, except that no job gets more than it can use (water
level). The product of speeds, each to the power of the job's weight, rises if a job goes where it is faster
compared with the other types, and falls if too many jobs crowd on one type. So it weighs comparative speed
against load, and it depends on neither the unit of a job's work nor how much work is left.

Jobs are moved one at a time, the best move first, and a running job moves only if that outweighs its pause.
"""

from __future__ import annotations

import numpy as np

from swell.domain import BoolArray, FloatArray, IntArray

LEAST_GAIN = 0.05
"""A job that has a type gets another one only if the logarithm of the product rises by more than this."""
MOST_MOVES = 8
"""How many jobs may get another type in one decision; newcomers are not counted."""
ENOUGH = 0.95
"""A job is taken to want the fewest GPUs that give it this part of its highest speed."""
NOWHERE = -1
_IMPOSSIBLE = -1e6
"""Logarithm of the speed of a job that cannot run on a type."""


class Pools:
    """The speeds of jobs on each GPU type, in the form that the search needs."""

    def __init__(self, rates: FloatArray, most: IntArray, capacity: IntArray) -> None:
        """`rates`: types x jobs x GPUs; `most`: the most GPUs that each job may have, types x jobs."""
        kinds, jobs, columns = rates.shape
        self.capacity = capacity
        useful = np.maximum.accumulate(rates, axis=2)
        most = np.minimum(np.minimum(most, capacity[:, None]), columns - 1)
        beyond = np.arange(columns) > most[:, :, None]
        at_most = np.take_along_axis(useful, most[:, :, None], axis=2)
        useful = np.where(beyond, at_most, useful)
        # A share below the fewest GPUs that a job can run on counts as that part of the time on the fewest.
        least = np.maximum(np.argmax(useful > 0, axis=2), 1)
        at_least = np.take_along_axis(useful, least[:, :, None], axis=2)
        ramp = at_least * np.arange(columns) / least[:, :, None]
        self._speed = np.where(useful > 0, useful, ramp)
        self.cap = np.argmax(useful >= ENOUGH * at_most, axis=2).astype(np.float64)
        self.possible: BoolArray = at_most[:, :, 0] > 0
        self._kinds, self._jobs = np.arange(kinds)[:, None], np.arange(jobs)[None, :]

    def log_speed(self, level: FloatArray) -> FloatArray:
        """Logarithm of each job's speed on each type, if shares there rise to `level`; types x jobs."""
        share = np.minimum(np.broadcast_to(level[:, None], self.cap.shape), self.cap)
        low = np.minimum(share.astype(np.int64), self._speed.shape[2] - 2)
        below = self._speed[self._kinds, self._jobs, low]
        above = self._speed[self._kinds, self._jobs, low + 1]
        speed = below + (above - below) * (share - low)
        return np.log(speed, out=np.full(speed.shape, _IMPOSSIBLE), where=self.possible & (speed > 0))

    def levels(self, on: IntArray, more: int) -> FloatArray:
        """The water level of each type with the jobs that are `on` it, and with one more or fewer (-1)."""
        found = np.empty(len(self.capacity))
        for kind, capacity in enumerate(self.capacity.tolist()):
            caps = np.sort(self.cap[kind, on == kind])
            if more > 0:
                caps = np.append(caps, np.inf)
            elif more < 0:  # the one that wants the most leaves: the others' level depends on it the most
                caps = caps[:-1]
            found[kind] = _level(caps, capacity)
        return found


def _level(caps: FloatArray, capacity: float) -> float:
    """The highest common share that fits, if job i takes no more than `caps[i]` (ascending)."""
    left = float(capacity)
    for i, cap in enumerate(caps.tolist()):
        share = left / (len(caps) - i)
        if share <= cap:
            return share
        left -= cap
    return float(capacity)


def assign(pools: Pools, on: IntArray, fixed: BoolArray, cost: FloatArray, weight: FloatArray) -> IntArray:
    """The type of each job, from `on` (NOWHERE for newcomers); `fixed` jobs stay where they are.

    `cost` is what a move costs each job, as a logarithm of its speed. A job that can run on no type goes to
    the first.
    """
    on = on.copy()
    if not len(on):
        return on
    on[(on >= 0) & ~pools.possible[np.maximum(on, 0), np.arange(len(on))] & ~fixed] = NOWHERE
    moves = int((on == NOWHERE).sum()) + MOST_MOVES
    for _ in range(moves):
        to, gain = _gains(pools, on, fixed, cost, weight)
        job = int(np.argmax(gain))
        if gain[job] <= LEAST_GAIN:
            break
        on[job] = to[job]
    return np.maximum(on, 0)


def _gains(
    pools: Pools, on: IntArray, fixed: BoolArray, cost: FloatArray, weight: FloatArray
) -> tuple[IntArray, FloatArray]:
    """The best other type of each job, and how much the logarithm of the product rises; newcomers first."""
    jobs = np.arange(len(on))
    now, joined, left = (pools.log_speed(pools.levels(on, more)) * weight for more in (0, 1, -1))
    member = on[None, :] == np.arange(len(pools.capacity))[:, None]
    others_lose = np.where(member, joined - now, 0.0).sum(axis=1)
    others_win = np.where(member, left - now, 0.0).sum(axis=1)
    here = np.maximum(on, 0)
    gain = joined + others_lose[:, None]
    stays = now[here, jobs] - others_win[here] + (left - now)[here, jobs] + cost * weight
    newcomer = on == NOWHERE
    gain = gain - np.where(newcomer, 0.0, stays)
    gain[member | ~pools.possible] = -np.inf
    gain[:, fixed] = -np.inf
    to = np.argmax(gain, axis=0)
    best = gain[to, jobs]
    # Newcomers are placed before anybody moves, the one with the clearest choice first.
    runner_up = np.partition(gain, -2, axis=0)[-2] if len(gain) > 1 else np.full(len(best), -np.inf)
    clear = np.minimum(best - np.maximum(runner_up, -1e9), 1e9)
    return to, np.where(newcomer & np.isfinite(best), 1e12 + clear, np.where(newcomer, -np.inf, best))
