"""What scripts/journeys.py counts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "journeys.py"


@pytest.fixture(scope="module")
def journeys() -> Any:
    spec = importlib.util.spec_from_file_location("journeys", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["journeys"] = module
    spec.loader.exec_module(module)
    return module


def test_a_file_counts_if_a_function_is_called_in_time_that_an_idle_process_does_not_call(
    journeys: Any,
) -> None:
    names = ["a.py:loop", "b.py:open", "c.py:read", "message:Resize", "d.py:later"]
    rows = [
        (ns * 10**9, 1, *rest) for ns, *rest in ((1, 0, 0, -1), (5, 0, 0, -1), (6, 0, 2, 1), (7, 2, 3, 2))
    ]
    rows += [(8 * 10**9, 1, 0, 1, 0), (8 * 10**9 + 1, 1, 0, 2, 2), (20 * 10**9, 1, 0, 4, 1)]
    process = journeys.Process(7, names, "worker", np.array(rows, dtype=journeys.RECORD))
    journey = journeys._between("resize", [process], 4 * 10**9, 10 * 10**9)
    assert journey.files == ["c.py", "b.py"], (
        "in the order of first entry, without the loop and what came later"
    )
    assert journey.files_with_idle == 3
    assert journey.jumps == 2, "the call within c.py is none"
    assert (journey.messages, journey.processes) == (["Resize"], {"worker": 2})


def test_every_journey_is_stated_and_more_files_than_stated_fail(journeys: Any, capsys: Any) -> None:
    stated = journeys.stated()
    assert set(stated) == set(journeys.WANTED)
    some = [journeys.Journey("step", [f"{n}.py" for n in range(stated["step"])], 0, 0, 0, {}, [])]
    assert journeys.verify(some) == 0
    some[0].files.append("more.py")
    assert journeys.verify(some) == 1
    assert (
        f"step: {stated['step'] + 1} files, architecture.md states {stated['step']}"
        in capsys.readouterr().out
    )


def test_what_is_taken_for_a_message_exists(journeys: Any) -> None:
    for sender, argument in journeys.SENDERS.items():
        file, _, name = sender.partition(":")
        text = (ROOT / "src" / "swell" / file).read_text()
        _, found, rest = text.partition(f"def {name.rpartition('.')[2]}(")
        assert found and f"{argument}:" in rest.partition(":\n")[0], sender


@pytest.mark.long
def test_real_runs_are_traced_through_all_their_processes() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "resize", "step", "--json"],
        capture_output=True,
        timeout=280,
        check=True,
    )
    resize, step = json.loads(done.stdout)
    assert {"swell resize", "coordinator", "zygote", "w0", "w1"} <= set(resize["processes"])
    assert resize["files"][0] == "cli/__init__.py"
    assert {"Resize", "Spawn", "NextGeneration", "Switched"} <= set(resize["messages"])
    assert step["files"][0] == "train/job.py"
    assert step["messages"] == ["exchange READY", "exchange VOTE"]
