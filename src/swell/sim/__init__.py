"""The simulator: it reads traces, runs them on a virtual clock, writes events and computes metrics."""

from swell.sim.capacity import DemandChange, NodeFailure
from swell.sim.cloud import Cloud, parse_cloud
from swell.sim.costs import ConstantCost, ModelledCost, ResizeCost, parse_cost
from swell.sim.engine import simulate
from swell.sim.metrics import Result

__all__ = [
    "Cloud",
    "ConstantCost",
    "DemandChange",
    "ModelledCost",
    "NodeFailure",
    "ResizeCost",
    "Result",
    "parse_cloud",
    "parse_cost",
    "simulate",
]
