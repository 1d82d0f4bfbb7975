"""A placer that begins with jobs already placed, as after a restart of whoever used it."""

from __future__ import annotations

import pytest

from swell.domain import Cluster, overlapping
from swell.placement import PLACERS, NoRoom, make_placer


@pytest.mark.parametrize("name", sorted(PLACERS))
def test_adopted_jobs_keep_their_gpus_and_can_be_resized(name: str) -> None:
    placer = make_placer(name, Cluster.parse("1x4"))
    placer.adopt(0, (0,))
    placer.adopt(1, (1,))
    placed = {0: (0,), 1: (1,)} | placer.place({0: 2, 1: 2})
    assert sorted(len(p) for p in placed.values()) == [2, 2]
    assert overlapping(placed.values()) is None


@pytest.mark.parametrize("name", sorted(PLACERS))
def test_gpus_cannot_be_adopted_twice(name: str) -> None:
    placer = make_placer(name, Cluster.parse("1x4"))
    placer.adopt(0, (0, 1))
    with pytest.raises(NoRoom):
        placer.adopt(1, (1, 2))
