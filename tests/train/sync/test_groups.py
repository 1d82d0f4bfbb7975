"""Sums by a process group of torch's: it takes over when all have it, and stands in nobody's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.scripts import LINEAR

from swell.train.agent.errors import UsageError
from swell.train.agent.protocol import JobFile
from swell.train.sync.reducer import Grouping

TRAINED = "weights [1.0, 2.0, 3.0, 4.0]"
GLOO = {"collectives": "gloo"}


def ways(status: dict[str, Any]) -> list[str]:
    """Who adds, as each member says."""
    return [status["reports"].get(name, {}).get("sums", "") for name in status["members"]]


def of_size(count: int) -> Any:
    return lambda status: ways(status) == ["gloo"] * count


def test_a_group_takes_the_sums_over_after_the_start_a_switch_and_a_death(stage: Any) -> None:
    job = stage.run(LINEAR, "200", "0.004", workers=2, settings=GLOO)
    job.wait_for(of_size(2))
    job.resize(3)
    job.wait_for(of_size(3))
    dead = job.kill(1)
    job.wait_for(lambda s: dead not in s["members"] and of_size(3)(s))
    job.resize(1)
    job.members(1)
    assert job.wait() == 0
    assert TRAINED in job.output() and "steps 2000" in job.output()
    assert [e["pause_s"] < 2.0 for e in job.events("recovery")] == [True]
    job.leaves_nothing()


def test_without_being_asked_to_processors_sum_through_the_mesh(stage: Any) -> None:
    job = stage.run(LINEAR, "30", "0.005", workers=2)
    assert ways(job.wait_for(lambda s: all(ways(s)) and len(s["members"]) == 2)) == ["mesh", "mesh"]
    assert job.wait() == 0


def test_the_noise_of_gradients_is_measured_by_a_group_too(stage: Any) -> None:
    script = LINEAR.replace("checkpoint_every_s=None", 'checkpoint_every_s=None, mode="adaptive"')
    job = stage.run(script, "80", "0.005", workers=2, settings=GLOO)
    status = job.wait_for(lambda s: of_size(2)(s) and any("var" in r for r in s["reports"].values()))
    report = next(r for r in status["reports"].values() if "var" in r)
    assert report["var"] > 0 and report["sqr"] > 0
    assert job.wait() == 0


@pytest.mark.parametrize(
    ("config", "mode", "expected"),
    [
        ({}, "fixed", None),
        ({"collectives": "mesh"}, "fixed", None),
        ({"collectives": "nccl"}, "fixed", None),
        ({"collectives": "gloo"}, "consistent", None),
        ({"collectives": "gloo"}, "adaptive", "gloo"),
    ],
)
def test_groups_are_for_gpus_of_ones_own_or_whoever_asks(
    config: dict[str, Any], mode: str, expected: str | None, tmp_path: Path
) -> None:
    made = Grouping.of(JobFile(**config), tmp_path, torch.device("cpu"), mode)
    assert (made.backend if made else None) == expected


def test_an_unknown_way_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="collectives: got 'mpi', must be one of auto, mesh, nccl, gloo"):
        Grouping.of(JobFile(collectives="mpi"), tmp_path, torch.device("cpu"), "fixed")
