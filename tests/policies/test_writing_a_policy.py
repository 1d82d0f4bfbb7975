"""The policy in docs/writing-a-policy.md, taken out of the page and plugged in as a reader would."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swell.domain import InputError
from swell.policies import make_policy, policy_names

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-policy.md"


def block(language: str) -> str:
    """The page's code block in that language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def install(folder: Path) -> None:
    """What `pip install` leaves behind: the module, and metadata with the entry points."""
    import tomllib

    project = tomllib.loads(block("toml"))["project"]
    (group,) = project["entry-points"]
    (folder / "hesrpt.py").write_text(block("python"))
    info = folder / "swell_hesrpt-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n")
    points = "".join(f"{name} = {target}\n" for name, target in project["entry-points"][group].items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("hesrpt", None)


def test_the_page_keeps_its_word_on_the_length() -> None:
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 40


def test_the_policy_is_found_by_its_entry_point(installed: Path, make_snapshot: Any) -> None:
    assert "hesrpt" in policy_names()
    snapshot = make_snapshot(2, cluster="4x4", left=[100.0, 10.0])
    # Of 16 GPUs the longer of two jobs has (1/2) ** (1 / (1 - p)): a quarter for p = 1/2, half for p = 0.
    assert make_policy("hesrpt").allocate(snapshot).gpus.tolist() == [4, 12]
    assert make_policy("hesrpt:p=0").allocate(snapshot).gpus.tolist() == [8, 8]
    with pytest.raises(InputError, match="p must be"):
        make_policy("hesrpt:p=1")


def test_the_policy_runs_from_the_command_line(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    commands = [line for line in block("sh").splitlines() if line.startswith("swell ")]
    assert len(commands) == 3
    for command in commands:
        words = command.split()[1:]
        if words[0] == "simulate":
            words += ["--json", "figures.json"]
        done = subprocess.run(
            [sys.executable, "-c", "from swell.cli import main; main()", *words],
            cwd=installed,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        if words == ["policies"]:
            assert "hesrpt" in done.stdout
    ours, theirs = json.loads((installed / "figures.json").read_text())
    assert ours["policy"].startswith("hesrpt")
    assert ours["finished"] == ours["jobs"] == theirs["jobs"] == 100
    assert np.isfinite(ours["avg_jct_s"])
