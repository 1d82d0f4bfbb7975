"""The suite itself: every test that is collected runs, in one process and in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]

PLAIN = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_number(number):
    assert number < 5

@pytest.mark.skip(reason="a skipped test counts as executed")
def test_skipped():
    raise AssertionError
"""

# Three tests under one node id: pytest makes the id of a function from its original name.
COLLAPSING = """
import pytest

def pytest_pycollect_makeitem(collector, name, obj):
    if name == "test_operation":
        return [
            pytest.Function.from_parent(collector, name=f"{name}[{i}]", callobj=obj, originalname=name)
            for i in range(3)
        ]
"""

LOSING = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    return True if item.name == "test_lost" else None
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a folder with nothing of this project but the plugin under test."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "xdist.plugin",
            "-p",
            "tests.completeness",
            *options,
            str(folder),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadscope")], ids=["one-process", "parallel"])
def test_a_session_that_executes_all_it_collected_passes(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_plain.py").write_text(PLAIN)
    done = run(tmp_path, *options)
    assert done.returncode == 0, done.stdout
    assert "5 passed, 1 skipped" in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadscope")], ids=["one-process", "parallel"])
def test_tests_that_share_a_node_id_fail_the_session(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text(COLLAPSING)
    (tmp_path / "test_operations.py").write_text("def test_operation():\n    pass\n")
    done = run(tmp_path, *options)
    assert done.returncode == 1, done.stdout
    assert "3 tests share the node id test_operations.py::test_operation" in done.stdout
    if options:
        assert "collected 3, executed 1" in done.stdout, "if xdist kept them, nobody needs this"


def test_a_collected_test_that_never_runs_fails_the_session(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(LOSING)
    (tmp_path / "test_two.py").write_text("def test_kept():\n    pass\n\ndef test_lost():\n    pass\n")
    done = run(tmp_path)
    assert done.returncode == 1, done.stdout
    assert "test_two.py::test_lost: collected 1, executed 0" in done.stdout


def test_stopping_at_the_first_failure_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_a():\n    assert False\n\ndef test_b():\n    pass\n")
    done = run(tmp_path, "-x")
    assert done.returncode == 1
    assert "not every collected test" not in done.stdout


def test_waiting_returns_what_it_waited_for_and_says_what_never_came() -> None:
    answers = iter([0, 0, 7])
    assert wait_until(lambda: next(answers), 30, "the third answer", poll_s=0.0) == 7
    with pytest.raises(AssertionError, match=r"waited 0\.01 s for nothing at all"):
        wait_until(lambda: False, 0.01, lambda: "nothing at all", poll_s=0.001)


def test_ci_runs_the_suite_on_the_bare_machine_before_it_installs_anything() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
    suite = lines.index("make test")
    installs = [n for n, line in enumerate(lines) if "apt-get" in line or "pip install" in line]
    assert installs and suite < min(installs) < lines.index("make test-browser")
    assert not any("make setup" in line for line in lines)  # `make test` sets everything up by itself
