"""The commands together: help, names, lists, and that they come up fast."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swell.policies.registry import BUILT_IN

Swell = Callable[..., "subprocess.CompletedProcess[str]"]


def test_help_costs_little_more_than_importing_the_library_it_is_made_with() -> None:
    def cpu_s(*words: str) -> float:
        costs = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *words], capture_output=True, timeout=60, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(costs)

    # About 1.3 as it is, 5 with numpy.
    assert cpu_s("-m", "swell", "--help") < 2.5 * cpu_s("-c", "import click")


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ("simulate", ("numpy", "numba", "scipy", "torch", "rich")),
        ("submit", ("numba", "scipy", "torch", "rich", "pydantic", "fastapi")),
    ],
)
def test_help_imports_nothing_heavy(command: str, heavy: tuple[str, ...]) -> None:
    code = (
        "import sys, swell.cli; from click.testing import CliRunner;"
        f"assert CliRunner().invoke(swell.cli.main, ['{command}', '--help']).exit_code == 0;"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["simulate", "report", "generate", "policies", "completion"])
def test_help_ends_with_an_example_that_runs(swell: Swell, command: str) -> None:
    text = swell(command, "--help").stdout
    _, _, example = text.partition("Example:\n")
    lines = [line.strip() for line in example.strip().splitlines()]
    assert lines[-1].startswith(f"swell {command}")
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "swell"
        done = swell(*words)
        assert done.returncode == 0, done.stderr


def test_a_mistyped_command_is_answered_with_the_nearest(swell: Swell) -> None:
    done = swell("simulat")
    assert done.returncode == 2
    assert "No such command 'simulat'. Did you mean 'simulate'?" in done.stderr


def test_policies_are_listed_with_paper_goal_and_options(swell: Swell) -> None:
    done = swell("policies")
    assert done.returncode == 0, done.stderr
    for name in BUILT_IN:
        assert f"│ {name} " in done.stdout
    assert "cannot be loaded" not in done.stdout
    assert "NSDI'21" in done.stdout


def test_policies_as_json_say_what_each_knows(swell: Swell) -> None:
    rows = {row["name"]: row for row in json.loads(swell("policies", "--json").stdout)}
    assert list(rows) == list(BUILT_IN)
    for row in rows.values():
        assert row["goal"] and row["paper"]
        assert row["knows"] in ("nothing", "profiles", "fitted")
    assert {"name": "p", "type": "float", "default": -1.0} in rows["pollux"]["options"]
    assert rows["pollux"]["knows"] == "fitted"


def test_generate_writes_the_same_file_for_the_same_seed(swell: Swell, tmp_path: Path) -> None:
    words = ("generate", "--jobs", 50, "--seed", 5, "--deadlines", 1)
    assert swell(*words, "-o", "jobs.csv").returncode == 0
    text = (tmp_path / "jobs.csv").read_text()
    assert swell(*words).stdout == text
    assert text.count("\n") == 51
    assert swell("generate", "--jobs", 50, "--seed", 6, "--deadlines", 1).stdout != text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--jobs", "0"), "jobs must be at least 1, got 0"),
        (("--hours", "0"), "hours must be more than 0, got 0"),
        (("--hours", "inf"), "hours must be more than 0, got inf"),
        (("--deadlines", "1.5"), "deadlines must be a share between 0 and 1, got 1.5"),
        (("--seed", "-1"), "seed must be at least 0, got -1"),
        (("--start-hour", "25"), "start-hour must be an hour of the day"),
        (("--fill", "half"), "fill must be LOW:HIGH, two numbers of more than 0 and at most 1"),
        (("--fill", "0:0.5"), "fill must be more than 0 and at most 1, got 0"),
        (("--fill", "0.5:1.5"), "fill must be more than 0 and at most 1, got 1.5"),
        (("--fill", "0.5:0.2"), "fill must be at least its lower bound 0.5, got 0.2"),
        (("--gpu-type", "T40"), "T40"),
        (("-o", "no/where.csv"), "no/where.csv: cannot be written"),
        (("--profiles", "nowhere"), "'nowhere' do not exist"),
    ],
)
def test_generate_refuses_nonsense_in_one_line(swell: Swell, words: tuple[str, ...], expected: str) -> None:
    done = swell("generate", *words)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_shell_completes_commands_and_options() -> None:
    def complete(words: str) -> list[str]:
        env = os.environ | {"_SWELL_COMPLETE": "bash_complete", "COMP_WORDS": words}
        env["COMP_CWORD"] = str(len(words.split()) - 1)
        code = "from swell.cli import main; main(prog_name='swell')"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=True
        )
        return done.stdout.split()

    assert complete("swell sub") == ["plain,submit"]
    assert "plain,--deadline" in complete("swell submit --dead")
