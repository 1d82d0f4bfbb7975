"""`swell run` end to end: grow, shrink, die, freeze, fail, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.train.scripts import LEAVING, LINEAR
from tests.waiting import wait_until

from swell.cli import main
from swell.train.agent.errors import TrainError

TRAINED = "weights [1.0, 2.0, 3.0, 4.0]"


def test_a_job_grows_and_shrinks_without_losing_a_step(stage: Any) -> None:
    job = stage.run(LINEAR, "40", "0.005", workers=1)
    job.members(1)
    job.resize(3)
    job.members(3)
    job.resize(2)
    job.members(2)
    assert job.wait() == 0
    assert TRAINED in job.output() and "steps 400" in job.output()
    assert [len(e["members"]) for e in job.events("generation")] == [1, 3, 2]
    job.leaves_nothing()


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling classes of Linux")
def test_whoever_leaves_takes_no_processor_from_those_who_go_on(stage: Any, tmp_path: Path) -> None:
    job = stage.run(LEAVING, str(tmp_path), workers=2)
    first, second = job.members(2)["members"]
    job.resize(1)
    job.members(1)
    left = tmp_path / second
    wait_until(lambda: left.exists() and left.read_text(), 60, "the last words of the worker that leaves")
    assert job.wait() == 0
    (switch,) = job.events("switch")
    assert (tmp_path / first).read_text() == "busy 300"
    assert left.read_text() == f"idle {switch['step'] - 1}", "its last update serves nobody"


def test_a_burst_of_resizes_ends_at_the_last_one(stage: Any) -> None:
    job = stage.run(LINEAR, "60", "0.005", workers=1)
    job.members(1)
    for count in (4, 2, 3, 4, 2):
        job.resize(count)
    job.members(2)
    assert job.wait() == 0
    assert "steps 600" in job.output()
    sizes = [len(e["members"]) for e in job.events("generation")]
    assert sizes[-1] == 2 and len(sizes) <= 3, "most of the burst never became a generation"


def test_a_newcomer_that_is_sent_away_at_once_breaks_nothing(stage: Any) -> None:
    job = stage.run(LINEAR, "100", "0.005", workers=1, spares=2)
    job.members(1)
    for _ in range(5):
        job.resize(3)
        job.members(3)
        job.resize(1)
        job.members(1)
    assert job.wait() == 0
    assert "steps 1000" in job.output()
    assert job.events("recovery") == []


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_kill_go_on_at_once_and_the_dead_is_replaced(stage: Any, victim: int) -> None:
    job = stage.run(LINEAR, "60", "0.005", workers=3)
    job.members(3)
    dead = job.kill(victim)
    status = job.wait_for(lambda s: len(s["members"]) == 3 and dead not in s["members"])
    assert status["generation"] >= 3
    assert job.wait() == 0
    assert TRAINED in job.output() and "steps 600" in job.output()
    recoveries = [e["pause_s"] for e in job.events("recovery")]
    assert len(recoveries) == 1 and recoveries[0] < 4.0, "as long as for one that is silent"
    job.leaves_nothing()


def test_a_frozen_worker_is_given_up_and_cannot_come_back(
    stage: Any, eventually: Callable[..., None]
) -> None:
    job = stage.run(LINEAR, "120", "0.005", workers=2, silent_after_s=0.7, settings={"kill_silent": False})
    status = job.members(2)
    frozen = job.kill(1, signal.SIGSTOP)
    pid = status["pids"][frozen]
    job.wait_for(lambda s: frozen not in s["members"] and len(s["members"]) == 2, 60)
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: any(e["worker"] == frozen and e["code"] == 76 for e in job.events("exited")))
    assert job.wait() == 0
    assert TRAINED in job.output() and "steps 1200" in job.output()


def test_members_that_share_no_memory_train_grow_and_recover_over_sockets(stage: Any) -> None:
    job = stage.run(LINEAR, "60", "0.005", workers=2, settings={"shared_memory": False})
    job.members(2)
    job.resize(3)
    dead = job.members(3) and job.kill(0)
    job.wait_for(lambda s: dead not in s["members"] and len(s["members"]) == 3)
    assert job.wait() == 0
    assert TRAINED in job.output() and "steps 600" in job.output()


def test_training_goes_on_while_the_coordinator_is_killed_again_and_again(stage: Any) -> None:
    job = stage.run(LINEAR, "60", "0.005", workers=2)
    job.members(2)
    for _ in range(3):
        job.kill_coordinator()
        job.wait_for(lambda s: True)
    job.resize(3)
    job.members(3)
    assert job.wait() == 0
    assert TRAINED in job.output() and "steps 600" in job.output()
    assert len([e for e in job.events("coordinator") if e["restarted"]]) == 3


def test_a_worker_that_dies_while_the_coordinator_is_dead_too(stage: Any) -> None:
    job = stage.run(LINEAR, "60", "0.005", workers=3)
    job.members(3)
    job.kill_coordinator()
    pids = job.wait_for(lambda s: len(s["pids"]) == 3)["pids"]
    job.kill_coordinator()
    os.kill(pids["w1"], signal.SIGKILL)
    job.wait_for(lambda s: "w1" not in s["members"] and len(s["members"]) >= 2)
    assert job.wait() == 0
    assert TRAINED in job.output() and "steps 600" in job.output()


def test_all_workers_dead_resumes_from_the_checkpoint(stage: Any) -> None:
    script = LINEAR.replace("checkpoint_every_s=None", "checkpoint_every_steps=10")
    job = stage.run(script, "40", "0.005", workers=2)
    status = job.wait_for(lambda s: s["step"] > 50)
    for pid in status["pids"].values():
        os.kill(pid, signal.SIGKILL)
    assert job.wait() == 0
    assert "resumed from" in job.output()
    assert TRAINED in job.output() and "steps 400" in job.output()


def test_a_killed_launcher_takes_everything_with_it(stage: Any, eventually: Callable[..., None]) -> None:
    job = stage.run(LINEAR, "1000", "0.01", workers=2)
    job.members(2)
    assert len(job.left_behind()) >= 3
    os.kill(job.pid, signal.SIGKILL)
    eventually(lambda: job.left_behind() == [])


def test_a_user_exception_is_shown_once_with_its_traceback_and_not_retried(stage: Any) -> None:
    job = stage.run(LINEAR + "\n    raise LookupError('my own mistake')\n", "1", "0", workers=3)
    assert job.wait() == 1
    shown = job.output().splitlines()
    assert sum("LookupError: my own mistake" in line for line in shown) == 1
    assert not any("runpy" in line or "bootstrap" in line for line in shown)
    assert len(job.events("spawn")) == 3


def test_the_scripts_exit_code_is_kept(stage: Any) -> None:
    job = stage.run(
        LINEAR.replace("for epoch in", "if job.steps == 0: sys.exit(7)\n    for epoch in"), "1", "0"
    )
    assert job.wait() == 7


def test_a_script_that_ends_before_training_is_over_is_told_what_to_do(stage: Any) -> None:
    script = LINEAR.replace("time.sleep(pace)", "time.sleep(pace)\n            if job.rank: sys.exit(0)")
    job = stage.run(script, "5", "0.01", workers=2)
    assert job.wait() == 1
    assert "ended before training was over" in job.output() and "job.agree" in job.output()


def test_early_stopping_together_is_no_error(stage: Any) -> None:
    script = LINEAR.replace("total = ", "stop = job.agree(job.rank == 1 and epoch == 3)\n        total = ")
    script = script.replace(
        'print("epoch", epoch, "workers", int(total), flush=True)',
        'print("epoch", epoch, flush=True)\n        if stop: break',
    )
    job = stage.run(script, "50", "0.001", workers=2)
    assert job.wait() == 0
    assert "steps 40" in job.output()


def test_workers_at_different_points_of_the_script_are_told_so(stage: Any) -> None:
    script = LINEAR.replace("time.sleep(pace)", "time.sleep(pace)\n            if job.rank: job.agree(True)")
    job = stage.run(script, "5", "0.01", workers=2)
    assert job.wait() == 1
    assert "must make the same calls" in job.output()


def test_members_out_of_step_once_do_not_end_a_job_that_trains(stage: Any) -> None:
    stray = "if job.rank == 1 and job.steps == 3: job.agree(True)"
    script = LINEAR.replace("time.sleep(pace)", f"time.sleep(pace)\n            {stray}")
    job = stage.run(script, "10", "0.005", workers=2)
    assert job.wait() == 0
    assert TRAINED[:7] in job.output() and "steps 100" in job.output()
    told = job.events("out_of_step")
    assert told and {event["step"] for event in told} == {3} and {event["operation"] for event in told} == {3}
    assert "is out of step" in job.output() and "w1 is started again: it is at agree" in job.output()


def test_newcomers_join_scripts_that_reduce_after_each_step(stage: Any) -> None:
    body = "total = job.step(nn.functional.mse_loss(model(a), b)) and job.reduce(n=len(a))\n"
    body += "            assert job.rehearsing or total['n'] == 20"
    script = LINEAR.replace("job.step(nn.functional.mse_loss(model(a), b))", body)
    script += "    import gc\n    assert gc.get_freeze_count() > 100_000, 'the imports'\n"
    job = stage.run(script, "20", "0.005", workers=1)
    job.members(1)
    job.resize(2)
    job.members(2)
    assert job.wait() == 0 and "steps 200" in job.output()
    assert job.events("out_of_step") == []


def test_a_resize_beyond_the_bounds_is_refused(stage: Any) -> None:
    job = stage.run(LINEAR, "30", "0.01", workers=1, maximum=2)
    job.members(1)
    with pytest.raises(TrainError, match="workers: got 3, this job allows 1 to 2"):
        job.resize(3)
    result = CliRunner().invoke(main, ["resize", str(job.directory.path), "3"])
    assert result.exit_code == 1 and "this job allows 1 to 2" in result.output


def test_a_job_name_in_use_is_refused(stage: Any) -> None:
    job = stage.run(LINEAR, "30", "0.01", workers=1)
    job.members(1)
    home = job.directory.path.parent
    (home / "jobs").mkdir(exist_ok=True)
    (home / "jobs" / "twin").symlink_to(job.directory.path)
    script = home / "any.py"
    script.write_text("")
    command = [sys.executable, "-m", "swell", "run", "--name", "twin", str(script)]
    done = subprocess.run(
        command, env={**os.environ, "SWELL_HOME": str(home)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and "is running already" in done.stderr
    (home / "jobs" / "twin").unlink()


def test_a_resize_of_an_unknown_job_names_it() -> None:
    result = CliRunner().invoke(main, ["resize", "no-such-job", "2"])
    assert result.exit_code == 1 and "no job 'no-such-job'" in result.output


@pytest.mark.parametrize("workers", ["0", "3:2", "two"])
def test_nonsense_for_workers_is_refused_naming_it(workers: str, tmp_path: Path) -> None:
    script = tmp_path / "any.py"
    script.write_text("")
    result = CliRunner().invoke(main, ["run", "--workers", workers, str(script)])
    assert result.exit_code == 2 and workers in result.output


def test_the_command_line_itself_runs_a_script_and_keeps_its_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print('hello from', sys.argv[1]); sys.exit(5)")
    done = subprocess.run(
        [sys.executable, "-m", "swell", "run", "--cold", "--workers", "1", str(script), "me", "--flag"],
        env={**os.environ, "SWELL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 5
    assert "w0| hello from me" in done.stdout


def test_the_same_script_runs_as_plain_python(tmp_path: Path) -> None:
    import textwrap

    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(LINEAR))
    done = subprocess.run(
        [sys.executable, str(script), "40", "0"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert TRAINED in done.stdout and "steps 400" in done.stdout


def test_a_job_that_ends_between_two_beats_has_said_how_it_went(stage: Any) -> None:
    job = stage.run(LINEAR, "2", "0.001", workers=1)
    heard = []
    with job.client() as client:
        for message in client.watch():
            if message.get("type") == "report" and message["report"].get("step"):
                heard.append(message["report"])
            if message.get("event") == "finish":
                break
    assert job.wait() == 0
    assert heard[-1]["done"] == heard[-1]["of"] == 20
    assert heard[-1]["step_s"] > 0
