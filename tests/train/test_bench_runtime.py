"""`make bench-runtime`: what its verdicts say, and that a part which hangs or fails does not stop it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.bench import Bench, show
from benchmarks.children import Limited, descendants
from benchmarks.runtime import gpu_large
from benchmarks.runtime.__main__ import SUITE
from benchmarks.runtime.anchors.rows import Change, Row, change
from benchmarks.runtime.parts import PARTS
from benchmarks.runtime.verdicts import ANCHORS, JUDGES, verdicts
from tests.waiting import wait_until


def judged(part: str, figures: Any) -> dict[str, bool | None]:
    return {v.item: v.holds for v in verdicts({part: {"measured": figures}})}


def test_every_part_is_judged_or_is_an_anchor() -> None:
    assert set(PARTS) - {"mesh"} == set(JUDGES) | set(ANCHORS)


def test_a_ratio_over_its_goal_does_not_hold() -> None:
    timeline = [["backward", 0.0, 10.0], ["send", 1.0, 2.0], ["add", 2.0, 3.0]]
    found = judged(
        "links",
        {
            "no limit": {"60M": {"ratio": 1.05, "timeline": timeline}},
            "1gbit": {"10M": {"ratio": 1.07, "timeline": []}},
        },
    )
    assert found == {
        "step over DDP's on two hosts, no limit, 60M": True,
        "step over DDP's on two hosts, 1gbit, 10M": False,
        "pieces summed during backward, two hosts, 60M": True,
    }


def test_sums_after_backward_only_do_not_hold() -> None:
    timeline = [["backward", 0.0, 10.0], ["send", 1.0, 9.0], ["add", 9.5, 10.5]]
    assert False in judged("sizes", {"60M": {"ratio": 0.8, "timeline": timeline}}).values()


def test_a_pause_longer_than_a_normal_step_does_not_hold() -> None:
    figures = {
        "1 newcomers": {"pause_ms": 2300, "normal_step_ms": 2400},
        "2 newcomers": {"pause_ms": 2500, "normal_step_ms": 2400},
        "leave": {"pause_ms": [3.0, 13.0]},
        "death": {"pause_ms": [60.0]},
    }
    assert list(judged("join_across_hosts", figures).values()) == [True, False, False, True]


def test_lost_samples_and_long_standstills_do_not_hold() -> None:
    figures = {
        "a": {"longest_gap_s": 3.0, "steps_of_the_cut_off": 0, "problem": None},
        "b": {"longest_gap_s": 5.5, "steps_of_the_cut_off": 1, "problem": "sample 3 twice"},
        "schedule 0": {"done": [], "problem": None},
    }
    assert list(judged("hosts", figures).values()) == [True, True, True, False, False, False, True]


def test_too_few_schedules_do_not_hold() -> None:
    assert list(judged("exactly_once", {"failed": 0, "schedules": 120}).values()) == [True, False]


def test_a_part_that_failed_does_not_hold_and_one_that_was_skipped_was_not_measured() -> None:
    assert judged("links", {"error": "exit code 1"}) == {"measured": False}
    assert judged("links", {"skipped": "namespaces are not permitted"}) == {"measured": None}
    assert judged("overhead", {"figures": "of another version"}) == {"measured": False}


def test_an_anchor_is_compared_with_our_own_figure() -> None:
    death = {"median_ms": 18.0, "largest_ms": 26.0, "steps_lost_or_repeated": 0}
    frozen = {"detection_s": 2.0, "training_again_after_s": 1.7}
    report = {
        "death": {"measured": {"small": death, "large": death, "frozen": frozen}},
        "torchrun": {"measured": {"death": {"median_s": 2.5, "rounds": 2, "failed": []}}},
        "torchft": {"measured": {"death": {"median_s": 0.01, "rounds": 2, "failed": ["it ended"]}}},
        "ray_train": {"measured": {"skipped": "no index"}},
    }
    found = [v for v in verdicts(report) if v.part in ANCHORS]
    assert [v.holds for v in found] == [True, None, False, None, None]
    assert "1 of 2 rounds failed: it ended" in found[2].found
    assert all(v.holds for v in verdicts(report) if v.part == "death")


def test_the_pause_of_another_system_is_its_longest_gap_and_steps_from_a_checkpoint_are_repeated() -> None:
    before = [
        Row(pid=7, world=3, step=n, at_s=n / 8) for n in range(1, 25)
    ]  # a step in 0.125 s, the last at 3.0
    assert change(before, 3.0, 3, restart=True) is None
    after = [Row(pid=8, world=3, step=21, at_s=7.125), Row(pid=8, world=3, step=22, at_s=7.25)]
    assert change([*before, *after], 3.0, 3, restart=True) == Change(pause_s=4.0, request_s=4.125, repeated=4)
    assert change([*before, Row(pid=7, world=3, step=25, at_s=3.125)], 3.0, 3, restart=True) is None


def finish(process: Limited) -> str | None:
    wait_until(process.over, 60, "the command to end")
    return process.problem()


def test_a_command_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such network')"]
    problem = finish(Limited(command, tmp_path / "log", 60))
    assert problem is not None and "no such network" in problem
    assert finish(Limited([sys.executable, "-c", ""], tmp_path / "log", 60)) is None


def test_a_command_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    """The child is in a session of its own and ignores the request to end."""
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); "
        "subprocess.Popen(['sleep', '1000'], start_new_session=True); signal.pause()"
    )
    process = Limited([sys.executable, "-c", script], tmp_path / "log", 1e6)
    pid = process._process.pid
    wait_until(lambda: len(descendants(pid)) == 1, 60, "its child")
    (child,) = descendants(pid)
    process._until_s = time.monotonic()
    assert process.over()
    problem = process.problem()
    assert problem is not None and "took longer" in problem
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    wait_until(lambda: not running(child), 60, "the end of its child")


def running(pid: int) -> bool:
    """Whether a process still does anything; nobody may have fetched its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_gpu_benchmark_judges_its_figures_and_shows_even_none() -> None:
    modes = {
        mode: {"step_ratio": ratio, "memory_ratio": memory}
        for mode, ratio, memory in (("plain", 1.0, 1.0), ("fixed", 1.0, 1.0), ("adaptive", 1.04, 1.11))
    }
    join = {
        "join_pause_ms": [20.0, 30.0, 200.0],
        "first_step_of_two_s": [0.2, 0.1, 0.1],
        "step_of_two_s": 0.1,
        "request_to_first_step_s": [1.5, 4.5, 5.0],
    }
    found = {row[1]: row[4] for row in gpu_large.verdicts("303M", {"modes": modes, "join": join})}
    assert list(found.values()) == [True, False, False, True, True, False]
    small = {row[1]: row[4] for row in gpu_large.verdicts("85M", {"modes": modes})}
    assert list(small.values()) == [True, False, True], "at 85M the step of adaptive mode has no limit"
    gpu_large.show({"303M": {"error": "RuntimeError: no GPU"}, "85M": {}})


def test_parts_run_in_processes_of_their_own_and_one_without_time_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cheapest part there is: an anchor whose packages are not installed."""
    monkeypatch.setenv("SWELL_ANCHORS", str(tmp_path / "anchors"))
    path = tmp_path / "runtime.json"
    Bench(SUITE, {}, quick=True, minutes=5.0, out=tmp_path).run(["torchft"])
    Bench(SUITE, json.loads(path.read_text()), quick=True, minutes=0.1, out=tmp_path).run(["quality"])
    report = json.loads(path.read_text())
    assert report["torchft"]["measured"]["skipped"].startswith("run `python -m")
    assert "would not end" in report["quality"]["measured"]["skipped"]
    assert {v["part"]: v["holds"] for v in report["verdicts"]} == {"torchft": None, "quality": None}
    show(verdicts(report))
