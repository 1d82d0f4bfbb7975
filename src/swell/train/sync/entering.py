"""What the members of a new generation conclude from what each of them said as it entered.

Pure: all members have the same headers, so all of them conclude the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from swell.train.agent.errors import UsageError
from swell.train.data.plan import Range
from swell.train.sync.mesh import Header

STEP = "step"
"""What a member is doing that sums gradients; other operations are named by what the script called."""


class RollCall:
    """What each member said as it entered a generation, in rank order."""

    def __init__(self, headers: list[Header]) -> None:
        self.headers = headers
        self.live = [rank for rank, header in enumerate(headers) if header["live"]]
        """The members that have the job's state."""
        self.top = max((headers[rank]["operation"] for rank in self.live), default=0)
        """The operation at which the furthest of them are; all before it are complete."""

    def misfits(self) -> dict[int, str]:
        """The ranks that cannot go on with the others, and why.

        Members go on from the last operation that any of them completed. A worker without state begins where
        the script draws a batch, so it can join members in a step, but not members that are at a `job.reduce`
        after it: their state no longer says where that is. If members are at different operations, the oldest
        of them is right.
        """
        if not self.live:
            return {}
        said = [self.headers[rank] for rank in self.live]
        doing = next((h["doing"] for h in said if h["operation"] == self.top and h["doing"]), "")
        out: dict[int, str] = {}
        for rank, header in enumerate(self.headers):
            if not header["live"]:
                if doing not in ("", STEP):
                    out[rank] = f"it has no state yet, and the others are not at a step but at job.{doing}"
            elif header["operation"] == self.top:
                if header["doing"] not in ("", doing):
                    out[rank] = f"it is at {header['doing']}, and the others are at {doing}"
            elif header["operation"] < self.top - 1 or header["held"] != header["operation"]:
                out[rank] = f"it is at operation {header['operation']}, and the others are at {self.top}"
        return out

    def check_facts(self, members: Sequence[str], rank: int) -> None:
        """Raise UsageError if some member has built something else than the member of that rank."""
        for name, header in zip(members, self.headers):
            for fact, value in self.headers[rank]["facts"].items():
                if header["facts"].get(fact) != value:
                    raise UsageError(
                        f"{fact}: worker {name} has {header['facts'].get(fact)!r}, worker "
                        f"{members[rank]} has {value!r}; every worker must build the same"
                    )

    def near(self, rank: int) -> set[int]:
        """The members with which this one shares memory: each of the two reads the other's."""
        return {other for other in self.headers[rank]["reads"] if rank in self.headers[other]["reads"]}

    @property
    def apart(self) -> bool:
        """Whether any two members cannot read each other's memory."""
        return any(len(header["reads"]) < len(self.headers) - 1 for header in self.headers)

    def furthest(self, ranks: Sequence[int]) -> int:
        """The first of `ranks` that has the job's state as of the furthest operation."""
        return next(r for r in ranks if r in self.live and self.headers[r]["operation"] == self.top)

    def level_with(self, rank: int) -> list[int]:
        """The newcomers that have become level with this member."""
        mine = self.headers[rank]["level"]
        if mine is None:
            return []
        return [r for r, header in enumerate(self.headers) if not header["live"] and header["level"] == mine]

    @property
    def _all_hold(self) -> bool:
        """Whether all members hold the sum of the furthest operation.

        A newcomer has no sum to complete the operation with: then all members do it again.
        """
        return all(h["live"] and h["operation"] == h["held"] == self.top for h in self.headers)

    def complete(self, rank: int) -> bool:
        """Whether the present operation of that member is complete: all members hold its sum."""
        mine = self.headers[rank]
        if not mine["live"]:
            return False
        # If another member is further, all members voted for the operation, so this one holds its sum.
        return mine["operation"] < self.top or self._all_hold

    def covered(self) -> dict[str, list[Range]]:
        """By loader: the samples of the coming step that some member holds gradients for."""
        merged: dict[str, list[Range]] = {}
        for header in self.headers if not self._all_hold else ():
            if header["live"] and header["operation"] == self.top:
                for name, ranges in header["covered"].items():
                    merged.setdefault(name, []).extend((int(a), int(b)) for a, b in ranges)
        return merged
