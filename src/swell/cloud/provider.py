"""A provider of nodes: it takes a requested number, and reports which are there and how many are coming.

The simulator has one with prices, start-up delay and spot loss (`swell.sim.capacity`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swell.domain import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """The equal nodes that a provider rents out, and their price."""

    gpus_per_node: int
    price_per_hour: float = 1.0
    """Price of one node for one hour, from the request until it is let go."""
    start_s: float = 120.0
    """How long a node takes from the request until jobs can run on it."""
    spot_life_s: float = math.inf
    """How long a node lives on average before the provider takes it back; infinite if it never does."""

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("gpus_per_node", self.gpus_per_node >= 1, "at least 1"),
            ("price_per_hour", 0 <= self.price_per_hour < math.inf, "a price of at least 0"),
            ("start_s", 0 <= self.start_s < math.inf, "seconds of at least 0"),
            ("spot_life_s", self.spot_life_s > 0, "more than 0"),
        ):
            if not fine:
                raise InputError(f"{name} must be {allowed}, got {getattr(self, name)}", field=name)


@dataclass(frozen=True, slots=True)
class Supply:
    """The nodes of a provider at one moment."""

    ready: tuple[str, ...] = ()
    """Names of the nodes that jobs can run on."""
    coming: int = 0
    """Nodes that were requested and are not ready yet."""

    @property
    def nodes(self) -> int:
        return len(self.ready) + self.coming


class Provider(Protocol):
    """Where nodes come from."""

    @property
    def offer(self) -> NodeOffer: ...

    def supply(self) -> Supply:
        """Which nodes there are, and how many are coming."""
        ...

    def request(self, nodes: int, spare: Sequence[str] = ()) -> None:
        """Request this total number of nodes. To get fewer, let go of those that are coming, then of `spare`.

        Requesting the same number again changes nothing. A node that is lost is replaced only when the
        number is requested again.
        """
        ...
