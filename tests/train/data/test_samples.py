"""The order of a loader's samples, and what its processes fetch ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from swell.train.data.plan import Range
from swell.train.data.samples import Samples


class Reading(Samples):
    """Samples whose processes note what they are to fetch."""

    def __init__(self, size: int, cursor: int, *, drop_last: bool = False) -> None:
        self.dataset = TensorDataset(torch.arange(size))  # type: ignore[assignment]
        self.batch_size, self.shuffle, self.drop_last, self.seed, self.keyed = 4, False, drop_last, 0, False
        self.passes, self.cursor, self._num_workers = 0, cursor, 1
        self.planned: list[list[int]] = []
        self.windows: list[int] = []

    def pool(self) -> Any:
        return self

    def plan(self, batches: list[list[int]], seed: int | None) -> None:
        self.planned = batches

    def halves(self, window: int) -> list[tuple[int, Range]]:
        self.windows.append(window)
        return [(-1, (0, window // 2)), (-1, (window // 2, window))]


@pytest.mark.parametrize(
    ("size", "cursor", "drop_last", "windows"),
    [
        (100, 0, False, [4, 4, 4]),
        (10, 0, False, [4, 4, 2]),
        (10, 0, True, [4, 4]),
        (8, 0, False, [4, 4]),
        (8, 0, True, [4, 4]),
        (8, 8, False, []),
    ],
)
def test_processes_read_ahead_up_to_the_last_sample_of_the_pass(
    size: int, cursor: int, drop_last: bool, windows: list[int]
) -> None:
    reading = Reading(size, cursor, drop_last=drop_last)
    reading.look_ahead(reading.halves)
    assert reading.windows == windows
    assert [index for batch in reading.planned for index in batch] == list(
        range(cursor, cursor + sum(windows))
    )
