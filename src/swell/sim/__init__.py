"""The simulator: it reads traces, runs them on a virtual clock, writes events and computes metrics."""

from swell.sim.costs import ConstantCost, ModelledCost, ResizeCost, parse_cost
from swell.sim.engine import DemandChange, NodeFailure, simulate
from swell.sim.metrics import Result

__all__ = [
    "ConstantCost",
    "DemandChange",
    "ModelledCost",
    "NodeFailure",
    "ResizeCost",
    "Result",
    "parse_cost",
    "simulate",
]
