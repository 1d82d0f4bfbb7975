"""When newcomers are brought level in the background (`level`), and when that ends.

A member is the source of the present candidate's newcomers; a worker without state follows the members of its
candidate. Both sides end when the candidate is entered, or when another one takes its place.
"""

from __future__ import annotations

from swell.train.sync import level
from swell.train.sync.handover import Carrier
from swell.train.sync.level import Optimized, Source
from swell.train.sync.memory import MemberMemory
from swell.train.sync.mesh import Mesh


class Levelling:
    """One worker's side of bringing newcomers level, as a member or as a newcomer."""

    def __init__(self, carrier: Carrier, memory: MemberMemory) -> None:
        self.memory = memory
        self._carrier = carrier
        self._source: Source | None = None
        """What brings the newcomers of the present candidate level."""
        self._level = False
        """Whether this newcomer has become level."""
        self._tries = 0
        """How often this newcomer began to become level."""

    def _optimized(self, mesh: Mesh) -> Optimized | None:
        """What newcomers on other hosts get in the background; None if the model is small."""
        large = self.memory.flat.layout.region_bytes >= level.LEAST_BYTES
        return self._carrier.optimized() if large and not mesh.recovery else None

    def done(self, mesh: Mesh) -> bool:
        """Between two steps: whether the newcomers of candidate `mesh` are as level as they can be."""
        optimized = self._optimized(mesh)
        if optimized is None:
            return True
        if self._source is None or self._source.mesh is not mesh:
            self._drop_source()
            self._source = Source(mesh, optimized, self.memory.readable(mesh))
        return self._source.at_boundary()

    def reaches(self, newcomers: set[int]) -> bool:
        """Whether just these ranks of the present candidate become level."""
        source = self._source
        return source is not None and not source.gave_up and newcomers == set(source.newcomers)

    def follow(self, mesh: Mesh) -> None:
        """As a newcomer: become level with the members of candidate `mesh`, until they switch to it."""
        optimized = self._optimized(mesh)
        self._level = False
        if optimized is not None:
            self._tries += 1
            self._level = level.follow(mesh, optimized, self.memory.readable(mesh), self._tries - 1)

    def end(self, mesh: Mesh) -> str | None:
        """End what is under way, because `mesh` is entered.

        Returns a fingerprint by which members and newcomers see whether they are level; None if they cannot
        be.
        """
        levelling, self._level = self._level, False
        if self._source is not None:
            levelling = self._source.mesh is mesh and bool(self._source.newcomers)
            if self._source.mesh is mesh:
                self._source.finish()
            self._drop_source()
        return level.fingerprint(self._carrier.steady()) if levelling else None

    def _drop_source(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
