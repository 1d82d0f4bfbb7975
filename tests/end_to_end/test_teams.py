"""Borrowed slots come back, live: the small form of `python -m benchmarks.teams --live`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.teams import come_back

pytestmark = pytest.mark.timeout(300)


def test_borrowed_slots_come_back_and_the_borrower_goes_on(tmp_path: Path) -> None:
    found = come_back(tmp_path, returns=2, slots=2)
    assert found["returns"] == 2 and found["borrower_still_runs"]
    assert found["median_s"] < 60.0, "the bound of 5 s is for a machine that is not busy"
