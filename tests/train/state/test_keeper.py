"""When checkpoints are due: early enough to be on disk when the interval is over."""

import threading
from pathlib import Path

import pytest
import torch

from swell.train.agent.errors import UsageError
from swell.train.state import checkpoint
from swell.train.state.keeper import Keeper


def test_saves_begin_earlier_by_what_the_last_one_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = checkpoint._write_tensors

    def slow(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        gate.wait(30)
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "_write_tensors", slow)
    keeper = Keeper(tmp_path, None, 10, 3)
    assert not keeper.due(9)
    assert keeper.due(10)
    keeper.save(10, {"step": 10})
    for step in (11, 12, 13):
        assert not keeper.due(step)
    gate.set()
    keeper.wait()
    assert not keeper.due(14), "the save was on disk after four steps"
    assert not keeper.due(15)
    assert keeper.due(16), "so the next begins after six"
    gate.clear()
    keeper.save(16, {"step": 16})
    keeper.save(17, {"step": 17})  # skipped: the one before is being written
    assert keeper.due(26), "a skipped save does not count"
    gate.set()
    keeper.wait()


def test_without_a_directory_nothing_is_ever_due() -> None:
    keeper = Keeper(None, 1.0, 1, 3)
    assert not keeper.due(100)
    assert keeper.load() is None


@pytest.mark.parametrize(("seconds", "steps", "field"), [(0.0, None, "every_s"), (None, 0, "every_steps")])
def test_intervals_must_be_positive(seconds: float | None, steps: int | None, field: str) -> None:
    with pytest.raises(UsageError, match=field):
        Keeper(None, seconds, steps, 3)
