"""AFS (NSDI'21, section 4): weigh how short a job is against how well it uses one more GPU.

If there are enough GPUs for the least shares of all jobs, every job gets its least share, and tournaments
decide about the rest, one step at a time. Of two jobs, let a be the one that ends sooner at the present
shares, b the other, p a job's rate and p' its rate one step up. The step goes to a if and only if
(p_a' - p_a) / p_a > (p_b' - p_b) / p_b', because b gets a's GPUs anyway once a has ended. The matches form a
winner tree, so a step costs log(jobs) matches. (The paper calls the relation transitive. On curves of
different shapes three jobs can beat each other in a circle; then the winner depends on the order of arrival,
which is the order of the tree's leaves. A job that beats all others always wins.)

A step leads to the next legal share with a higher rate, and gains are counted per GPU of the step. If every
share is legal and curves are concave, a step is one GPU, as in the paper. By default the legal shares are
CoDDL's, so that jobs pack on nodes and so that growth does not end where a measured curve dips because the
job first spans two nodes. On the Philly trace CoDDL's shares gave 2 to 4% less average JCT than `any`, and up
to a fifth fewer resizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from swell.domain import FloatArray, InputError, IntArray
from swell.perf._compiled import compiled
from swell.policies._shares import ANY_SHARE, fill, least_share
from swell.policies.base import Decision, Knowledge, Policy
from swell.policies.snapshot import Snapshot

_NO_COINS: IntArray = np.empty(0, dtype=np.int64)
_NOT_KNOWN: FloatArray = np.empty(0)


@compiled
def _a_wins(a: int, b: int, rate: FloatArray, up: FloatArray, step: IntArray) -> bool:
    """The test of the paper: whether job a, which ends sooner than b, gets the next step."""
    return (up[a] - rate[a]) / (rate[a] * step[a]) > (up[b] - rate[b]) / (up[b] * step[b])


@compiled
def _match(
    i: int, j: int, rate: FloatArray, up: FloatArray, step: IntArray, left: FloatArray, coins: IntArray
) -> int:
    """The job of two that gets the next step. With `coins`, the work left is taken as unknown."""
    if i < 0 or j < 0:
        return max(i, j)
    if up[i] <= rate[i] or up[j] <= rate[j]:
        return i if up[i] > rate[i] else j
    if len(coins) == 0:
        if left[j] * rate[i] < left[i] * rate[j]:
            i, j = j, i
        return i if _a_wins(i, j, rate, up, step) else j
    if_i_is_short = _a_wins(i, j, rate, up, step)
    if_j_is_short = not _a_wins(j, i, rate, up, step)
    if if_i_is_short == if_j_is_short:
        return i if if_i_is_short else j
    return i if coins[i] >= coins[j] else j


@compiled
def _step_up(row: FloatArray, share: int, most: int, legal: IntArray) -> int:
    """The next legal share with a higher rate, or 0."""
    for k in range(share + 1, most + 1):
        if row[k] > row[share] and (len(legal) == 0 or legal[k]):
            return k
    return 0


@compiled
def time_left(rates: FloatArray, curve: IntArray, gpus: IntArray, left: FloatArray) -> FloatArray:
    """Seconds to the end of each job at the given shares; infinite for a job without GPUs."""
    left_s = np.full(len(gpus), np.inf)
    for i in range(len(gpus)):
        if gpus[i] > 0:
            left_s[i] = left[i] / rates[curve[i], gpus[i]]
    return left_s


@compiled
def tournaments(
    rates: FloatArray,
    curve: IntArray,
    gpus: IntArray,
    most: IntArray,
    left: FloatArray,
    coins: IntArray,
    legal: IntArray,
    capacity: int,
) -> IntArray:
    """Give the free GPUs to the running jobs, each step to the winner of a tournament among them."""
    free = capacity - gpus.sum()
    if free <= 0:
        return gpus
    players = np.flatnonzero(gpus)
    n = len(players)
    gpus = gpus.copy()
    rate = np.zeros(len(gpus))
    up = np.zeros(len(gpus))
    step = np.ones(len(gpus), dtype=np.int64)
    size = 1
    while size < n:
        size *= 2
    tree = np.full(2 * size, -1, dtype=np.int64)
    for t in range(n):
        i = players[t]
        row = rates[curve[i]]
        rate[i] = row[gpus[i]]
        k = _step_up(row, gpus[i], most[i], legal)
        if k > 0:
            up[i] = row[k]
            step[i] = k - gpus[i]
        tree[size + t] = i
    for node in range(size - 1, 0, -1):
        tree[node] = _match(tree[2 * node], tree[2 * node + 1], rate, up, step, left, coins)
    place = np.zeros(len(gpus), dtype=np.int64)
    for t in range(n):
        place[players[t]] = size + t
    while free > 0 and n > 0:
        i = tree[1]
        if up[i] <= rate[i]:
            break
        k = 0
        if step[i] <= free:
            row = rates[curve[i]]
            gpus[i] += step[i]
            free -= step[i]
            rate[i] = up[i]
            k = _step_up(row, gpus[i], most[i], legal)
        # Otherwise the step needs more GPUs than are free, and fewer will be free later: the job drops out.
        up[i] = rates[curve[i], k] if k > 0 else 0.0
        step[i] = k - gpus[i] if k > 0 else 1
        node = place[i] // 2
        while node > 0:
            tree[node] = _match(tree[2 * node], tree[2 * node + 1], rate, up, step, left, coins)
            node //= 2
    return gpus


@lru_cache
def legal_shares(shares: str, gpus_per_node: int, most: int) -> IntArray:
    """For each GPU count from 0 to `most`, whether it may be a share; an empty table if all may."""
    if shares == "any":
        return ANY_SHARE
    k = np.arange(most + 1)
    inside = (k > 0) & (k <= gpus_per_node) & (gpus_per_node % np.maximum(k, 1) == 0)
    return (inside | (k % gpus_per_node == 0)).astype(np.int64)


@dataclass(kw_only=True)
class _Afs(Policy):
    """What AFS-L and AFS-P have in common."""

    paper: ClassVar[str] = "AFS and CoDDL, NSDI'21"
    knows: ClassVar[Knowledge] = "profiles"
    changes_with_time: ClassVar[bool] = False

    shares: str = "coddl"
    """Legal shares: 'coddl' for factors and multiples of a node (1, 2, 4, 8, 12 ... on 4-GPU nodes), or
    'any'.
    """

    def __post_init__(self) -> None:
        if self.shares not in ("any", "coddl"):
            raise InputError(f"shares must be 'any' or 'coddl', got '{self.shares}'", field="shares")

    def _legal(self, snapshot: Snapshot) -> IntArray:
        return legal_shares(self.shares, snapshot.cluster.gpus_per_node, snapshot.curves.max_gpus)


@dataclass(kw_only=True)
class AfsL(_Afs):
    """AFS-L: the length of jobs is known. If GPUs are short, the shortest jobs get their least shares."""

    name: ClassVar[str] = "afs-l"
    goal: ClassVar[str] = "low average JCT for elastic jobs whose length is known"

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Give least shares to the shortest jobs, then the rest by tournaments."""
        rates, curve, most = snapshot.curves.rates, snapshot.curve, snapshot.max_gpus
        capacity, left, legal = snapshot.capacity, snapshot.remaining, self._legal(snapshot)
        least = least_share(snapshot, legal)
        order = time_left(rates, curve, least, left).argsort(kind="stable")  # of equal jobs the oldest first
        gpus = fill(order, least, most, capacity, False)
        return Decision(tournaments(rates, curve, gpus, most, left, _NO_COINS, legal, capacity))


@dataclass(kw_only=True)
class AfsP(_Afs):
    """AFS-P: the length of jobs is not known.

    A match is decided under both assumptions about which job is shorter; if the results differ, a coin
    decides. The coin falls the same way for the same jobs and `seed`, so that shares do not change back and
    forth. If GPUs are short, jobs run in leases: those with the fewest used leases come first, then those
    that started first, then those that arrived first.
    """

    name: ClassVar[str] = "afs-p"
    goal: ClassVar[str] = "low average JCT for elastic jobs of unknown length"

    lease_s: float = 7200.0
    """Run time of a lease, after which waiting jobs come first."""
    seed: int = 0
    """Seed of the coins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lease_s > 0:
            raise InputError(f"lease_s must be above 0, got {self.lease_s}", field="lease_s")

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Give least shares by leases, then the rest by tournaments."""
        legal, most, capacity = self._legal(snapshot), snapshot.max_gpus, snapshot.capacity
        order = np.lexsort((snapshot.first_start_s, self._used_leases(snapshot)))
        gpus = fill(order, least_share(snapshot, legal), most, capacity, False)
        coins, rates = self._coins(snapshot.numbers), snapshot.curves.rates
        gpus = tournaments(rates, snapshot.curve, gpus, most, _NOT_KNOWN, coins, legal, capacity)
        return Decision(gpus)

    def next_wakeup_s(self, snapshot: Snapshot, decision: Decision) -> float:
        """When the next lease runs out, if a job waits."""
        runs = decision.gpus > 0
        if runs.all():
            return np.inf
        end_s = (self._used_leases(snapshot)[runs] + 1) * self.lease_s - snapshot.run_s[runs]
        return snapshot.now_s + float(end_s.min(initial=np.inf))

    def _used_leases(self, snapshot: Snapshot) -> FloatArray:
        return np.floor((snapshot.run_s + 1e-3) / self.lease_s)

    def _coins(self, numbers: IntArray) -> IntArray:
        """A pseudo-random number for each job that is the same in every call."""
        x = (numbers.astype(np.uint64) + np.uint64(self.seed)) * np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(31)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        return (x >> np.uint64(1)).astype(np.int64)
