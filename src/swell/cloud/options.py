"""Offer and terms from text such as 'price=3,start=120,budget=40', as people write them.

The simulator rents the nodes of its cluster; a live platform is told first how many nodes of which size, as
in '0:3x2,price=3'. All else means the same in both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swell.cloud.autoscaler import Terms
from swell.cloud.provider import Offer
from swell.domain import InputError, nearest

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
) -> tuple[Offer, Terms]:
    """Offer and terms with what the text says of them; `spot` is in hours, other times in seconds."""
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
        return Offer(**offer), Terms(**terms)
    except InputError as error:
        raise InputError(f"autoscale: {error}", field="autoscale") from error


@dataclass(frozen=True, slots=True)
class Rentable:
    """What a live platform may rent, and on which terms."""

    offer: Offer
    terms: Terms
    gpu_type: str
    """GPU type of the nodes; empty if it was not said."""


def parse_rentable(text: str, start_s: float) -> Rentable:
    """What may be rented, from 'MIN:MAXxSLOTS', with ':TYPE' and options as the simulator has them behind it.

    `start_s`: how long the provider's nodes take to start, if the text does not say.
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
