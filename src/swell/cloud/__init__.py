"""Capacity that is rented: how many nodes are worth having, and who provides them."""

from swell.cloud.autoscaler import Autoscaler, Rentable, Terms, Wanted, parse_rentable, read_options
from swell.cloud.provider import NodeOffer, Provider, Supply

__all__ = [
    "Autoscaler",
    "NodeOffer",
    "Provider",
    "Rentable",
    "Supply",
    "Terms",
    "Wanted",
    "parse_rentable",
    "read_options",
]
