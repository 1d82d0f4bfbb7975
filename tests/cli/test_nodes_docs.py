"""The commands of cloud.md and of gpus.md on types, and their options, in this process."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swell.cli import main

DOCS = Path(__file__).parents[2] / "docs" / "guides"


def swell(command: str) -> str:
    done = CliRunner().invoke(main, shlex.split(command), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def figures(command: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(swell(f"{command} --json -"))
    return found[0]


@pytest.mark.parametrize("page", ["cloud.md", "gpus.md"])
def test_the_commands_of_the_page_work(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    if page == "gpus.md":
        text = text.partition("\n## Different types of GPU")[2].partition("\n## ")[0]
    lines = [line[4:] for line in text.splitlines() if line.startswith("    swell ")]
    generate, *runs = lines
    swell(generate.removeprefix("swell "))
    first, second = (figures(run.removeprefix("swell ")) for run in runs)
    assert first["finished"] == second["finished"] == first["jobs"]
    if page == "cloud.md":
        assert first["cost"] == pytest.approx(3 * first["node_hours"])
        assert second["autoscale"] == "price=1,start=120,spot=6,worth=20"
    else:
        assert first["cost"] is None
        assert first["avg_jct_s"] < second["avg_jct_s"]  # the second is blind to types


def test_an_unknown_option_of_the_autoscaler_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main,
        ["simulate", str(tmp_path / "no.csv"), "--cluster", "2x4", "--policy", "tide", "--autoscale", "x=1"],
    )
    assert done.exit_code == 2
    assert "autoscale: unknown option 'x=1'" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--autoscale 0:3x1", "--autoscale needs --engine ray"),
        ("--engine ray --provider local", "--provider needs --autoscale"),
        ("--engine ray --autoscale 3 --provider local", "must begin with MIN:MAXxSLOTS"),
        ("--engine ray --autoscale 0:3x1", "--provider ray needs the --address"),
        ("--engine ray --address auto --autoscale 0:3x1 --spares", "--spares cannot be used"),
        ("--engine ray --address ray://a:1 --autoscale 0:3x1 --provider local", "a Ray on this machine"),
    ],
)
def test_what_cannot_be_rented_is_refused_before_anything_starts(
    words: str, said: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["up", "--home", str(tmp_path / "home"), *shlex.split(words)])
    assert done.exit_code == 2 and said in done.output
    assert not (tmp_path / "home").exists()
