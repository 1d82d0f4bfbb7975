"""Jobs of the platform's own account: behind a wall they see nothing of it, and they leave no process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import is_gone, wait_until

from swell.cli._platform import only_one
from swell.domain import InputError, JobRequest
from swell.engines import Launch, RunState, groups, wall
from swell.engines.accounts import no_script
from swell.engines.local import LocalSite, try_wall, wall_trouble
from swell.engines.processes import processes
from swell.engines.supervisor import signal_supervisor

from .conftest import Bench

OVER = (RunState.FINISHED, RunState.FAILED)
CURIOUS = """
import ctypes, json, os, subprocess, sys
from pathlib import Path

def tried(what):
    try:
        return repr(what())
    except OSError as error:
        return type(error).__name__

def unmounted(home):
    if ctypes.CDLL(None, use_errno=True).umount2(home.encode(), 2) != 0:
        raise OSError(ctypes.get_errno(), "umount")

home, outside = Path(sys.argv[1]), int(sys.argv[2])
found = {}
for name in ("tokens/admin", "store.db", "jobs/other/output.log"):
    found[name] = tried(lambda: (home / name).read_text())
    found["root " + name] = tried(lambda: Path(f"/proc/{outside}/root{home}/{name}").read_text())
found["signal"] = tried(lambda: os.kill(outside, 0))
found["environ"] = tried(lambda: Path(f"/proc/{outside}/environ").read_bytes())
umount = ["unshare", "-Ur", "-m", "umount", "-l", str(home)]
found["umount"] = tried(lambda: unmounted(str(home)))
found["nested"] = str(subprocess.run(umount, capture_output=True).returncode)
found["after"] = tried(lambda: (home / "tokens/admin").read_text())
found["listing"] = sorted(path.name for path in home.iterdir())

import swell
import torch
model = torch.nn.Linear(2, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
for _ in job.epochs(1):
    for (x,) in job.loader(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=8):
        job.step(model(x).sum())
Path("told.json").write_text(json.dumps(found))
"""
SLEEPER = """
import os, subprocess, sys, time
from pathlib import Path
sleeper = subprocess.Popen(["env", "-i", "setsid", "sleep", "300"])
Path(sys.argv[1]).write_text(str(sleeper.pid))
time.sleep(300)
"""


def launch(
    bench: Bench, job_id: str, script: str, *args: object, fields: dict[str, object] | None = None
) -> Launch:
    work = bench.home / "work"
    work.mkdir(exist_ok=True)
    (work / f"{job_id}.py").write_text(script)
    request = JobRequest(
        name=job_id, script=f"{job_id}.py", args=tuple(map(str, args)), workdir=str(work), **(fields or {})
    )  # type: ignore[arg-type]
    return Launch(job_id=job_id, request=request, job_dir=bench.home / "jobs" / job_id, max_workers=4)


def test_a_walled_job_reads_no_tokens_and_reaches_nobody_outside(bench: Bench) -> None:
    trouble = wall_trouble(try_wall(), bench.home)
    if trouble:
        pytest.skip(f"this machine allows no wall: {trouble}")
    for name in ("tokens/admin", "store.db", "jobs/other/output.log"):
        (bench.home / name).parent.mkdir(parents=True, exist_ok=True)
        (bench.home / name).write_text("secret")
    engine = bench.engine(walled=True)
    engine.apply(launch(bench, "curious", CURIOUS, bench.home, os.getpid()), (0,))
    seen = bench.wait(engine, "curious", lambda o: o and o.state in OVER, 200)
    assert seen is not None and seen.state is RunState.FINISHED, bench.output("curious")
    told = json.loads((bench.home / "work" / "told.json").read_text())
    assert "secret" not in str(told), told
    assert told.pop("listing") == ["jobs", "work"]
    assert told.pop("nested") != "0"
    assert set(told.values()) <= {"FileNotFoundError", "PermissionError", "ProcessLookupError"}, told


READABLE = """
set -e
mount --make-rprivate /
mount --bind "$2" "$3"
mount -t tmpfs -o mode=755 none "$1"
mkdir -p "$2"
mount --bind "$3" "$2"
shift 3
exec "$@"
"""
"""Shows the folder $2, where Python is, though $1 above it is closed to other accounts; $3 is any folder."""
ATTACKS = {
    "own account": [],
    "other account": [],
    "run as": ["--run-as", "nobody"],
    "run as, no wall": ["--run-as", "nobody", "--no-wall"],
}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every account can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="swell-attacked-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _for_nobody(folder: Path) -> list[str]:
    """Words that begin a command in which the account 'nobody' can run this Python; skips where none do."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can run something as another account, by setpriv")
    base = Path(sys.base_prefix).resolve()
    closed = [path for path in base.parents if not path.stat().st_mode & 0o001]
    (folder / "python").mkdir()
    words = [str(closed[-1] if closed else ""), str(base), str(folder / "python")]
    prefix = ["unshare", "--mount", "sh", "-c", READABLE, "sh", *words] if closed else []
    trial = [*prefix, *_as_nobody(), sys.executable, "-c", "import swell.engines"]
    if subprocess.run(trial, capture_output=True, timeout=120, cwd="/").returncode != 0:
        pytest.skip("the account 'nobody' cannot read this Python or swell here")
    return prefix


def _as_nobody() -> list[str]:
    entry = pwd.getpwnam("nobody")
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ATTACKS)
def test_a_job_that_means_harm_costs_nobody_else_anything(setting: str, open_folder: Path) -> None:
    """What it tries is in `attacker.py`. It and the honest job run a program, which `--command` submits."""
    walled = "--no-wall" not in ATTACKS[setting]
    trouble = wall_trouble(try_wall(), open_folder) if walled else ""
    if trouble:
        pytest.skip(f"this machine allows no wall: {trouble}")
    prefix = [] if setting == "own account" else _for_nobody(open_folder)
    home = open_folder / "work" / "home"
    home.parent.mkdir()
    if setting == "other account":
        shutil.chown(home.parent, "nobody")
        prefix += _as_nobody()
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.engines.attacked", str(home), *ATTACKS[setting]],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=root,
        env={**os.environ, "HOME": str(home.parent), "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    told = said["told"]
    lines, seen, pidfd = told.pop("lines"), told.pop("cmdline"), told.pop("pidfd")
    assert "attacker.py" in lines
    if walled:
        assert "tests.engines.attacked" not in lines and "299" not in lines, "no process outside is seen"
        assert (seen, pidfd) == ("FileNotFoundError", "ProcessLookupError")
    assert set(told.values()) <= {"FileNotFoundError", "PermissionError", "ProcessLookupError"}, told
    before, after = said["outside"]
    assert {**before, "state": ""} == {**after, "state": ""} and after["state"] != "Z"
    assert said["found"] == {"attacker": "starting", "victim": "starting"}, "as the processes are"
    assert not said["deceived"], "the folder of its runs led the platform to the honest job"
    assert said["victim"] == ["starting", True, True], "it was not touched"
    assert said["left"] == 0, "the attacker was ended with all of its processes"


COVERED = """
mount --make-rprivate / && mount -t tmpfs none /proc/sys && mount -t proc proc "$1" && shift && exec "$@"
"""
LOOK = """
import os, sys
from pathlib import Path
from swell.engines import supervisor
from swell.engines.wall import Wall

def look():
    numbers = [[name for name in os.listdir(path) if name.isdigit()] for path in ("/proc", sys.argv[2])]
    return repr((os.listdir("/proc/sys"), numbers)).encode()

print(supervisor.run(look, Wall(home=Path(sys.argv[1])), None))
"""


def test_what_covers_parts_of_proc_covers_them_behind_the_wall_and_no_other_proc_is_left(
    tmp_path: Path,
) -> None:
    """As in a container, whose runtime covers parts of /proc to protect its host."""
    trouble = wall_trouble(try_wall(), tmp_path)
    if trouble or os.geteuid() != 0:
        pytest.skip(f"only root can cover /proc; wall: {trouble or 'possible'}")
    home, second = tmp_path / "home", tmp_path / "another proc"
    home.mkdir()
    second.mkdir()
    words = ["unshare", "--mount", "sh", "-c", COVERED, "sh", str(second)]
    look = [sys.executable, "-c", LOOK, str(home), str(second)]
    done = subprocess.run([*words, *look], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{(0, repr(([], [['1'], ['1']])).encode())}\n", done


def test_a_request_shows_a_job_no_directory_of_the_platform(tmp_path: Path) -> None:
    for name in ("tokens", "jobs/a", "jobs/b", "work"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("train.py", "store.db"):
        (tmp_path / name).touch()
    home, own = tmp_path.resolve(), [tmp_path.resolve() / "jobs" / "a"]

    def more(*named: Path) -> list[Path]:
        found = wall.shown(tmp_path, tmp_path / "jobs" / "a", named)
        assert found[:1] == own
        return found[1:]

    assert more(home / "work" / "deep", home / "train.py", Path("/usr")) == [home / "work", home / "train.py"]
    assert more(home, home / "tokens" / "admin", home / "store.db", home / "work" / ".." / "jobs" / "b") == []


def test_a_script_that_the_job_could_not_read_is_not_there(tmp_path: Path) -> None:
    """The answer is that of the control plane to a script that is not there."""
    for name in ("tokens/admin", "work/train.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()

    def answer(script: str, **options: Any) -> str:
        site = LocalSite(tmp_path, slots=1, **options)
        request = JobRequest(name="a", script=script, workdir=str(tmp_path / "work"))
        try:
            site.check(Launch(job_id="a", request=request, job_dir=tmp_path / "jobs" / "a", owner="nobody"))
        except InputError as error:
            assert error.field == "script"
            return str(error)
        return ""

    secret, absent = str(tmp_path / "tokens" / "admin"), str(no_script(tmp_path / "tokens" / "admin"))
    assert answer(secret) == "" and answer("train.py") == ""
    assert answer(secret, walled=True) == absent and answer("train.py", walled=True) == ""
    if os.geteuid() == 0:  # nobody may not even pass through pytest's folder
        assert answer(secret, run_as="nobody") == absent
        assert answer("/etc/passwd", run_as="nobody") == ""


def test_what_a_job_started_ends_with_it_though_its_supervisor_is_killed(bench: Bench) -> None:
    if groups.where() is None:
        pytest.skip("this account may make no cgroup v2 here")
    engine, told = bench.engine(), bench.home / "sleeper"
    engine.apply(launch(bench, "a", SLEEPER, told), (0,))
    pid = int(wait_until(lambda: told.exists() and told.read_text(), 200, "the job to run"))
    environment = Path(f"/proc/{pid}/environ")
    wait_until(lambda: b"SWELL" not in environment.read_bytes(), 60, "env -i to take effect")
    (group,) = groups.of(bench.home / "jobs" / "a")
    assert group.led and pid in group.members()
    assert groups.end_orphans(bench.home / "jobs" / "a") and group.led, "it is nobody's orphan"
    engine.end("a")
    signal_supervisor(bench.home / "jobs" / "a", signal.SIGKILL)
    wait_until(lambda: is_gone(pid), 30, "the sleeper to be ended")
    wait_until(lambda: not group.path.exists(), 30, "the group to be removed")


def test_all_that_a_walled_job_started_ends_with_its_supervisor(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there are no control groups, and although the process has shed its environment."""
    trouble = wall_trouble(try_wall(), bench.home)
    if trouble:
        pytest.skip(f"this machine allows no wall: {trouble}")
    monkeypatch.setattr(groups, "where", lambda: None)
    engine, told = bench.engine(walled=True), bench.home / "work" / "sleeper"
    engine.apply(launch(bench, "a", SLEEPER.replace("300", f"300.{os.getpid()}"), told), (0,))
    wait_until(lambda: told.exists() and told.read_text(), 200, "the job to run")

    def sleepers() -> list[int]:
        words = ["sleep", f"300.{os.getpid()}", ""]
        return [pid for pid in processes() if _command(pid).split(b"\0") == [w.encode() for w in words]]

    (sleeper,) = wait_until(sleepers, 60, "the sleeper") or [0]
    environment = Path(f"/proc/{sleeper}/environ")
    wait_until(lambda: b"SWELL" not in environment.read_bytes(), 60, "env -i to take effect")
    assert int(told.read_text()) != sleeper, "inside it has another number"
    engine.close()
    assert signal_supervisor(bench.home / "jobs" / "a", signal.SIGKILL)
    wait_until(lambda: not sleepers(), 30, "the sleeper to be ended")
    wait_until(lambda: not bench.processes("a"), 30, "the job's other processes to end")


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_doctor_sees_that_the_control_plane_walls_no_jobs_off(bench: Bench) -> None:
    doctor = importlib.import_module("swell.cli.doctor")
    bench.engine(walled=False)
    with only_one(bench.home):
        found = doctor._wall(bench.home)
    assert found.state == doctor.ODD and "--no-wall" in found.note


def test_a_supervisor_that_its_engine_forgot_runs_no_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is killed between the start of a supervisor and its move into the job's group."""
    from swell.engines import supervisor

    monkeypatch.setattr(supervisor, "_GROUP_S", 0.05)
    monkeypatch.setenv(groups.VARIABLE, "swell-no-such-group-")
    (bench.home / "jobs" / "a").mkdir(parents=True)
    assert supervisor.supervise(bench.home / "jobs" / "a") == 1
    assert not (bench.home / "orders" / "a" / "lock").exists()
