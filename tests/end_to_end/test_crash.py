"""The control plane killed with -9 while jobs train and people submit; `benchmarks.platform.crash` is the
whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.platform.crash import run


@pytest.mark.slow
def test_a_killed_control_plane_loses_nothing_and_jobs_train_on(tmp_path: Path) -> None:
    account = run(tmp_path / "home", kills=2, jobs=3, epochs=20, seed=1)
    assert account.kills == 2 and len(account.accepted) == 3
    assert not account.unfinished, "an accepted job was lost"
    assert not account.overlaps, "a job ran twice at once"
    assert not account.missing_steps
    assert not account.queue_changed
    assert account.steps_while_away > 0 and not account.stalled, "training stopped without the control plane"
    assert account.most_workers <= 4
    assert account.resumed_at != 1, "a job whose workers all died began from nothing"
