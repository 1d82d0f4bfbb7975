"""The local engine with real processes: starting, resizing, ends of every kind, and adoption."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.domain import InputError
from swell.engines import RunState
from swell.engines.local import LocalSite
from swell.engines.processes import workers_of
from swell.engines.supervisor import is_locked, supervisor_of

from .conftest import Bench


def _workers(bench: Bench, job_id: str) -> set[int]:
    return set(workers_of(bench.home / "jobs" / job_id))


def test_a_job_runs_is_resized_and_leaves_nothing_behind(bench: Bench) -> None:
    engine = bench.engine()
    launch = bench.launch("a", "--epochs", 20, "--sample-ms", 3)
    engine.apply(launch, (0,))
    bench.wait(engine, "a", lambda o: o and o.state is RunState.RUNNING)
    for placement in [(0, 1), (0, 1, 2, 3), (3,), (0, 1, 2)]:
        engine.apply(launch, placement)
    bench.wait_for(lambda: " of 3" in bench.output("a"))
    assert " of 4" not in bench.output("a"), "of a burst of wishes only the newest counts"
    engine.apply(launch, (2,))

    def of_one_worker() -> list[dict[str, Any]]:
        timings = [r.data for r in bench.reports if r.kind == "timing" and r.data["workers"] == 1]
        return [timing for timing in timings if timing["local_batch"] == 32]

    bench.wait(engine, "a", lambda _: of_one_worker())
    assert of_one_worker()[-1]["step_s"] > 0.09, "32 samples of 3 ms"
    bench.hurry()
    seen = bench.wait(engine, "a", lambda o: o and o.state is RunState.FINISHED)
    assert seen is not None and seen.exit_code == 0
    assert bench.steps("a") == list(range(1, 321))
    assert "final loss" in bench.output("a")
    assert [r for r in bench.reports if r.kind == "resized"]
    last = [r.data for r in bench.reports if r.kind == "progress"][-1]
    assert last["of"] == 320 and 0 < last["done"] <= 320
    bench.wait_for(lambda: not bench.processes("a"), 30)
    engine.end("a")
    bench.wait(engine, "a", lambda o: o is None)


def test_jobs_that_swap_all_of_their_slots_get_them_and_neither_stops(bench: Bench) -> None:
    engine = bench.engine()
    first = {"a": (0, 1), "b": (2, 3)}
    launches = {name: bench.launch(name, "--epochs", 100, "--sample-ms", 1) for name in first}

    def reached(wishes: dict[str, tuple[int, ...]]) -> bool:
        seen = engine.observe()
        return all(
            name in seen and seen[name].placement == slots and seen[name].state is RunState.RUNNING
            for name, slots in wishes.items()
        )

    for wishes in (first, {"a": (2, 3), "b": (0, 1)}):
        for name, slots in wishes.items():
            engine.apply(launches[name], slots)
        bench.wait_for(lambda wishes=wishes: reached(wishes))
    assert {len(list((bench.home / "jobs" / name / "runs").iterdir())) for name in first} == {1}


def test_stopped_jobs_save_their_state_and_go_on_from_it(bench: Bench) -> None:
    engine = bench.engine()
    launch = bench.launch("a", "--epochs", 20, "--sample-ms", 3, checkpoint_s=1000.0)
    engine.apply(launch, (0, 1))
    bench.wait_for(lambda: len(bench.steps("a")) >= 10)
    engine.apply(launch, ())
    bench.wait(engine, "a", lambda o: o and o.state is RunState.STOPPED)
    assert not bench.processes("a")
    engine.apply(launch, (3,))
    bench.wait_for(lambda: len(bench.steps("a")) >= 25)
    engine.apply(launch, ())
    bench.wait(engine, "a", lambda o: o and o.state in (RunState.STOPPING, RunState.STOPPED))
    engine.apply(launch, (0, 1, 2))  # wanted again while it leaves: it comes back
    bench.hurry()
    bench.wait(engine, "a", lambda o: o and o.state is RunState.FINISHED)
    assert bench.steps("a") == list(range(1, 321)), "no step was lost or done twice"


def test_whatever_of_a_job_is_killed_it_goes_on(bench: Bench) -> None:
    engine = bench.engine()
    directory = bench.home / "jobs" / "a"
    launch = bench.launch("a", "--epochs", 30, "--sample-ms", 3, checkpoint_s=0.3)
    engine.apply(launch, (0, 1))
    bench.wait_for(lambda: len(bench.steps("a")) >= 5)

    # The coordinator: training does not notice, and the next one takes wishes.
    run = sorted((directory / "runs").iterdir())[-1]
    os.kill(json.loads((run / "coordinator.json").read_text())["pid"], signal.SIGKILL)
    engine.apply(launch, (0, 1, 2))
    bench.wait_for(lambda: " of 3" in bench.output("a"))
    steps = bench.steps("a")
    assert steps == list(range(1, len(steps) + 1))

    # Every worker: the job's own processes begin again from the checkpoint.
    bench.wait_for(lambda: len(bench.steps("a")) > len(steps) + 30)
    for pid in _workers(bench, "a"):
        os.kill(pid, signal.SIGKILL)
    killed_at = len(bench.steps("a"))
    bench.wait_for(lambda: len(bench.steps("a")) > killed_at + 20)
    assert bench.steps("a")[killed_at + 1] > 1

    # The supervisor: its workers go with it, and whoever wants the job to run says so again.
    os.kill(supervisor_of(directory) or -1, signal.SIGKILL)
    bench.wait(engine, "a", lambda o: o is None)
    bench.wait_for(lambda: not bench.processes("a"), 30)
    killed_at = len(bench.steps("a"))
    bench.hurry()
    engine.apply(launch, (0, 1, 2))
    bench.wait(engine, "a", lambda o: o and o.state is RunState.FINISHED)
    again = bench.steps("a")[killed_at:]
    assert again[0] > 1, "it began from a checkpoint, not from nothing"
    assert again == list(range(again[0], 481))


def test_the_reason_of_a_failure_is_kept(bench: Bench) -> None:
    engine = bench.engine()
    engine.apply(bench.launch("a", "--fail-at", 3), (0, 1))
    seen = bench.wait(engine, "a", lambda o: o and o.state is RunState.FAILED)
    assert seen is not None and seen.exit_code == 1
    assert seen.reason.startswith("RuntimeError: the toy broke (toy.py, line ")
    assert "Traceback" in bench.output("a")
    bench.wait_for(lambda: not bench.processes("a"), 30)


def test_a_worker_beyond_its_memory_ends_the_job_with_that_reason(bench: Bench) -> None:
    engine = bench.engine()
    launch = bench.launch("a", "--epochs", 50, "--hoard-mb", 700, "--sample-ms", 3, memory_bytes=600 << 20)
    engine.apply(launch, (0,))
    seen = bench.wait(engine, "a", lambda o: o and o.state is RunState.FAILED)
    assert seen is not None and seen.exit_code == 137
    assert "limit is 600 MiB" in seen.reason
    bench.wait_for(lambda: not bench.processes("a"), 30)


def test_jobs_live_on_without_their_engine_and_are_adopted(bench: Bench) -> None:
    engine = bench.engine()
    launch = bench.launch("a", "--epochs", 20, "--sample-ms", 3)
    engine.apply(launch, (1, 2))
    bench.wait(engine, "a", lambda o: o and o.state is RunState.RUNNING)
    engine.close()
    before = len(bench.steps("a"))
    bench.wait_for(lambda: len(bench.steps("a")) > before + 5)
    adopted = bench.engine()
    assert adopted.observe()["a"].target == (1, 2)
    bench.wait(adopted, "a", lambda o: o and o.placement == (1, 2))
    adopted.apply(launch, (1, 2, 3))
    bench.wait_for(lambda: " of 3" in bench.output("a"))
    adopted.apply(launch, (0, 2))  # one leaves, one moves, one stays
    bench.wait(adopted, "a", lambda o: o and o.placement == (0, 2))
    bench.hurry()
    bench.wait(adopted, "a", lambda o: o and o.state is RunState.FINISHED)
    assert bench.steps("a") == list(range(1, 321))


def test_a_job_that_ended_while_nobody_watched_is_found_with_its_exit(bench: Bench) -> None:
    engine = bench.engine()
    engine.apply(bench.launch("a", "--epochs", 1), (0, 1))
    bench.wait_for(lambda: is_locked(bench.home / "jobs" / "a"))
    engine.close()
    bench.wait_for(lambda: not is_locked(bench.home / "jobs" / "a"))
    seen = bench.engine().observe()["a"]
    assert (seen.state, seen.exit_code) == (RunState.FINISHED, 0)


LOGS_AND_ENDS = """
import torch, swell
from torch.utils.data import TensorDataset

model = torch.nn.Linear(1, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = job.loader(TensorDataset(torch.ones(64, 1)), batch_size=32)
for epoch in job.epochs(2):
    for (x,) in loader:
        job.step(model(x).mean())
    job.log(accuracy=epoch / 10)
job.log(final=0.75)
ENDING
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "raise RuntimeError('after all')"])
def test_what_a_script_logged_before_it_ended_is_reported_before_its_end(bench: Bench, ending: str) -> None:
    (bench.home / "ends.py").write_text(LOGS_AND_ENDS.replace("ENDING", ending))
    engine = bench.engine()
    engine.apply(bench.launch("a", script="ends.py"), (0, 1))
    seen = bench.wait(engine, "a", lambda o: o and o.state in (RunState.FINISHED, RunState.FAILED))
    assert seen is not None and seen.state is (RunState.FAILED if ending else RunState.FINISHED)
    bench.reports.extend(engine.reports())
    last = [report.data for report in bench.reports if report.kind == "progress"][-1]
    assert (last["done"], last["epoch"]) == (4, 2)
    assert last["metrics"] == {"accuracy": 0.1, "final": 0.75}


def test_what_a_script_logged_while_nobody_watched_is_reported_later_and_once(bench: Bench) -> None:
    (bench.home / "ends.py").write_text(LOGS_AND_ENDS.replace("ENDING", ""))
    engine = bench.engine()
    engine.apply(bench.launch("a", script="ends.py"), (0,))
    bench.wait_for(lambda: is_locked(bench.home / "jobs" / "a"))
    engine.close()
    bench.reports.clear()
    bench.wait_for(lambda: not is_locked(bench.home / "jobs" / "a"))
    again = bench.engine()
    assert again.observe()["a"].state is RunState.FINISHED
    (last,) = [report.data for report in again.reports() if report.kind == "progress"]
    assert last["metrics"] == {"accuracy": 0.1, "final": 0.75}


def test_what_a_program_prints_last_is_reported_before_its_end(bench: Bench) -> None:
    program = bench.home / "program.sh"
    program.write_text("#!/bin/sh\necho swell: progress=3 of=3 loss=0.5\nprintf 'swell: accuracy=0.9'\n")
    program.chmod(0o755)
    engine = bench.engine()
    engine.apply(bench.launch("a", script="program.sh", command=True), (0,))
    bench.wait(engine, "a", lambda o: o and o.state is RunState.FINISHED)
    bench.reports.extend(engine.reports())
    last = [report.data for report in bench.reports if report.kind == "progress"][-1]
    assert (last["done"], last["loss"], last["metrics"]) == (3, 0.5, {"accuracy": 0.9})


def test_two_engines_cannot_run_one_job_twice(bench: Bench) -> None:
    first, second = bench.engine(), bench.engine()
    launch = bench.launch("a", "--epochs", 6, "--sample-ms", 1.5)
    first.apply(launch, (0,))
    second.apply(launch, (0,))
    bench.wait(first, "a", lambda o: o and o.state is RunState.RUNNING)
    # Only one of the engines has a supervisor, or none has and the other one's is found.
    jobs = [engine._jobs["a"] for engine in (first, second)]
    bench.wait_for(lambda: all(job.state.up for job in jobs) and sum(job.starting for job in jobs) == 1)
    runs = list((bench.home / "jobs" / "a" / "runs").iterdir())
    assert len(runs) == 1
    bench.hurry()
    bench.wait(first, "a", lambda o: o and o.state is RunState.FINISHED)
    assert bench.steps("a") == list(range(1, 97))


def test_an_ended_job_is_gone_with_all_its_processes(bench: Bench) -> None:
    engine = bench.engine()
    engine.apply(bench.launch("a", "--epochs", 100, "--sample-ms", 3), (0, 1))
    bench.wait(engine, "a", lambda o: o and o.state is RunState.RUNNING)
    engine.end("a")
    assert "a" not in engine.observe()
    bench.wait_for(lambda: not bench.processes("a"), 30)
    bench.wait_for(lambda: not (bench.home / "orders" / "a" / "start.json").exists(), 30)


def test_a_job_ended_before_its_supervisor_is_up_never_runs(bench: Bench) -> None:
    engine = bench.engine()
    engine.apply(bench.launch("a"), (0,))
    engine.end("a")
    bench.wait_for(lambda: not engine._jobs)  # from here on nobody would start it
    assert not (bench.home / "orders" / "a" / "start.json").exists()
    assert not bench.processes("a") and not bench.steps("a")


def test_slots_change_hands_only_when_they_are_free(bench: Bench) -> None:
    engine = bench.engine(slots=2)
    first = bench.launch("a", "--epochs", 6, "--sample-ms", 1.5)
    second = bench.launch("b", "--epochs", 3, "--sample-ms", 1.5)
    engine.apply(first, (0, 1))
    bench.wait(engine, "a", lambda o: o and o.state is RunState.RUNNING)
    engine.apply(first, (0,))
    engine.apply(second, (1,))
    most: set[int] = set()

    def finished() -> bool:
        most.add(len(_workers(bench, "a")) + len(_workers(bench, "b")))
        seen = engine.observe()
        return all(name in seen and seen[name].state is RunState.FINISHED for name in ("a", "b"))

    wait_until(finished, 120, "the end of both", poll_s=0.1)
    assert max(most) == 2


def test_a_slot_is_free_soon_even_if_the_leaver_does_not_end_by_itself(bench: Bench) -> None:
    engine = bench.engine(slots=2)
    launch = bench.launch("a", "--epochs", 40, "--sample-ms", 1.5, "--linger")
    engine.apply(launch, (0, 1))
    bench.wait(engine, "a", lambda o: o and len(o.placement) == 2 and o.state is RunState.RUNNING)
    bench.wait_for(lambda: " of 2" in bench.output("a"))
    engine.apply(launch, (0,))
    bench.wait(engine, "a", lambda o: o and o.placement == (0,))
    assert "lingers" in bench.output("a"), "its script was told that it leaves"
    bench.hurry()
    bench.wait(engine, "a", lambda o: o and o.state is RunState.FINISHED)
    assert bench.steps("a") == list(range(1, 641)), "no step was lost or done twice"
    assert not [r for r in bench.reports if r.kind == "worker_lost"], "it was sent away"


def test_every_worker_has_a_gpu_of_its_own_where_there_are_some(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swell.engines.local.detect_gpus", lambda: 4)
    engine = bench.engine(slots=None)  # type: ignore[arg-type]
    assert engine.cluster().capacity == 4
    for name, slots in (("a", (0, 2)), ("b", (1, 3))):
        engine.apply(bench.launch(name, "--epochs", 4, "--sample-ms", 3), slots)
    bench.wait_for(lambda: all(" of 2" in bench.output(name) for name in ("a", "b")))
    devices = {
        name: {
            line.split("device ")[1].split()[0]
            for line in bench.output(name).splitlines()
            if "device " in line
        }
        for name in ("a", "b")
    }
    assert devices == {"a": {"0", "2"}, "b": {"1", "3"}}, "the GPUs of its slots"


def test_workers_may_share_gpus_and_are_told_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swell.engines.local.detect_gpus", lambda: 2)
    engine = bench.engine(slots=None, per_gpu=2)  # type: ignore[arg-type]
    assert engine.cluster().capacity == 4
    launch = bench.launch("a", "--epochs", 4, "--sample-ms", 3)
    engine.apply(launch, (0, 1, 2))
    bench.wait_for(lambda: " of 3" in bench.output("a"))
    lines = [line.split() for line in bench.output("a").splitlines() if "device " in line]
    found = [(words[words.index("device") + 1], words[words.index("per_gpu") + 1]) for words in lines]
    assert sorted(found) == [("0", "2"), ("0", "2"), ("1", "2")], "both GPUs before one is shared"


def test_nodes_and_slots_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not both"):
        LocalSite(tmp_path, nodes="2x2", slots=4)
    with pytest.raises(InputError, match="at least 1"):
        LocalSite(tmp_path, slots=0)
    with pytest.raises(InputError, match="got 2, must be 1, because this machine has no GPU"):
        LocalSite(tmp_path, per_gpu=2)
    cluster = LocalSite(tmp_path, nodes="2x2").cluster()
    assert [(n.gpus, n.up) for n in cluster.nodes] == [(2, True), (2, True)]
