"""Elastic XGBoost with real processes and its own collective: resized, killed, as good as ever."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.train.agent import regular

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xgboost") is None, reason="xgboost is not installed (swell[xgboost])"
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "xgboost_digits.py"
FINAL = re.compile(r"final accuracy ([\d.]+) loss ([\d.]+) rounds (\d+)")
ROUNDS = 60
SLOWLY = """
    import runpy, sys, time
    from pathlib import Path

    nap, (hurry, example, rounds) = time.sleep, sys.argv[1:]
    time.sleep = lambda s: nap(0.0 if s == 2.0 and Path(hurry).exists() else s)
    sys.argv = [example, "--rounds", rounds, "--round-ms", "2000"]
    runpy.run_path(example, run_name="__main__")
"""
"""The example with rounds of two seconds, until the file `hurry` is there."""


def _alone(seed: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> float:
    """The loss of the example without swell around it."""
    monkeypatch.setattr(sys, "argv", ["x", "--rounds", str(ROUNDS), "--seed", str(seed)])
    for name in [name for name in os.environ if name.startswith("SWELL_")]:
        monkeypatch.delenv(name)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    found = FINAL.search(capsys.readouterr().out)
    assert found is not None
    return float(found[2])


def _trains_on(job: Any, workers: int) -> None:
    """Wait until so many workers have done a round together."""

    def done(status: dict[str, Any]) -> bool:
        members, reports = status["members"], status["reports"]
        return len(members) == workers and reports.get(members[0], {}).get("world") == workers

    job.wait_for(done, 120)


def test_four_resizes_and_a_kill_leave_the_model_as_good_as_a_fixed_size_one(
    stage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry = tmp_path / "hurry"
    job = stage.run(SLOWLY, str(hurry), str(EXAMPLE), str(ROUNDS), workers=1, maximum=3)
    _trains_on(job, 1)
    job.resize(3)
    _trains_on(job, 3)
    step = job.wait_for(lambda s: True)["step"]
    job.kill(0)  # the leader: the tracker of XGBoost's collective goes with it
    wait_until(lambda: job.events("recovery"), 120, lambda: job.output()[-3000:])
    assert job.events("recovery")[0]["step"] in (step, step + 1, step + 2, step + 3), "no round was lost"
    for workers in (1, 2, 3):
        job.resize(workers)
        _trains_on(job, workers)
    hurry.touch()
    assert job.wait(200) == 0, job.output()[-3000:]
    found = FINAL.findall(job.output())
    assert len(found) == 1 and int(found[0][2]) == ROUNDS, job.output()[-2000:]
    noise = [_alone(seed, capsys, monkeypatch) for seed in range(4)]
    spread = max(noise) - min(noise)
    assert min(noise) - spread <= float(found[0][1]) <= max(noise) + spread, (found, noise)
    assert len(job.events("switch")) >= 4, "newcomers may come one by one"


FULL_DISK = """
import sys, xgboost
from pathlib import Path
from swell.train.boosting import CHECKPOINT, _rounds_in, _Training

class Link:
    def __init__(self):
        self.saved = []
    def event(self, name, step):
        assert name == "checkpoint"
        self.saved.append(step)

def boosted(rounds):
    rows = [[float(i % 7), float(i % 3)] for i in range(40)]
    data = xgboost.DMatrix(rows, label=[i % 2 for i in range(40)])
    return bytes(xgboost.train({"max_depth": 2}, data, rounds).save_raw("ubj"))

one, disk = _Training({}, None, 1, {}, 0, {}), Path(sys.argv[1])
one._state, one._link = disk / "checkpoints", Link()
one._save(boosted(1))
with (disk / "filling").open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
one._save(boosted(200))
assert one._link.saved == [1] and _rounds_in(one._saved()) == 1, "the checkpoint before it stays"
assert [path.name for path in one._state.iterdir()] == [CHECKPOINT], "and half a file does not"
(disk / "filling").unlink()
one._save(boosted(200))
assert one._link.saved == [1, 200] and _rounds_in(one._saved()) == 200
"""


def test_a_full_disk_costs_one_checkpoint_of_the_model_and_not_the_training(tmp_path: Path) -> None:
    """A real full disk: a tmpfs of 1 MB in a mount namespace of its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount here")
    script, disk = tmp_path / "save.py", tmp_path / "disk"
    script.write_text(FULL_DISK)
    disk.mkdir()
    train = 'mount -t tmpfs -o size=1m tmpfs "$2" && exec "$0" "$1" "$2"'
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", train, sys.executable, str(script), str(disk)],
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "checkpoint of round 200 not saved" in run.stderr and "No space left" in run.stderr


def test_a_saved_model_is_on_the_disk_before_it_takes_the_place_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, (sync, replace) = list[str](), (os.fsync, Path.replace)

    def note_sync(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def note_replace(path: Path, target: Path) -> Path:
        done.append(f"{path.name} -> {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    regular.replace_synced(tmp_path / "model", b"1")
    assert done == [".model", ".model -> model", tmp_path.name]
    assert (tmp_path / "model").read_bytes() == b"1"
