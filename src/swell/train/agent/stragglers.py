"""Members that stay slower than the others (EDL, TPDS'21): they are found and replaced.

All members of a generation finish a step together, so one slow member slows everybody, and its own step time
looks like theirs. What differs is how long each waited for the others. A member is a straggler if for
`PERSISTS_S` it took `SLOWER` times as long for each of its samples as the others did in the middle. It then
leaves at a step boundary like in any shrink, so no sample is lost, and a new worker comes in its place.

The same for a slow link: members measure how long what the others send is on its way (`reporting.LinkTimes`),
which is no part of anybody's own time. A host whose links are `LINK_SLOWER` times slower than the others'
is at fault, if waiting for them takes most of a step. Of two hosts with one slow link between them it is the
one with the younger worker. Where all links are alike, or most are slow, nobody is at fault.

A place that is slow, or a script whose leader has more to do, would be slow with every worker. So each
replacement is followed by a longer rest than the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

from swell.train.agent.membership import Instruction, Membership, Say
from swell.train.agent.protocol import Straggler, age

SLOWER = 1.5
"""How many times slower than the others a straggler is."""
LINK_SLOWER = 4.0
"""How many times slower than others a slow link is. Those of one network differ by less, even a full one."""
LINK_SHARE = 0.5
"""The part of a step that what comes over a slow link is on its way."""
WAIT_SHARE = 1 / 3
"""The part of a step in which each member waits, for a slow link to be the reason: if not, it is hidden
behind the computation, or the others wait for a member that computes."""
MOST_TIMES = 1000.0
PERSISTS_S = 10.0
"""How long it has to be slower, without a break."""
REST_S = 60.0
"""The least time between two replacements; twice as long after each."""
FEWEST = 4
"""A member's mean counts after so many heartbeats with a new step."""


@dataclass(slots=True)
class _Heard:
    step: int
    sample_s: float
    """Mean time for a sample, without waiting."""
    beats: int = 1


@dataclass(slots=True)
class _Links:
    rates: dict[str, float]
    """By member on another host: seconds for a megabyte from there."""
    share: float
    """The part of a step that what comes over the slowest of them is on its way."""
    waits: bool
    """Whether the member waits for a part of the step that is worth it."""
    beats: int = 1


Pair = frozenset[str]


def slow_hosts(pairs: Mapping[Pair, float]) -> tuple[list[str], float]:
    """The hosts with the most slow links, and how many times slower these are than fast ones.

    `pairs`: by two hosts, how long a megabyte takes between them. A link is slow if it is much slower than
    the fastest quarter of all.
    """
    if len(pairs) < 3:
        return [], 1.0  # with two hosts nobody can tell which one is at fault
    base = sorted(pairs.values())[(len(pairs) - 1) // 4]
    slow = {pair: rate for pair, rate in pairs.items() if rate >= LINK_SLOWER * base}
    if not slow or base <= 0:
        return [], 1.0
    counts = Counter(chain.from_iterable(slow))
    most = max(counts.values())
    return sorted(host for host in counts if counts[host] == most), min(
        median(slow.values()) / base, MOST_TIMES
    )


@dataclass(slots=True)
class Stragglers:
    """How long each member of the present generation takes for a sample, and who takes too long."""

    generation: int = -1
    means: dict[str, _Heard] = field(default_factory=dict)
    links: dict[str, _Links] = field(default_factory=dict)
    slowest: tuple[str, float] | None = None
    """Who is slower than the others, and since when."""
    rest_until_s: float = 0.0
    replaced: int = 0

    def heard(self, name: str, report: dict[str, Any]) -> None:
        """A member's heartbeat. One without the figures (a step that nobody had samples for) says nothing."""
        number, own_s, samples = (report.get(key) for key in ("generation", "own_s", "samples"))
        if not isinstance(number, int) or number < self.generation:
            return
        if number > self.generation:
            self.generation, self.means, self.links, self.slowest = number, {}, {}, None
        self._hear_links(name, report)
        if not (isinstance(samples, int) and isinstance(own_s, float) and samples > 0 and own_s > 0):
            return
        before, step = self.means.get(name), report.get("step", 0)
        if isinstance(step, int) and (before is None or step > before.step):
            beats = 1 if before is None else before.beats + 1
            self.means[name] = _Heard(step, own_s / samples, beats)

    def _hear_links(self, name: str, report: dict[str, Any]) -> None:
        links, link_s, step_s, own_s = (report.get(key) for key in ("links", "link_s", "step_s", "own_s"))
        if not (isinstance(links, dict) and isinstance(link_s, float) and isinstance(step_s, float)):
            self.links.pop(name, None)
            return
        rates = {n: rate for n, rate in links.items() if isinstance(rate, float) and 0 < rate < float("inf")}
        waits = not isinstance(own_s, float) or step_s - own_s >= WAIT_SHARE * step_s
        before = self.links.get(name)
        beats = 1 if before is None else before.beats + 1
        self.links[name] = _Links(rates, link_s / step_s if step_s > 0 else 0.0, waits, beats)

    def tick(self, m: Membership, now_s: float) -> list[Instruction]:
        """Replace a member that has been slower, or behind a slow link, for long enough."""
        name, times = self._slower(m.generation.members)
        link = False
        if name is None:
            name, times = self._behind_slow_link(m)
            link = True
        if (
            name is None
            or name not in m.workers
            or m.generation.number != self.generation
            or m.candidate is not None
        ):
            self.slowest = None
            return []
        if self.slowest is None or self.slowest[0] != name:
            self.slowest = (name, now_s)
        if now_s < max(self.slowest[1] + PERSISTS_S, self.rest_until_s):
            return []
        self.slowest = None
        self.rest_until_s = now_s + REST_S * 2**self.replaced
        self.replaced += 1
        worker = m.workers[name]
        worker.slow = True  # the next plan is one without it
        m.quiet.after_loss(now_s)  # its GPU is free only once it has left
        leader = name == m.generation.leader and not link  # it may have more to do, wherever it is
        return [Say(Straggler(name, round(times, 2), worker.slot, leader, link))]

    def _behind_slow_link(self, m: Membership) -> tuple[str | None, float]:
        """The member whose host has slow links that all wait for, and how many times slower they are."""
        members = m.generation.members
        hosts = {n: w.address[0] for n in members if (w := m.workers.get(n)) and w.address is not None}
        known = {name: self.links[name] for name in members if name in self.links}
        if not members or len(hosts) < len(members) or len(known) < len(members):
            return None, 1.0
        if not all(one.waits and one.beats >= FEWEST for one in known.values()):
            return None, 1.0
        if max(one.share for one in known.values()) < LINK_SHARE:
            return None, 1.0
        pairs: dict[Pair, float] = {}
        for name, one in known.items():
            for other, rate in one.rates.items():
                if other in hosts and hosts[other] != hosts[name]:
                    pair = frozenset((hosts[name], hosts[other]))
                    pairs[pair] = max(pairs.get(pair, 0.0), rate)
        at_fault, times = slow_hosts(pairs)
        there = [name for name in members if hosts[name] in at_fault]
        others = [name for name in there if name != m.generation.leader] or there
        return max(others, key=age, default=None), times

    def _slower(self, members: list[str]) -> tuple[str | None, float]:
        """The member that is much slower than the others, and how many times, if there is one."""
        known = {
            n: self.means[n].sample_s for n in members if n in self.means and self.means[n].beats >= FEWEST
        }
        if len(known) < len(members) or len(known) < 2:
            return None, 1.0
        name = max(known, key=lambda n: known[n])
        times = known[name] / median(sample_s for n, sample_s in known.items() if n != name)
        return (name, times) if times >= SLOWER else (None, times)
