"""The simulator: it reads traces, runs them on a virtual clock, writes events and computes metrics."""

from swell.sim.capacity import Cloud, DemandChange, NodeFailure, parse_cloud
from swell.sim.engine import simulate
from swell.sim.metrics import SimulationResult
from swell.sim.world import ConstantCost, ModelledCost, ResizeCost, parse_cost

__all__ = [
    "Cloud",
    "ConstantCost",
    "DemandChange",
    "ModelledCost",
    "NodeFailure",
    "ResizeCost",
    "SimulationResult",
    "parse_cloud",
    "parse_cost",
    "simulate",
]
