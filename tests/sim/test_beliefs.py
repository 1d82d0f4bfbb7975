"""What is believed of jobs on each GPU type."""

from __future__ import annotations

import numpy as np

from swell.policies.snapshot import Curves
from swell.sim.beliefs import TypeBeliefs


def test_each_type_has_curves_of_its_own() -> None:
    slow, fast = np.array([[0.0, 1.0, 1.8]]), np.array([[0.0, 3.0, 5.0]])
    exact = Curves(slow, {"t4": Curves(slow), "v100": Curves(fast)})
    beliefs = TypeBeliefs({"t4": 2, "v100": 2}, ["resnet"], exact, np.array([0]))
    beliefs.show_exact(0)
    told = beliefs.curves([0])
    assert told.on("t4").rates.tolist() == slow.tolist()
    assert told.on("v100").rates.tolist() == fast.tolist()
