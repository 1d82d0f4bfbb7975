"""Every sample exactly once per epoch, whatever joins, leaves, dies or restarts. Hypothesis drives it.

The script (benchmarks/runtime/counting.py) counts samples in its weights, so what a checkpoint forgets is
forgotten there too. `make bench-runtime` plays 200 schedules; here are a few.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.runtime.arena import check_counts  # noqa: E402
from benchmarks.runtime.exactly_once import SCHEDULE, timed  # noqa: E402


class Arena:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.runtime.arena"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def play(self, schedule: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(schedule) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._process.stdout.readline())
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    made = Arena()
    assert made.play({"workers": 1, "epochs": 1, "pace": 0})["problem"] is None, "and torch is loaded now"
    yield made
    made.close()


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(SCHEDULE)
def test_every_sample_is_in_the_model_exactly_once_per_epoch(arena: Arena, schedule: dict[str, Any]) -> None:
    result = arena.play(timed(schedule))
    assert result["problem"] is None, json.dumps(result, indent=1)


def test_the_check_itself_sees_a_sample_used_twice() -> None:
    assert check_counts([[0.5, 0.5, 1.0]], samples=3, batch=2) is None
    assert "epoch 0" in str(check_counts([[0.5, 1.0, 1.0]], samples=3, batch=2))
    assert "epoch 1" in str(check_counts([[0.5, 0.5, 1.0], [0.5, 0.5, 0.0]], samples=3, batch=2))
