"""How many nodes are worth having, after Pollux (OSDI'21, section on cloud auto-scaling).

The *utility* of a number of nodes is the sum of the jobs' speed-ups over one GPU, divided by all GPUs: 1 if
every GPU were as useful as a job's first. It falls as nodes are added. While it is between `low` and `high`,
nothing changes; else the number of nodes becomes the largest whose utility reaches the middle of the two.

Speed-ups are those of goodput, so a job whose gradients are not noisy yet gets few nodes, and more as its
noise grows. With `measure='throughput'` they are those of throughput at the largest batch, as in autoscalers
that ignore statistical efficiency: they see a job scale well long before that does it any good.

Beyond the paper:
- The range does not contain what time is worth. With `hour_worth`, the number of nodes is the one with the
  least (price of the nodes + worth of the jobs' time) per speed-up, which needs no range.
- With `pace`, the number of nodes is the fewest on which the jobs are as fast as on the nodes that a
  throughput-only autoscaler would have by now. That needs neither a range nor a price of time.
- Deadlines come first: there are never fewer nodes than those on which ElasticFlow's plan keeps every
  deadline that the largest cluster could keep.
- A budget per hour bounds the nodes, those for deadlines included.
- By range, no node is had whose GPUs hardly add speed (`least_gain`), although the utility of all is in the
  range: without this rule, jobs that scale well up to a point get nodes far beyond it.
- A job that will have ended by the time a new node is ready is no reason for one.
- There are enough nodes for the least GPUs of every job alone, or it would wait for ever.
- Without jobs there are no nodes, or only those that are always kept (`least_nodes`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from swell.cloud.provider import NodeOffer
from swell.domain import Cluster, FloatArray, InputError, IntArray, Node, many, nearest
from swell.policies import Snapshot
from swell.policies.elasticflow import ElasticFlow

Measure = Literal["goodput", "throughput"]
TOLERANCE = 0.01
"""With a worth per hour, the number of nodes changes only if that saves more than this part of the cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Limits and aims of an autoscaler."""

    most_nodes: int
    least_nodes: int = 0
    """Nodes that are kept whether there are jobs or not."""
    low: float = 1 / 2
    """Below this utility nodes are let go."""
    high: float = 2 / 3
    """Above this utility nodes are added."""
    hour_worth: float | None = None
    """Value of finishing a job an hour sooner, in the unit of the price. None: use the range of nodes."""
    pace: float | None = None
    """Part of the speed on a throughput-only autoscaler's nodes that the jobs must reach on as few nodes as
    possible. None: use the range of nodes."""
    least_gain: float = 0.1
    """A node is worth having only if each of its GPUs adds at least this part of a first GPU's speed."""
    budget_per_hour: float = math.inf
    """The most that all nodes together may cost in an hour."""
    idle_s: float = 60.0
    """How long the last nodes are kept without any job."""
    interval_s: float = 60.0
    """How often to look, besides whenever a job comes or goes."""
    measure: Measure = "goodput"

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("most_nodes", self.most_nodes >= 1, "at least 1"),
            ("least_nodes", 0 <= self.least_nodes <= self.most_nodes, "from 0 to 'most_nodes'"),
            ("low", 0 < self.low <= self.high, "more than 0 and not above 'high'"),
            ("high", self.high < 1, "below 1"),
            ("hour_worth", self.hour_worth is None or 0 <= self.hour_worth < math.inf, "at least 0"),
            ("pace", self.pace is None or 0 < self.pace <= 1, "more than 0 and at most 1"),
            ("pace", self.pace is None or self.hour_worth is None, "left out if there is a worth of an hour"),
            ("least_gain", 0 <= self.least_gain < 1, "at least 0 and below 1"),
            ("budget_per_hour", self.budget_per_hour > 0, "more than 0"),
            ("idle_s", 0 <= self.idle_s < math.inf, "seconds of at least 0"),
            ("interval_s", 0 < self.interval_s < math.inf, "more than 0 seconds"),
            ("measure", self.measure in ("goodput", "throughput"), "'goodput' or 'throughput'"),
        ):
            if not fine:
                raise InputError(f"{name} must be {allowed}, got {getattr(self, name)!r}", field=name)

    @property
    def of_rival(self) -> Terms:
        """The terms of an autoscaler that goes by the range of throughput, within the same bounds."""
        return replace(self, measure="throughput", least_gain=0.0, pace=None)

    def affordable(self, offer: NodeOffer) -> int:
        """The most nodes that the bound and the budget allow."""
        if offer.price_per_hour <= 0 or math.isinf(self.budget_per_hour):
            return self.most_nodes
        return min(self.most_nodes, int(self.budget_per_hour / offer.price_per_hour + 1e-9))


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many nodes there should be, and why, for people."""

    nodes: int
    reason: str


@dataclass
class Autoscaler:
    """Decides how many nodes to have; remembers only since when there has been nothing to do."""

    terms: Terms
    offer: NodeOffer
    _idle_since_s: float | None = field(default=None, init=False)
    _rival: int = field(default=0, init=False)
    """With a pace: how many nodes a throughput-only autoscaler would have by now."""

    def look(self, snapshot: Snapshot, nodes: int) -> Wanted:
        """How many nodes there should be, if there are `nodes` now, those coming included."""
        wanted = self._look(snapshot, nodes)
        least = min(self.terms.least_nodes, self.terms.affordable(self.offer))
        return Wanted(least, f"{many(least, 'node')} always kept") if wanted.nodes < least else wanted

    def _look(self, snapshot: Snapshot, nodes: int) -> Wanted:
        if len(snapshot):
            self._idle_since_s = None
            if self.terms.pace is not None:
                wanted = worth_having(snapshot, self._rival, self.terms.of_rival, self.offer)
                self._rival = wanted.nodes
            return worth_having(snapshot, nodes, self.terms, self.offer, self._rival)
        if self._idle_since_s is None:
            self._idle_since_s = snapshot.now_s
        if snapshot.now_s - self._idle_since_s >= self.terms.idle_s:
            self._rival = 0
            return Wanted(0, "no jobs")
        return Wanted(nodes, "no jobs, but not for long")


def worth_having(snapshot: Snapshot, nodes: int, terms: Terms, offer: NodeOffer, rival: int = 0) -> Wanted:
    """How many nodes the jobs of a snapshot are worth, if there are `nodes` now.

    `rival`: with a pace, how many nodes a throughput-only autoscaler would have.
    """
    most = terms.affordable(offer)
    if not most:
        return Wanted(0, "the budget is below the price of one node")
    width = offer.gpus_per_node
    fewer = _best_number(snapshot, np.arange(len(snapshot)), nodes, terms, offer, rival)
    more = _best_number(snapshot, _lasting(snapshot, offer), nodes, terms, offer, rival)
    wanted, reason = nodes, "as many as the jobs are worth"
    if fewer < nodes:
        wanted, reason = max(fewer, 1), f"the jobs are worth {many(max(fewer, 1), 'node')}"
    elif more > nodes or not nodes:
        wanted, reason = max(more, 1), f"the jobs are worth {many(max(more, 1), 'node')}"
    least = snapshot.min_gpus[snapshot.min_gpus <= most * width]
    needed = -(-int(least.max(initial=1)) // width)
    if needed > wanted:
        wanted, reason = needed, f"a job needs {many(needed, 'node')} to run at all"
    needed = nodes_for_deadlines(snapshot, most, offer)
    if needed > wanted:
        wanted, reason = needed, f"deadlines need {many(needed, 'node')}"
    if wanted > most:
        wanted, reason = most, f"the most allowed is {many(most, 'node')}"
    return Wanted(wanted, reason)


def summed_speedups(each: list[FloatArray], most_nodes: int, gpus_per_node: int) -> FloatArray:
    """The sum of the jobs' speed-ups on 0 to `most_nodes` nodes, if each GPU goes where it adds the most.

    `each` has for each job what each further GPU adds, in descending order.
    """
    total = most_nodes * gpus_per_node
    gains = np.sort(np.concatenate([*each, np.zeros(total)]))[::-1]
    summed = np.concatenate([[0.0], np.cumsum(gains[:total])])
    return summed[::gpus_per_node]


def _best_number(
    snapshot: Snapshot, jobs: IntArray, nodes: int, terms: Terms, offer: NodeOffer, rival: int
) -> int:
    """How many nodes these jobs are worth, by the rule that the terms name."""
    most, width = terms.affordable(offer), offer.gpus_per_node
    each = [_marginal_speedups(snapshot, i, terms.measure, most * width) for i in jobs.tolist()]
    speedup, nodes = summed_speedups(each, most, width), min(nodes, most)
    if terms.pace is not None:
        return int(np.argmax(speedup >= terms.pace * speedup[min(rival, most)]))
    if terms.hour_worth is not None:
        return _by_worth(speedup, nodes, len(jobs), terms.hour_worth, offer)
    return _by_range(speedup, nodes, terms, offer)


def _by_range(speedup: FloatArray, nodes: int, terms: Terms, offer: NodeOffer) -> int:
    """Pollux's rule: keep the utility in its range; and no node that adds hardly any speed."""
    gpus = np.arange(len(speedup)) * offer.gpus_per_node
    utility = np.divide(speedup, gpus, out=np.ones(len(gpus)), where=gpus > 0)
    added = np.diff(speedup) / offer.gpus_per_node
    useful = int(np.argmax(np.append(added < terms.least_gain, True)))
    if nodes and terms.low <= utility[nodes] <= terms.high and nodes <= max(useful, 1):
        return nodes
    enough = np.flatnonzero(utility[1 : useful + 1] >= (terms.low + terms.high) / 2)
    return int(enough[-1]) + 1 if len(enough) else 0


def _by_worth(speedup: FloatArray, nodes: int, jobs: int, hour_worth: float, offer: NodeOffer) -> int:
    """The number of nodes with the least cost of progress, where the waiting of jobs costs too."""
    cost = np.arange(len(speedup)) * offer.price_per_hour + hour_worth * jobs
    cost = np.divide(cost, speedup, out=np.full(len(cost), np.inf), where=speedup > 0)
    best = int(np.argmin(cost))
    return nodes if nodes and cost[nodes] <= cost[best] * (1 + TOLERANCE) else best


def nodes_for_deadlines(snapshot: Snapshot, most: int, offer: NodeOffer) -> int:
    """The fewest nodes on which all deadlines can be kept that `most` nodes could keep."""
    if not np.isfinite(snapshot.deadline_s).any() or not most:
        return 0
    planner = ElasticFlow()

    def lost(nodes: int) -> float:
        return planner.weight_lost(_with_nodes(snapshot, nodes, offer))

    least = lost(most)
    below, enough = 0, most
    while enough - below > 1:
        nodes = (below + enough) // 2
        if lost(nodes) <= least:
            enough = nodes
        else:
            below = nodes
    return enough


def _with_nodes(snapshot: Snapshot, nodes: int, offer: NodeOffer) -> Snapshot:
    """The same jobs on that many nodes, which may have to start first."""
    cluster = Cluster(tuple(Node(f"n{i}", offer.gpus_per_node) for i in range(nodes)))
    start_s = snapshot.start_cost_s + offer.start_s
    costs = (snapshot.resize_cost_s, start_s)
    return Snapshot(snapshot.now_s, cluster, snapshot.table, snapshot.rows, snapshot.curves, *costs)


def _marginal_speedups(snapshot: Snapshot, index: int, measure: Measure, most: int) -> FloatArray:
    """Speed-up over one GPU that each further GPU adds, smoothed so that it never rises."""
    row, belief = snapshot.rows[index], snapshot.beliefs[index]
    most = min(most, snapshot.curves.max_gpus, int(snapshot.table.max_gpus[row]))
    rates = snapshot.curves.rates[snapshot.curve[index], : most + 1]
    if belief is not None:
        if measure == "throughput" and belief.known:
            rates = belief.throughput(most, snapshot.cluster.gpus_per_node)
        rates = rates * belief.shown(most)
        rates = rates[: max(belief.max_gpus(most), min(int(snapshot.min_gpus[index]), most)) + 1]
    runs = np.flatnonzero(rates > 0)
    if not len(runs):
        return np.zeros(0)
    per_gpu = rates[runs[0]] / runs[0]
    return np.diff(_concave(np.maximum.accumulate(rates))) / per_gpu


def _concave(curve: FloatArray) -> FloatArray:
    """The least concave function that is nowhere below a rising curve."""
    corners = [0]
    for k in range(1, len(curve)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (curve[b] - curve[a]) * (k - a) > (curve[k] - curve[a]) * (b - a):
                break
            corners.pop()
        corners.append(k)
    return np.interp(np.arange(len(curve)), corners, curve[corners])


def _lasting(snapshot: Snapshot, offer: NodeOffer) -> IntArray:
    """The jobs that will still be there when a node requested now is ready."""
    rate = snapshot.rate_at(np.minimum(snapshot.gpus, snapshot.curves.max_gpus))
    left_s = np.divide(snapshot.remaining, rate, out=np.full(len(rate), np.inf), where=rate > 0)
    left_s[~snapshot.known] = np.inf
    return np.flatnonzero(left_s > offer.start_s)


# Offer and terms from text such as 'price=3,start=120,budget=40', as people write them.
#
# The simulator rents the nodes of its cluster; a live platform is told first how many nodes of which size, as
# in '0:3x2,price=3'. All else means the same in both.


_OFFER = {"price": "price_per_hour", "start": "start_s", "spot": "spot_life_s"}
_TERMS = {
    "low": "low",
    "high": "high",
    "gain": "least_gain",
    "worth": "hour_worth",
    "pace": "pace",
    "budget": "budget_per_hour",
    "idle": "idle_s",
    "interval": "interval_s",
    "measure": "measure",
}
OPTIONS = (*_OFFER, *_TERMS)


def read_options(
    text: str, offer: dict[str, Any], terms: dict[str, Any], allowed: Sequence[str] = OPTIONS
) -> tuple[NodeOffer, Terms]:
    """Offer and terms with the values of the text; `spot` is in hours, other times in seconds."""
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in allowed:
            near, names = nearest(key, list(allowed)), ", ".join(allowed)
            raise InputError(f"autoscale: unknown option '{item}'.{near} Options: {names}", field="autoscale")
        given: Any = value
        if key != "measure":
            try:
                given = float(value) * (3600 if key == "spot" else 1)
            except ValueError as error:
                raise InputError(
                    f"autoscale: {key} must be a number, got '{value}'", field="autoscale"
                ) from error
        if key in _OFFER:
            offer = offer | {_OFFER[key]: given}
        else:
            terms = terms | {_TERMS[key]: given}
    try:
        return NodeOffer(**offer), Terms(**terms)
    except InputError as error:
        raise InputError(f"autoscale: {error}", field="autoscale") from error


@dataclass(frozen=True, slots=True)
class Rentable:
    """Nodes that a live platform may rent, and on which terms."""

    offer: NodeOffer
    terms: Terms
    gpu_type: str
    """GPU type of the nodes; empty if it was not given."""


def parse_rentable(text: str, start_s: float) -> Rentable:
    """Parse 'MIN:MAXxSLOTS', with ':TYPE' and options as the simulator has them behind it.

    `start_s`: how long the provider's nodes take to start, if the text does not have it.
    """
    size, _, rest = text.partition(",")
    found = re.fullmatch(r"\s*(\d+):(\d+)x(\d+)(?::([\w.-]+))?\s*", size)
    if found is None or not 0 <= int(found[1]) <= int(found[2]) or int(found[2]) < 1 or int(found[3]) < 1:
        raise InputError(
            "autoscale must begin with MIN:MAXxSLOTS, such as 0:3x2 for up to 3 nodes of 2 slots, got "
            f"'{text}'",
            field="autoscale",
        )
    offer = {"gpus_per_node": int(found[3]), "start_s": start_s}
    terms = {"least_nodes": int(found[1]), "most_nodes": int(found[2])}
    allowed = tuple(name for name in OPTIONS if name != "spot")
    made, bounds = read_options(rest, offer, terms, allowed)
    affordable = bounds.affordable(made)
    if affordable < max(bounds.least_nodes, 1):
        raise InputError(
            f"autoscale: a budget of {bounds.budget_per_hour:g} per hour pays {affordable} nodes at a price "
            f"of {made.price_per_hour:g}, and at least {max(bounds.least_nodes, 1)} must be affordable",
            field="autoscale",
        )
    return Rentable(made, bounds, (found[4] or "").lower())
