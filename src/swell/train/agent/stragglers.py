"""Members that stay slower than the others (EDL, TPDS'21): they are found and replaced.

All members of a generation finish a step together, so one slow member slows everybody, and its own step time
looks like theirs. What differs is how long each waited for the others. A member is a straggler if for
`PERSISTS_S` it took `SLOWER` times as long for each of its samples as the others did in the middle. It then
leaves at a step boundary like in any shrink, so no sample is lost, and a new worker comes in its place.

A place that is slow, or a script whose leader has more to do, would be slow with every worker. So each
replacement is followed by a longer rest than the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from swell.train.agent.generations import Instruction, Say

if TYPE_CHECKING:
    from swell.train.agent.membership import Membership

SLOWER = 1.5
"""How many times slower than the others a straggler is."""
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
class Stragglers:
    """How long each member of the present generation takes for a sample, and who takes too long."""

    generation: int = -1
    means: dict[str, _Heard] = field(default_factory=dict)
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
            self.generation, self.means, self.slowest = number, {}, None
        if not (isinstance(samples, int) and isinstance(own_s, float) and samples > 0 and own_s > 0):
            return
        before, step = self.means.get(name), int(report.get("step", 0))
        if before is None or step > before.step:
            beats = 1 if before is None else before.beats + 1
            self.means[name] = _Heard(step, own_s / samples, beats)

    def tick(self, m: Membership, now_s: float) -> list[Instruction]:
        """Replace a member that has been slower for long enough."""
        name, times = self._slower(m.generation.members)
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
        place: dict[str, Any] = {} if worker.slot is None else {"slot": worker.slot}
        if name == m.generation.leader:  # which may have more to do than the others, wherever it is
            place["leader"] = True
        return [Say("straggler", {"worker": name, "times": round(times, 2), **place})]

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
