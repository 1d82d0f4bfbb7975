"""Consistent mode: the same bits on any number of workers, through resizes and deaths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "runtime" / "identity_script.py"


def run(stage: Any, folder: Path, *arguments: str, **config: Any) -> Any:
    folder.mkdir()
    job = stage.run(SCRIPT, "--epochs", "3", "--out", str(folder), *arguments, **config)
    job.folder = folder
    return job


def digest(job: Any) -> str:
    assert job.wait() == 0, job.output()
    found: str = json.loads((job.folder / "result.json").read_text())["hash"]
    return found


@pytest.fixture(scope="module")
def reference(_stage: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest(run(_stage, tmp_path_factory.mktemp("reference") / "out", workers=1))


@pytest.mark.parametrize(("workers", "loader_workers"), [(2, 0), (3, 0), (4, 0), (2, 2)])
def test_any_number_of_workers_gives_the_same_bits(
    stage: Any, tmp_path: Path, reference: str, workers: int, loader_workers: int
) -> None:
    job = run(stage, tmp_path / "out", "--loader-workers", str(loader_workers), workers=workers)
    assert digest(job) == reference


def test_resizes_in_mid_epoch_change_no_bit(stage: Any, tmp_path: Path, reference: str) -> None:
    job = run(stage, tmp_path / "out", "--pace", "0.05", workers=4)
    job.members(4)
    for count in (2, 1, 3):
        job.resize(count)
        job.members(count)
    assert digest(job) == reference
    assert [len(e["members"]) for e in job.events("generation")][-4:] == [4, 2, 1, 3]


def test_kills_change_no_bit(stage: Any, tmp_path: Path, reference: str) -> None:
    job = run(stage, tmp_path / "out", "--pace", "0.05", workers=3)
    for victim in (1, 0):
        status = job.members(3)
        job.wait_for(lambda s, step=status["step"]: s["step"] > step + 1)
        job.kill(victim)
        job.wait_for(lambda s, old=status: s["generation"] > old["generation"])
    assert digest(job) == reference
    assert len(job.events("recovery")) >= 2


def test_newcomers_on_other_hosts_become_level_and_change_no_bit(
    stage: Any, tmp_path: Path, reference: str
) -> None:
    apart = {"shared_memory": False}  # as workers on several hosts are
    job = run(stage, tmp_path / "out", "--pace", "0.1", workers=2, settings=apart)
    job.members(2)
    job.resize(4)
    job.members(4)
    assert digest(job) == reference
    grown = [e for e in job.events("switch") if e["world"] == 4]
    assert [e["level"] for e in grown] == [2]
