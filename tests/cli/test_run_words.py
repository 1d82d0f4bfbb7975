"""What `swell run` and `swell resize` say when something is not as meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from swell.cli import main
from swell.cli.submit import misplaced
from swell.train.agent.jobdir import JobDirectory


def test_options_after_the_script_go_to_the_script_and_that_is_said(tmp_path: Path) -> None:
    missing = str(tmp_path / "train.py")
    done = CliRunner().invoke(main, ["run", "--auto", missing, "--workers=2", "--epochs", "3"])
    assert done.exit_code, "there is no such script"
    assert (
        done.output.count("--workers stands after") == 1 and "put options of swell before it" in done.output
    )
    assert "--epochs" not in done.output, "that is the script's own"
    assert misplaced(["--lr", "1"], ["--workers"]) == []


@pytest.mark.parametrize(
    ("ended", "expected"),
    [(True, "is over: training is over"), (False, "does not answer; it is starting, or was killed")],
)
def test_a_job_that_does_not_run_says_so_when_it_is_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool, expected: str
) -> None:
    monkeypatch.setenv("SWELL_HOME", str(tmp_path))
    job = JobDirectory.create(tmp_path / "jobs" / "digits", {"launch": "1"})
    if ended:
        job.append_event({"event": "finish", "reason": "training is over"})
    done = CliRunner().invoke(main, ["resize", "digits", "2"])
    assert done.exit_code == 1 and expected in done.output
    assert "swell run --name digits" in done.output and "Errno" not in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["resize", "digits"],
            "--min, --max or --no-max for a submitted job, or WORKERS for a job of `swell run`",
        ),
        (["resize", "digits", "3", "--max", "4"], "not both"),
        (["resize", "digits", "3"], "bound a submitted job with --min and --max"),
        (["resize", "digits", "--max", "2", "--no-max"], "either --max or --no-max"),
    ],
)
def test_a_resize_that_is_not_clear_is_told_what_to_give(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWELL_HOME", str(tmp_path))
    done = CliRunner().invoke(main, words)
    assert done.exit_code in (1, 2) and said in done.output


def test_the_former_name_of_resize_still_works_and_no_help_shows_it() -> None:
    former, now = (CliRunner().invoke(main, [name, "--help"]) for name in ("scale", "resize"))
    assert former.exit_code == 0 and former.output.partition("\n")[2] == now.output.partition("\n")[2]
    assert "  scale " not in CliRunner().invoke(main, ["--help"]).output
