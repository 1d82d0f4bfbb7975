"""The platform as people use it: real commands, a real control plane, real training in real processes.

The tests of this file share one control plane and are run in order, by one process.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.commands import Commands
from tests.waiting import wait_until

from swell.cli import COMMANDS
from swell.cli._platform import running_pid

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

TRAIN = """
import argparse, time, torch, swell

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--fail", action="store_true")
epochs, fail = parser.parse_args().epochs, parser.parse_args().fail
torch.manual_seed(0)
model = torch.nn.Linear(20, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(512, 20), torch.randint(0, 2, (512,)))
job = swell.elastic(model, optimizer)
loader = job.loader(data, batch_size=32)
for epoch in job.epochs(epochs):
    for x, y in loader:
        time.sleep(0.002 * len(x))
        job.step(torch.nn.functional.cross_entropy(model(x), y))
    if fail:
        raise RuntimeError("this script is broken")
    if job.is_leader:
        print(f"epoch {epoch} ended", flush=True)
"""


class Place:
    """A directory with a training script and a home for a control plane."""

    def __init__(self, path: Path, commands: Commands) -> None:
        self.path, self._commands = path, commands
        self.home = path / "home"
        (path / "train.py").write_text(TRAIN)

    def environment(self, **more: str) -> dict[str, str]:
        left_out = ("SWELL_URL", "SWELL_TOKEN", "SWELL_CA")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        return kept | {"SWELL_HOME": str(self.home), "COLUMNS": "160", "TZ": "UTC"} | more

    def swell(self, *words: object, timeout_s: float = 100, **environment: str) -> CompletedProcess[str]:
        """Run a command to its end."""
        env = self.environment(**environment)
        return self._commands.run([str(word) for word in words], self.path, env, timeout_s)

    def json(self, *words: object, **environment: str) -> Any:
        """Run a command that answers with JSON."""
        command = 2 if words[0] == "token" else 1
        done = self.swell(*words[:command], "--json", *words[command:], **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_for(self, job_id: str, until: Callable[[dict[str, Any]], bool], timeout_s: float = 90) -> Any:
        """Look at a job until something is true of it."""

        def look() -> Any:
            job = self.json("describe", job_id)["job"]
            return job if until(job) else None

        return wait_until(look, timeout_s, lambda: self.json("describe", job_id), poll_s=0.2)

    def output(self, job_id: str) -> str:
        """What a job printed, read without asking the control plane."""
        return (self.home / "jobs" / job_id / "output.log").read_text()

    def leftovers(self) -> list[str]:
        """Command lines of processes that belong to this place."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.home) in command:
                found.append(command)
        return found


def over(job: dict[str, Any]) -> bool:
    return job["phase"] in ("finished", "failed", "cancelled", "refused")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Iterator[Place]:
    """A control plane with four slots; nothing of it may be left in the end."""
    place = Place(tmp_path_factory.mktemp("platform"), commands)
    done = place.swell("up", "-d", "--slots", 4, "--port", 0)
    assert done.returncode == 0, done.stderr
    yield place
    done = place.swell("down")
    assert done.returncode == 0, done.stderr
    assert place.leftovers() == []


def submit(place: Place, *words: object) -> str:
    job_id: str = place.json("submit", "-d", *words)["job_id"]
    return job_id


def test_without_a_control_plane_every_command_says_how_to_start_one(
    tmp_path: Path, commands: Commands
) -> None:
    place = Place(tmp_path, commands)
    for words in (("queue",), ("submit", "train.py"), ("top", "--once"), ("nodes",), ("replay",)):
        done = place.swell(*words)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr == (
            f"swell: no control plane is running here (home {place.home}): start one with 'swell up'\n"
        )
    done = place.swell("down")
    assert done.returncode == 1
    assert "'swell up' starts one" in done.stderr


def test_up_keeps_its_home_private_and_to_itself(place: Place) -> None:
    assert place.home.stat().st_mode & 0o777 == 0o700
    for name in ("admin", "user"):
        assert (place.home / "tokens" / name).stat().st_mode & 0o777 == 0o600
    for words in (("up",), ("up", "-d")):
        done = place.swell(*words)
        assert done.returncode == 1
        assert re.fullmatch(
            r"swell: a control plane is running for .* already \(process \d+\): .*\n", done.stderr
        )


def test_submit_shows_the_promise_then_the_output_and_what_to_type_next(place: Place) -> None:
    done = place.swell("submit", "train.py")
    assert done.returncode == 0, done.stderr
    assert re.match(r"Job train-\w+ was accepted\.\nEstimate: none yet, this script has never", done.stdout)
    assert "epoch 3 ended" in done.stdout
    assert re.search(r"train-\w+ finished after \d", done.stdout)
    assert re.search(r"Next:\n  swell describe train-\w+\n  swell logs train-\w+\n$", done.stdout)
    assert "starts on slot" in done.stderr


def test_the_second_run_is_estimated_from_the_first(place: Place) -> None:
    same = ("train.py", "--epochs", 20)  # long enough to be seen at work, however busy the machine
    done = place.swell("submit", *same)
    assert done.returncode == 0, done.stderr
    done = place.swell("quote", *same)
    assert done.returncode == 0, done.stderr
    assert "from earlier runs of this script" in done.stdout
    promise = place.json("quote", *same)
    assert promise["admitted"] is True
    assert promise["estimate"]["source"] == "history"
    assert promise["estimate"]["earliest_s"] <= promise["estimate"]["finish_s"]


def test_a_deadline_that_cannot_be_kept_is_refused_with_one_that_can(place: Place) -> None:
    for command in ("quote", "submit"):
        done = place.swell(command, "--deadline", "1s", "train.py")
        assert done.returncode == 3
        text = done.stdout if command == "quote" else done.stderr
        assert re.search(r"^Refused: .* cannot be promised\.\nReason: .+\.\n", text)
        assert re.search(r"^Counter-offer: .* would be promised\.\nTo take it: --deadline \w+$", text, re.M)
    offer = text.rsplit(" ", 1)[1].strip()
    done = place.swell("submit", "--deadline", offer, "train.py")
    assert done.returncode == 0, done.stderr
    assert "Promised: done by" in done.stdout
    assert "by its deadline" in done.stdout


def test_a_deadline_that_cannot_be_decided_in_time_is_refused_at_once(place: Place) -> None:
    done = place.swell("submit", "--deadline", "5s", "train.py", "--seed", "unseen")
    assert done.returncode == 3
    assert "can only be decided after a profiling run" in done.stderr and "too late" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--gpus", 2, "train.py"), "No such option '--gpus'. swell decides how many GPUs a job has"),
        (("--gpus", 2, "train.py"), "--max-workers N bounds it"),
        (("--dedline", "2h", "train.py"), "Did you mean '--deadline'?"),
        (("--deadline", "5", "train.py"), "'5' has no unit; write 5s"),
        (("train.sh",), "'train.sh' is no Python script: hand any other program in with --command"),
        (("program",), "'program' is no Python script: hand any other program in with --command"),
        (("book.ipynb",), "is a notebook"),
    ],
)
def test_what_would_not_do_what_was_meant_is_refused(
    place: Place, words: tuple[object, ...], expected: str
) -> None:
    (place.path / "train.sh").write_text("echo shell\n")
    (place.path / "program").write_text("#!/bin/sh\necho shell\n")
    (place.path / "book.ipynb").write_text("{}")
    for command in ("submit", "quote", "run"):
        expected = expected.replace("--max-workers N", "--workers MIN:MAX") if command == "run" else expected
        if command == "run" and str(words[0]).endswith("line"):
            continue  # it has no deadlines
        done = place.swell(command, *words)
        assert done.returncode == 2
        assert expected in " ".join(done.stderr.split()), done.stderr


def test_a_json_job_file_is_handed_in_as_a_job_file(place: Place) -> None:
    (place.path / "job.json").write_text('{"script": "train.py", "args": ["--epochs", "1"]}')
    done = place.swell("submit", "job.json")
    assert done.returncode == 0, done.stderr
    assert "epoch 0 ended" in done.stdout and "epoch 1 ended" not in done.stdout


def test_a_text_that_fits_several_jobs_is_refused_with_their_ids(place: Place) -> None:
    words = ("--max-workers", 1, "train.py", "--epochs", 500)
    ids = [submit(place, "--name", name, *words) for name in ("alpha1", "alpha2")]
    try:
        for command in (("cancel",), ("logs",)):
            done = place.swell(*command, "alpha")
            assert done.returncode == 2, done
            assert "'alpha' is the beginning of 2 jobs" in done.stderr
            assert all(job in done.stderr for job in ids), done.stderr
        assert not any(over(place.json("describe", job)["job"]) for job in ids)
    finally:
        for chosen in ("alpha1", ids[1][:8]):  # by its name, and by a beginning that fits one
            assert place.swell("cancel", chosen).returncode == 0
    assert all(over(place.json("describe", job)["job"]) for job in ids)


def test_a_script_that_fails_says_why_and_exits_1(place: Place) -> None:
    done = place.swell("submit", "--name", "broken", "train.py", "--fail")
    assert done.returncode == 1
    assert "this script is broken" in done.stdout + done.stderr
    told = place.json("describe", "broken")
    assert told["job"]["phase"] == "failed"
    assert "RuntimeError: this script is broken" in told["job"]["reason"]


def test_a_job_file_is_as_good_as_flags(place: Place) -> None:
    assert place.swell("init", "train.py").returncode == 0
    again = place.swell("init", "train.py")
    assert again.returncode == 2
    assert "job.toml already exists; --force overwrites it" in again.stderr
    text = (place.path / "job.toml").read_text().replace("args = []", 'args = ["--epochs", "1"]')
    (place.path / "job.toml").write_text(text)
    done = place.swell("submit", "job.toml")
    assert done.returncode == 0, done.stderr
    assert "epoch 0 ended" in done.stdout
    assert "epoch 1 ended" not in done.stdout


@pytest.fixture(scope="module")
def long(place: Place) -> str:
    """A job that trains on until a test cancels it."""
    return submit(place, "--name", "long", "--checkpoint", "2s", "train.py", "--epochs", 500)


def test_top_shows_nodes_slots_and_jobs(place: Place, long: str) -> None:
    place.wait_for(long, lambda job: job["done"] > 10)
    text = place.swell("top", "--once").stdout
    assert re.search(r"swell \d\d:\d\d:\d\d   policy tide   \d of 4 slots in use", text)
    assert "n0" in text and long in text and "■" in text
    view = place.json("top")
    (row,) = [job for job in view["jobs"] if job["job_id"] == long]
    assert row["steps_per_s"] > 0
    assert view["slots"] == 4 and view["used"] == len(row["wanted"])


def test_the_dashboard_is_found_without_a_token_in_its_address(place: Place) -> None:
    found = place.json("dashboard")
    assert found["url"].startswith("http://127.0.0.1:") and "swell_" not in found["url"]
    assert [Path(path).name for path in found["token_files"]] == ["admin", "user"]
    assert f"The dashboard: {found['url']}\n" in place.swell("dashboard", "--no-browser").stdout


def test_a_job_is_paused_resumed_bounded_and_cancelled(place: Place, long: str) -> None:
    job_id = long
    job = place.wait_for(job_id, lambda job: job["done"] > 20)
    assert [row["job_id"] for row in place.json("queue")] == [job_id]
    assert place.swell("pause", "long").returncode == 0
    assert place.wait_for(job_id, lambda job: job["phase"] == "paused")["wanted"] == []
    done_before = job["done"]
    assert place.swell("resume", "long").returncode == 0
    job = place.wait_for(job_id, lambda job: job["phase"] == "running" and job["done"] > done_before + 20)
    assert job["restarts"] == 0
    assert place.swell("resize", "long", "--min", 2, "--max", 2).returncode == 0
    job = place.wait_for(job_id, lambda job: len(job["wanted"]) == 2)
    assert job["request"]["max_workers"] == 2

    def describe() -> str:
        told: str = place.swell("describe", "long").stdout
        return told if "Estimate:   done at about" in told else ""

    # There is an estimate once some seconds of steps were steady.
    told = wait_until(describe, 60, "an estimate", poll_s=0.2)
    for expected in ("Why:", "Workers:", "Progress:", "How it was resized:"):
        assert expected in told
    story = place.swell("describe", "long", "--story").stdout
    assert "engine: started((" in story and re.search(r"coordinator: resize\(2, .* -> ", story)
    assert place.swell("cancel", "long").returncode == 0
    assert place.wait_for(job_id, over)["phase"] == "cancelled"
    refused = place.swell("resume", job_id)
    assert refused.returncode == 1
    assert "there is nothing to resume" in refused.stderr


def test_the_policy_is_switched_while_a_job_runs(place: Place) -> None:
    assert place.json("policy") == {"policy": "tide"}
    assert place.json("policy", "afs-l") == {"policy": "afs-l"}
    refused = place.swell("policy", "afs-z")
    assert refused.returncode == 2
    assert "unknown policy 'afs-z'. Did you mean" in refused.stderr
    assert place.json("policy") == {"policy": "afs-l"}
    place.json("policy", "tide")


def test_another_user_sees_nothing_of_mine_and_may_not_rule(place: Place) -> None:
    made = place.json("token", "create", "ada", "--expires", "1h")
    url = json.loads((place.home / "server.json").read_text())["url"]
    theirs = {"SWELL_URL": url, "SWELL_TOKEN": made["token"], "SWELL_HOME": str(place.path / "nowhere")}
    assert place.json("queue", "--all", **theirs) == []
    assert len(place.json("queue", "--all")) > 0
    refused = place.swell("policy", "afs-l", **theirs)
    assert refused.returncode == 1
    assert "only an administrator may" in refused.stderr
    (mine, *_) = place.json("queue", "--all")
    assert place.swell("logs", mine["job_id"], **theirs).returncode == 1
    assert place.swell("token", "revoke", "ada").returncode == 0
    refused = place.swell("queue", **theirs)
    assert refused.returncode == 1
    assert "this token is not known here" in refused.stderr


def test_a_replay_of_what_happened_here_is_near_to_it(place: Place) -> None:
    names = [f"crowd{i}" for i in range(4)]
    ids = [submit(place, "--name", name, "train.py", "--epochs", 8 + i) for i, name in enumerate(names)]
    for job_id in ids:
        assert place.wait_for(job_id, over, timeout_s=200)["phase"] == "finished"
    events = [json.loads(line) for line in place.swell("events", "--json", "--admin").stdout.splitlines()]
    theirs = [e for e in events if e.get("job_id") in ids or "node" in e]
    (place.path / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in theirs))
    words = ("replay", "--policy", "elasticflow", "--policy", "tiresias", "--from", "log.jsonl")
    live, same, other = place.json(*words)
    took_s = [e["jct_s"] for e in theirs if e["kind"] == "finished"]
    assert live["avg_jct_s"] == pytest.approx(sum(took_s) / 4, rel=0.01)
    assert same["avg_jct_s"] == pytest.approx(live["avg_jct_s"], rel=0.10)
    assert other["resizes"] == 0
    larger = place.json(*words, "--cluster", "4x4")[1]
    assert larger["avg_jct_s"] <= same["avg_jct_s"]


@pytest.fixture(scope="module")
def survivor(place: Place) -> str:
    """A job that outlives its control plane, and then another one."""
    return submit(place, "--name", "survivor", "train.py", "--epochs", 500)


def test_the_control_plane_can_be_killed_while_a_job_trains_on(place: Place, survivor: str) -> None:
    job_id = survivor
    before = place.wait_for(job_id, lambda job: job["done"] > 10)
    pid = int((place.home / "up.lock").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: running_pid(place.home) is None, 30, "the control plane to be gone")
    done = place.swell("queue")
    assert done.returncode == 1
    assert "no control plane is running here" in done.stderr
    epochs = place.output(job_id).count("ended")
    wait_until(lambda: place.output(job_id).count("ended") > epochs, 60, "an epoch without a control plane")
    assert place.swell("up", "-d", "--slots", 4, "--port", 0).returncode == 0
    after = place.wait_for(job_id, lambda job: job["done"] > before["done"] + 10)
    assert (after["restarts"], after["phase"]) == (0, "running")
    submitted = [e for e in place.swell("events", "--job", job_id).stdout.splitlines() if "starts on" in e]
    assert len(submitted) == 1, "it was started once"


def test_down_saves_running_jobs_and_up_goes_on_with_them(place: Place, survivor: str) -> None:
    job_id = survivor
    before = place.wait_for(job_id, lambda job: job["done"] > 30)
    done = place.swell("down")
    assert done.returncode == 0, done.stderr
    assert "go on with the next 'swell up'" in done.stdout
    assert place.leftovers() == []
    assert place.swell("up", "-d", "--slots", 4, "--port", 0).returncode == 0
    after = place.wait_for(job_id, lambda job: job["done"] > before["done"] + 5)
    assert after["restarts"] == 0
    place.swell("cancel", job_id)
    place.wait_for(job_id, over)


def test_in_the_foreground_it_says_what_happens_and_ends_on_ctrl_c(
    tmp_path: Path, commands: Commands
) -> None:
    place = Place(tmp_path, commands)
    process = subprocess.Popen(
        [sys.executable, "-m", "swell", "up", "--nodes", "2x2", "--port", "0"],
        cwd=tmp_path,
        env=place.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert re.match(r"swell is up at http://127\.0\.0\.1:\d+: 4 slots, policy tide\.", first)
        wait_until(
            lambda: place.swell("nodes").returncode == 0, 60, "the control plane to answer", poll_s=0.2
        )
        nodes = place.json("nodes")
        assert [(n["name"], n["gpus"]) for n in nodes] == [("n0", 2), ("n1", 2)]
        assert place.json("drain", "n1")[1]["draining"] is True
        refused = place.swell("drain", "n7")
        assert refused.returncode == 1
        assert "there is no node 'n7'; nodes: n0, n1" in refused.stderr
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        assert "out of service (drained)" in rest
        assert "Traceback" not in rest
        assert rest.endswith("'swell up' finds them, 'swell down' stops them.\n")
        assert not (place.home / "server.json").exists()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--host", "0.0.0.0"), "give --tls-cert and --tls-key, or --insecure"),
        (("--slots", "2", "--nodes", "1x2"), "give either --nodes or --slots, not both"),
        (("--policy", "polux"), "unknown policy 'polux'. Did you mean 'pollux'?"),
        (("--nodes", "four"), "'four': need NODESxGPUS"),
        (("--store", "mysql://x"), "need a path, sqlite:///path or postgresql://"),
        (("--tls-cert", "a.pem"), "key is missing"),
        (("--ha",), "--ha needs a store that several control planes can reach"),
    ],
)
@pytest.mark.parametrize("detach", [(), ("-d",)], ids=["foreground", "background"])
def test_up_refuses_nonsense_in_one_line(
    tmp_path: Path, commands: Commands, words: tuple[str, ...], expected: str, detach: tuple[str, ...]
) -> None:
    place = Place(tmp_path, commands)
    done = place.swell("up", *detach, *words)
    assert done.returncode in (1, 2)
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
    assert place.leftovers() == []


def examples(text: str) -> list[list[str]]:
    """The commands under 'Example:' of a help text."""
    _, _, example = text.partition("Example:\n")
    lines = [shlex.split(line.strip()) for line in example.strip().splitlines()]
    assert lines, "there is no example"
    assert all(line[0] == "swell" for line in lines)
    return [line[1:] for line in lines]


# In the order in which they make sense; 'train' is a job that runs.
TRIED = [
    "init", "quote", "submit", "queue", "describe", "logs", "events", "top", "nodes", "dashboard", "drain",
    "policy", "resize", "pause", "resume", "cancel", "replay", "token", "token create", "token list",
    "token revoke", "reserve", "reserve add", "reserve list", "reserve demand", "reserve follow",
    "reserve remove", "teams", "teams set", "teams list", "teams remove", "doctor", "backup", "gc", "usage",
    "whoami",
]  # fmt: skip


def test_every_example_in_a_help_text_works(place: Place) -> None:
    submit(place, "train.py", "--epochs", 300)
    shutil.copy(Path(__file__).parents[1] / "train" / "gallery" / "ddp.py", place.path / "train_ddp.py")
    for command in TRIED:
        help_text = place.swell(*command.split(), "--help").stdout
        for words in examples(help_text):
            assert words[: len(command.split())] == command.split()
            words = words[: words.index(">")] if ">" in words else words  # a shell takes the rest
            done = place.swell(*words)
            assert done.returncode == 0, f"swell {' '.join(words)}: {done.stderr}"


def test_the_examples_of_up_and_down_work(tmp_path: Path, commands: Commands) -> None:
    place = Place(tmp_path, commands)
    for command in ("up", "down"):
        for words in examples(place.swell(command, "--help").stdout):
            done = place.swell(*words)
            assert done.returncode == 0, done.stderr
    assert place.leftovers() == []


def test_no_command_of_the_platform_is_left_untried() -> None:
    elsewhere = {
        "demo",
        "completion",
        "simulate",
        "report",
        "policies",
        "generate",
        "run",
        "up",
        "down",
        "restore",
        "sweep",
    }
    assert set(COMMANDS) - elsewhere == {command.split()[0] for command in TRIED}


def test_many_jobs_are_cancelled_by_their_names_and_only_they(place: Place) -> None:
    made = {n: submit(place, "--name", n, "train.py", "--epochs", 300) for n in ("lr-1", "lr-2", "keep")}
    asked = place.swell("cancel", "--all", "--name", "lr-*")  # there is nobody to answer
    assert asked.returncode == 1 and "Cancel 2 jobs" in asked.stderr
    ended = place.json("cancel", "--all", "--name", "lr-*", "--yes")
    assert sorted(job["job_id"] for job in ended) == sorted([made["lr-1"], made["lr-2"]])
    active = {job["job_id"] for job in place.json("queue")}
    assert made["keep"] in active and not active & {made["lr-1"], made["lr-2"]}
    for words in ((), ("keep", "--all"), ("keep", "--name", "k*")):
        assert "give one JOB, or --all" in place.swell("cancel", *words).stderr

    shell = {"_SWELL_COMPLETE": "bash_complete", "COMP_WORDS": "swell describe kee", "COMP_CWORD": "2"}
    assert place.swell(**shell).stdout.split() == ["plain,keep", f"plain,{made['keep']}"]
    place.swell("cancel", made["keep"])


def test_who_one_is_and_that_a_users_token_is_no_administrators(place: Place) -> None:
    me = place.json("whoami")
    assert me["role"] == "user" and me["url"].startswith("http")
    token = place.json("token", "create", "ada")["token"]
    refused = place.swell("queue", "--admin", SWELL_TOKEN=token)
    assert refused.returncode == 1 and "$SWELL_TOKEN is of ada (role user)" in refused.stderr


_TRIAL = """
import argparse, time, torch, swell

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
model = torch.nn.Linear(4, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=lr))
loader = job.loader(torch.utils.data.TensorDataset(torch.randn(64, 4)), batch_size=32)
for epoch in job.epochs(3):
    for (x,) in loader:
        time.sleep(0.02 * len(x))
        job.step(model(x).square().mean())
    job.log(score=lr)
"""


def test_a_sweep_goes_on_after_its_command_was_killed(place: Place) -> None:
    (place.path / "trial.py").write_text(_TRIAL)
    (place.path / "sweep.toml").write_text(
        '[job]\nscript = "trial.py"\n[sweep]\nmetric = "score"\ndirection = "maximize"\nparallel = 3\n'
        "trials = 5\n[parameters]\nlr = { low = 0.001, high = 0.1 }\n"
    )
    command = [sys.executable, "-m", "swell", "sweep", "sweep.toml"]
    with subprocess.Popen(
        command, cwd=place.path, env=place.environment(), stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert any("trial 3: started" in line for line in first.stdout), "one waits for the others by now"
        first.kill()
    found = place.json("sweep", "sweep.toml", "--resume", "--plot", "sweep.svg")
    trials = found["trials"]
    assert [trial["number"] for trial in trials] == [0, 1, 2, 3, 4]
    states = {trial["state"] for trial in trials}
    assert states == {"complete", "pruned"}, (trials, place.json("queue", "--all"))
    best = max(trials, key=lambda trial: trial["parameters"]["lr"])
    assert found["best"] == best and best["value"] == best["parameters"]["lr"]
    ours = [job["job_id"] for job in place.json("queue", "--all") if job["job_id"].startswith("sweep-")]
    assert sorted(ours) == sorted(trial["job_id"] for trial in trials), "a trial became two jobs, or none"
    assert (place.path / "sweep.svg").read_text().startswith("<svg")
    again = place.swell("sweep", "sweep.toml")
    assert again.returncode != 0 and "--resume" in again.stderr
