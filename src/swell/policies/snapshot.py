"""What a policy sees: all active jobs at one moment, in the simulator and on a live cluster alike.

`JobTable` is the ledger of all jobs, one numpy column per fact; the simulator or the control plane keeps it
up to date. `Snapshot` is a read-only view of the jobs that are active now. Its columns are computed when a
policy asks for them, so that a decision costs no more than the columns it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from swell.domain import Cluster, FloatArray, IntArray, JobSpec, Placement, SlotsAhead, rank_of
from swell.perf.curves import Curves

if TYPE_CHECKING:
    from swell.perf.belief import JobBelief


_Value = TypeVar("_Value")


class column(Generic[_Value]):
    """A property that is computed when it is first read, then kept.

    As `functools.cached_property`, but without the lock that Python 3.11 takes there: a decision reads some
    ten columns, and a simulation of a whole cluster makes hundreds of thousands of decisions.
    """

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> column[_Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> _Value: ...
    def __get__(self, instance: object | None, owner: type) -> column[_Value] | _Value:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class JobTable:
    """Jobs, one row each. Columns that change with time hold their values as of `since_s`.

    On a live cluster a row is used again once its job has ended, so rows say nothing about the order of jobs
    and a row alone does not identify one. A job's `number` does: numbers rise in order of submission and none
    is ever given twice. The simulator knows all jobs in advance and uses row i for job number i.
    """

    def __init__(self, specs: Sequence[JobSpec]) -> None:
        n = len(specs)
        self.specs = list(specs)
        self.number: IntArray = np.arange(n, dtype=np.int64)
        self.submit_s: FloatArray = np.array([s.submit_s for s in specs], dtype=np.float64)
        self.deadline_s: FloatArray = np.array(
            [np.inf if s.deadline_s is None else s.deadline_s for s in specs], dtype=np.float64
        )
        self.requested: IntArray = np.array([s.gpus for s in specs], dtype=np.int64)
        self.min_gpus: IntArray = np.array([s.min_gpus for s in specs], dtype=np.int64)
        self.max_gpus: IntArray = np.array(
            [np.iinfo(np.int64).max if s.max_gpus is None else s.max_gpus for s in specs], dtype=np.int64
        )
        self.per_replica: IntArray = np.array([s.gpus_per_replica for s in specs], dtype=np.int64)
        """Shares are multiples of this."""
        self.weight: FloatArray = np.array([s.weight for s in specs], dtype=np.float64)
        self.user: list[str] = [s.user for s in specs]
        self.team: list[str] = [s.team for s in specs]
        self.priority: IntArray = np.array([rank_of(s.priority) for s in specs], dtype=np.int64)
        """The rank of each job's class: the higher, the sooner served."""
        self.known: npt.NDArray[np.bool_] = np.ones(n, dtype=np.bool_)
        """False for a job whose speed or length is not known yet: then `left` means nothing."""
        self.curve: IntArray = np.zeros(n, dtype=np.int64)
        """The row of the job in `Curves.rates`."""
        self.since_s: FloatArray = self.submit_s.copy()
        """When the columns that change with time were last brought up to date."""
        self.paused_until_s: FloatArray = np.zeros(n)
        """The job makes no progress before this moment (it is resizing)."""
        self.left: FloatArray = np.zeros(n)
        """Work left, in the unit of the job's curve."""
        self.rate: FloatArray = np.zeros(n)
        """Work per second while running, 0 while waiting."""
        self.gpus: IntArray = np.zeros(n, dtype=np.int64)
        """GPUs held."""
        self.attained_gpu_s: FloatArray = np.zeros(n)
        self.run_s: FloatArray = np.zeros(n)
        """Time spent holding GPUs."""
        self.first_start_s: FloatArray = np.full(n, np.inf)
        self.last_start_s: FloatArray = np.full(n, np.inf)
        """When the job last went from waiting to running."""
        self.resizes: IntArray = np.zeros(n, dtype=np.int64)
        """Changes of allocation after the first, returns after a preemption included."""
        self.returns: IntArray = np.zeros(n, dtype=np.int64)
        """Starts after the first: the job had lost all its GPUs before."""
        self.placement: list[Placement] = [()] * n
        self.belief: list[JobBelief | None] = [None] * n
        """The belief about each job's performance, for a policy that learns it."""
        self.belief_by_type: list[Mapping[str, JobBelief]] = [{}] * n
        """The same by GPU type, where types are told apart."""

    def __len__(self) -> int:
        return len(self.specs)

    def settle(self, row: int, now_s: float) -> float:
        """Bring a job's row up to now; returns for how many seconds the job made progress since `since_s`."""
        gpus, since_s = int(self.gpus[row]), float(self.since_s[row])
        ran_s = 0.0
        if gpus and now_s > since_s:
            ran_s = max(now_s - max(since_s, float(self.paused_until_s[row])), 0.0)
            if ran_s > 0:
                self.left[row] = max(self.left[row] - self.rate[row] * ran_s, 0.0)
            self.attained_gpu_s[row] += gpus * (now_s - since_s)
            self.run_s[row] += now_s - since_s
        self.since_s[row] = now_s
        return ran_s

    def copy(self, rows: IntArray) -> JobTable:
        """A new table with copies of these rows only, in this order."""
        part = JobTable.__new__(JobTable)
        for name, column in vars(self).items():
            chosen = [column[row] for row in rows.tolist()] if isinstance(column, list) else column[rows]
            setattr(part, name, chosen)
        return part

    def write(self, row: int, spec: JobSpec, number: int) -> None:
        """Enter a new job, which has not run yet, into a row."""
        fresh = JobTable([spec])
        fresh.number[0] = number
        for name, column in vars(self).items():
            column[row] = getattr(fresh, name)[0]

    def grow(self, specs: Sequence[JobSpec]) -> None:
        """Add rows at the end."""
        added = JobTable(specs)
        for name, column in vars(self).items():
            more = getattr(added, name)
            setattr(self, name, column + more if isinstance(column, list) else np.concatenate([column, more]))


class Snapshot:
    """The active jobs at one moment. Every column is an array with one entry per active job, oldest first."""

    def __init__(
        self,
        now_s: float,
        cluster: Cluster,
        table: JobTable,
        rows: IntArray,
        curves: Curves | Callable[[], Curves],
        resize_cost_s: float = 0.0,
        start_cost_s: float | None = None,
        numbers: IntArray | None = None,
        ahead: SlotsAhead | None = None,
    ) -> None:
        """`numbers` are the numbers of the jobs in these rows, for a caller that has them at hand. `ahead`:
        the GPUs that promises may count on over time, if these are not always those of `cluster`."""
        if numbers is not None:
            self.numbers = numbers
        self.now_s = now_s
        self.cluster = cluster
        self.table = table
        self.rows = rows
        """The table's rows of the active jobs, oldest job first, so not in ascending order of rows."""
        self._curves = curves
        self.capacity = cluster.capacity
        """GPUs that can be given to jobs now."""
        self._ahead = ahead
        self.resize_cost_s = resize_cost_s
        """Seconds that a change of allocation costs a job, waiting for a round included; for planning."""
        self.start_cost_s = resize_cost_s if start_cost_s is None else start_cost_s
        """Seconds that a start costs a job, waiting for a round included; for planning."""

    def __len__(self) -> int:
        return len(self.rows)

    @column
    def ahead(self) -> SlotsAhead:
        """The GPUs that promises may count on, from now on; never more than there are now to begin with."""
        if self._ahead is None:
            return SlotsAhead(np.array([self.now_s]), np.array([self.capacity]))
        times, gpus = self._ahead.times.copy(), self._ahead.gpus.copy()
        times[0], gpus[0] = self.now_s, min(gpus[0], self.capacity)
        return SlotsAhead(times, gpus)

    def ahead_on(self, nodes: Sequence[int]) -> SlotsAhead | None:
        """What promises may count on of these nodes alone; None if nothing is reserved.

        Which GPUs a reservation will hold is not known, so each may want all of its GPUs on these nodes.
        """
        if self._ahead is None:
            return None
        sizes = np.array([node.gpus if node.up else 0 for node in self.cluster.nodes], dtype=np.int64)
        reserved = sizes.sum() - self.ahead.gpus
        return SlotsAhead(self.ahead.times, np.maximum(sizes[list(nodes)].sum() - reserved, 0))

    @property
    def lent(self) -> int:
        """GPUs that jobs can have now and that no promise may count on: a service may want them back."""
        return self.capacity - int(self.ahead.gpus[0])

    @column
    def widest(self) -> int:
        """The most GPUs that there are now or later."""
        return max(self.capacity, int(self.ahead.gpus.max()))

    @column
    def curves(self) -> Curves:
        """The believed speed of the jobs; fitted curves are computed only if a policy asks for them."""
        return self._curves() if callable(self._curves) else self._curves

    @column
    def numbers(self) -> IntArray:
        """The jobs' numbers, strictly ascending. By them a policy recognises a job in the next snapshot."""
        return self.table.number[self.rows]

    @column
    def submit_s(self) -> FloatArray:
        return self.table.submit_s[self.rows]

    @column
    def deadline_s(self) -> FloatArray:
        """Infinite for best-effort jobs."""
        return self.table.deadline_s[self.rows]

    @column
    def requested(self) -> IntArray:
        """GPUs that the job asked for, which a rigid policy gives it."""
        return self.table.requested[self.rows]

    @column
    def min_gpus(self) -> IntArray:
        return self.table.min_gpus[self.rows]

    @column
    def max_gpus(self) -> IntArray:
        """Most GPUs each job can be given: its own bound, its curve and the cluster."""
        bound = min(self.capacity, self.curves.max_gpus)
        return np.minimum(self.table.max_gpus[self.rows], bound)

    @column
    def per_replica(self) -> IntArray:
        """Each job can use GPUs only in multiples of this; a share is rounded to one when it is placed."""
        return self.table.per_replica[self.rows]

    @column
    def weight(self) -> FloatArray:
        """Each job counts as this many jobs."""
        return self.table.weight[self.rows]

    @column
    def user(self) -> list[str]:
        return [self.table.user[row] for row in self.rows]

    @column
    def team(self) -> list[str]:
        return [self.table.team[row] for row in self.rows]

    @column
    def priority(self) -> IntArray:
        """The rank of each job's class: the higher, the sooner served."""
        return self.table.priority[self.rows]

    @column
    def known(self) -> npt.NDArray[np.bool_]:
        """False for a job whose speed or length is not known yet: then `remaining` means nothing."""
        return self.table.known[self.rows]

    @column
    def curve(self) -> IntArray:
        """The row of `curves.rates` that belongs to each job."""
        return self.table.curve[self.rows]

    @column
    def gpus(self) -> IntArray:
        """GPUs held now."""
        return self.table.gpus[self.rows]

    @column
    def remaining(self) -> FloatArray:
        """Work left now, in the unit of the curves."""
        t, rows = self.table, self.rows
        ran_s = self.now_s - np.maximum(t.since_s[rows], t.paused_until_s[rows])
        return np.maximum(t.left[rows] - t.rate[rows] * np.maximum(ran_s, 0.0), 0.0)

    @column
    def attained_gpu_s(self) -> FloatArray:
        """GPU-seconds received so far (Tiresias's two-dimensional service)."""
        t, rows = self.table, self.rows
        return t.attained_gpu_s[rows] + t.gpus[rows] * (self.now_s - t.since_s[rows])

    @column
    def run_s(self) -> FloatArray:
        """Seconds spent holding GPUs so far."""
        t, rows = self.table, self.rows
        return t.run_s[rows] + (t.gpus[rows] > 0) * (self.now_s - t.since_s[rows])

    @column
    def first_start_s(self) -> FloatArray:
        """When each job first ran; infinite if it never did."""
        return self.table.first_start_s[self.rows]

    @column
    def last_start_s(self) -> FloatArray:
        """When each job last went from waiting to running; infinite if it never ran."""
        return self.table.last_start_s[self.rows]

    @column
    def age_s(self) -> FloatArray:
        return self.now_s - self.submit_s

    @column
    def resizes(self) -> IntArray:
        return self.table.resizes[self.rows]

    @column
    def placements(self) -> list[Placement]:
        """The GPUs each job holds."""
        return [self.table.placement[row] for row in self.rows]

    @column
    def beliefs(self) -> list[JobBelief | None]:
        """The belief about each job's performance, for a policy that learns it."""
        return [self.table.belief[row] for row in self.rows]

    def belief_on(self, index: int, gpu_type: str) -> JobBelief | None:
        """The belief about one job's performance on a GPU type."""
        row = self.rows[index]
        return self.table.belief_by_type[row].get(gpu_type, self.table.belief[row])

    def rate_at(self, gpus: IntArray) -> FloatArray:
        """Rate of each job if it had that many GPUs."""
        rates: FloatArray = self.curves.rates[self.curve, gpus]
        return rates

    @property
    def given_ahead(self) -> SlotsAhead | None:
        """What promises may count on over time, if that is not always what there is now."""
        return self._ahead

    def part(self, members: IntArray, cluster: Cluster, ahead: SlotsAhead | None) -> Snapshot:
        """The same moment with some of the jobs, by their indices, on a part of the cluster."""
        costs = (self.resize_cost_s, self.start_cost_s)
        rows, numbers = self.rows[members], self.numbers[members]
        return Snapshot(self.now_s, cluster, self.table, rows, self._curves, *costs, numbers, ahead)

    def of_table(self, table: JobTable, numbers: IntArray) -> Snapshot:
        """The same moment with the jobs of another table, all of them, in its order."""
        costs, rows = (self.resize_cost_s, self.start_cost_s), np.arange(len(table))
        return Snapshot(self.now_s, self.cluster, table, rows, self._curves, *costs, numbers, self._ahead)

    def with_rows(self, rows: IntArray) -> Snapshot:
        """The same moment with another set of active jobs."""
        costs = (self.resize_cost_s, self.start_cost_s)
        return Snapshot(self.now_s, self.cluster, self.table, rows, self._curves, *costs, None, self._ahead)
