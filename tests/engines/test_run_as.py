"""Jobs as another account: they cannot read what the platform keeps, and run all the same."""

from __future__ import annotations

import contextlib
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

import pytest

from swell.cli._platform import prepare
from swell.domain import InputError, JobRequest
from swell.engines import Launch, RunState, accounts
from swell.engines.accounts import SUBMITTER, check, of_job
from swell.engines.processes import processes_of, write_json

from .conftest import Bench

SCRIPT = """
import json, os, sys
from pathlib import Path
told = {"uid": os.getuid(), "groups": os.getgroups(), "home": os.environ["HOME"]}
for path in sys.argv[1:]:
    try:
        told[path] = Path(path).read_text()
    except OSError as error:
        told[path] = type(error).__name__
Path(os.environ["SWELL_JOB_DIR"], "told.json").write_text(json.dumps(told))

import swell
import torch
model = torch.nn.Linear(2, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.01))
for _ in job.epochs(1):
    for (x,) in job.loader(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=8):
        job.step(model(x).sum())
"""


def _nobody() -> pwd.struct_passwd:
    """An account that can run Python and read swell here; skips where there is none."""
    if os.geteuid() != 0:
        pytest.skip("only root can run jobs as another account")
    entry = pwd.getpwnam("nobody")
    tried = [sys.executable, "-c", "import swell, torch"]
    with contextlib.suppress(OSError):
        done = subprocess.run(tried, user=entry.pw_uid, group=entry.pw_gid, cwd="/", capture_output=True)
        if done.returncode == 0:
            return entry
    pytest.skip("the account 'nobody' cannot read this Python or swell")


@pytest.fixture
def home() -> Iterator[Path]:
    """A home that other accounts can pass through; pytest's own folders are closed to them."""
    path = Path(tempfile.mkdtemp(prefix="swell-run-as-"))
    prepare(path, pass_through=True)
    yield path
    for folder in (path / "jobs").glob("*"):
        for pid in processes_of(folder):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path, ignore_errors=True)


def test_a_job_runs_as_its_account_and_reads_nothing_of_the_platforms(home: Path, nursery: object) -> None:
    entry = _nobody()
    (home / "tokens").mkdir(mode=0o700)
    (home / "tokens" / "admin").write_text("secret")
    write_json(home / "store.db", {"secret": 1})
    (home / "script.py").write_text(SCRIPT)
    (home / "script.py").chmod(0o644)
    bench = Bench(home)
    engine = bench.engine(run_as=SUBMITTER)
    secrets = [str(home / "tokens" / "admin"), str(home / "store.db"), f"/proc/{os.getpid()}/environ"]
    request = JobRequest(name="a", script=str(home / "script.py"), args=tuple(secrets), workdir="/")
    launch = Launch(job_id="a", request=request, job_dir=home / "jobs" / "a", owner="nobody")
    try:
        engine.check(launch)
        engine.apply(launch, (0,))
        seen = bench.wait(engine, "a", lambda o: o and o.state in (RunState.FINISHED, RunState.FAILED))
        assert seen is not None and seen.state is RunState.FINISHED, bench.output("a")
        told = json.loads((home / "jobs" / "a" / "runs" / "0000" / "told.json").read_text())
        assert told["uid"] == entry.pw_uid and 0 not in told["groups"] and told["home"] == entry.pw_dir
        assert [told[path] for path in secrets] == ["PermissionError"] * 3
        assert (home / "jobs" / "a").stat().st_uid == entry.pw_uid
    finally:
        engine.close()


def test_accounts_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no account 'no-such-user'"):
        of_job(SUBMITTER, "no-such-user")
    with pytest.raises(InputError, match="must not run as root"):
        of_job("root", "ann")
    assert of_job(None, "ann") is None
    monkeypatch.setattr(accounts.os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="only root"):
        check("nobody")
