"""Slots that a service wants back, live: the small form of benchmarks/reclaims.py."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.reclaims import reclaim_at_random

pytestmark = pytest.mark.timeout(300)


def test_slots_are_left_at_once_and_no_sample_is_lost(tmp_path: Path) -> None:
    found = reclaim_at_random(tmp_path, reclaims=3, jobs=2, slots=3, seed=1)
    assert found["problems"] == []
    assert found["reclaims"] == 3 and found["median_s"] < 20.0, "the bound is for a machine that is not busy"
