"""Which workers reach each other: pure, like `membership`, which uses it.

When the link between two workers fails while both reach the coordinator, only they notice. One of them says
so; then the coordinator has everybody try whom it reaches (a *check*), because a choice from the first word
alone would leave the wrong ones out. The answers say which pairs are cut, and training goes on with the
largest set of members that all reach each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from swell.train.agent.protocol import age

CHECK_S = 1.5
"""How long answers to a check are waited for."""
AGAIN_S = 0.5
"""Least time from the end of a check to the next one."""
HOLD_S = 2.0
MOST_HOLD_S = 8.0
"""A newcomer that cannot be reached is tried again after a while, which doubles from the first to this."""
MOST_TRIES = 20_000
"""Most sets that `connected` looks at in one group; beyond it takes a large set, maybe not the largest."""

Pair = frozenset[str]


def pair(one: str, other: str) -> Pair:
    """Two workers, in no order."""
    return frozenset((one, other))


def connected(names: Sequence[str], cuts: Collection[Pair], keep: Collection[str] = ()) -> list[str]:
    """The largest of the sets that contain no cut pair, in the order of `names`; of several, the oldest.

    Of two sets that is the one with the oldest worker that the other has not. Those in `keep` stay.
    """
    foes: dict[str, set[str]] = {name: set() for name in names}
    for one, other in (tuple(cut) for cut in cuts if len(cut) == 2):
        if one in foes and other in foes:
            foes[one].add(other)
            foes[other].add(one)
    kept = {name for name in names if name in keep}
    gone = {foe for name in kept for foe in foes[name]} - kept
    left = {name for name in names if name not in gone and name not in kept}
    chosen = set(kept)
    while left:
        group = _group(next(iter(left)), foes, left)
        left -= group
        chosen |= _Search(foes).largest(group)
    return [name for name in names if name in chosen]


def _group(name: str, foes: dict[str, set[str]], among: set[str]) -> set[str]:
    """All that hang together with `name` by cuts: what is chosen elsewhere does not matter to them."""
    found, open_ = {name}, [name]
    while open_:
        for foe in (foes[open_.pop()] & among) - found:
            found.add(foe)
            open_.append(foe)
    return found


class _Search:
    """The largest set of workers without a cut, by trying: either a worker stays or those it cannot reach."""

    def __init__(self, foes: dict[str, set[str]]) -> None:
        self._foes = foes
        self._best: set[str] = set()
        self._tries = 0

    def largest(self, group: set[str]) -> set[str]:
        """The largest such set in `group`, the oldest of several."""
        self._try(set(), group)
        return self._best

    def _try(self, chosen: set[str], open_: set[str]) -> None:
        self._tries += 1
        if len(chosen) + len(open_) < len(self._best) or (self._best and self._tries > MOST_TRIES):
            return
        torn = [name for name in open_ if self._foes[name] & open_]
        if not torn:
            found = chosen | open_
            if len(found) > len(self._best) or (
                len(found) == len(self._best) and _ages(found) < _ages(self._best)
            ):
                self._best = found
            return
        worst = max(torn, key=lambda name: (len(self._foes[name] & open_), age(name)))
        foes = self._foes[worst] & open_
        self._try(chosen, open_ - {worst})
        self._try(chosen | {worst}, open_ - foes - {worst})


def _ages(names: Iterable[str]) -> list[int]:
    return sorted(age(name) for name in names)


@dataclass(slots=True)
class Reach:
    """The check under way, and which newcomers wait because they could not be reached."""

    number: int = 0
    asked: frozenset[str] = frozenset()
    """Workers whose answer to the present check is missing; empty if there is none."""
    answered: frozenset[str] = frozenset()
    cuts: set[Pair] = field(default_factory=set)
    """Pairs that the answers so far say are cut."""
    began_s: float = float("-inf")
    ended_s: float = float("-inf")
    holds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By newcomer that could not be reached: until when it waits, and for how long."""

    def begin(self, names: Iterable[str], now_s: float) -> int | None:
        """The number of a new check; None if one is under way or was over just now."""
        if self.asked or now_s - self.ended_s < AGAIN_S:
            return None
        self.number += 1
        self.asked, self.answered, self.cuts, self.began_s = frozenset(names), frozenset(), set(), now_s
        return self.number

    def answer(self, name: str, number: int, unreachable: Iterable[str]) -> bool:
        """A worker said whom it cannot reach; True if nothing more is to be expected of the check.

        Few whom none of the others reaches may not answer at all: the coordinator does not reach them either.
        """
        if number != self.number or name not in self.asked:
            return False
        self.cuts |= {pair(name, other) for other in unreachable if other != name}
        self.asked -= {name}
        self.answered |= {name}
        if len(self.answered) <= len(self.asked):
            return False
        return all(pair(one, other) in self.cuts for one in self.answered for other in self.asked)

    def late(self, now_s: float) -> bool:
        """Whether a check is under way that is not waited for any longer."""
        return bool(self.asked) and now_s - self.began_s >= CHECK_S

    def end(self, now_s: float) -> tuple[set[Pair], frozenset[str]]:
        """The cut pairs that the check found, and those that did not answer and are part of such a pair."""
        mute = frozenset(name for name in self.asked if any(name in cut for cut in self.cuts))
        self.asked, self.ended_s = frozenset(), now_s
        return self.cuts, mute

    def hold(self, name: str, now_s: float) -> bool:
        """Let a newcomer wait before it is tried again; True if it did not wait before."""
        first = name not in self.holds
        wait_s = HOLD_S if first else min(self.holds[name][1] * 2, MOST_HOLD_S)
        self.holds[name] = (now_s + wait_s, wait_s)
        return first

    def held(self, name: str, now_s: float) -> bool:
        """Whether a newcomer has to wait."""
        return now_s < self.holds.get(name, (float("-inf"), 0.0))[0]
