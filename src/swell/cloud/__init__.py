"""Capacity that is rented: how many nodes are worth having, and who provides them."""

from swell.cloud.autoscaler import Autoscaler, Terms, Wanted
from swell.cloud.provider import Offer, Provider, Supply

__all__ = ["Autoscaler", "Offer", "Provider", "Supply", "Terms", "Wanted"]
