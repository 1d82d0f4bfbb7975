"""This machine as a site: real worker processes on its GPUs, or on CPU slots where there are none.

Where there are GPUs, the worker on a slot has the GPU of that slot, or its part of one that several share.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swell.domain import ANY_GPU, Cluster, InputError, Placement, clean_type
from swell.engines import groups, wall
from swell.engines.accounts import SUBMITTER, Account, no_script, of_job
from swell.engines.base import Launch
from swell.engines.nursery import Nursery
from swell.engines.processes import for_jobs, sweep
from swell.engines.supervised_job import SupervisedJob
from swell.train.agent.children import Child

log = logging.getLogger(__name__)

TRIAL_S = 30.0
"""How long the first job waits to learn whether this machine allows a wall."""


def detect_gpus() -> int:
    """Number of GPUs that the driver of this machine lists; 0 without a driver."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def detect_gpu_type() -> str:
    """The type of this machine's GPUs, such as 'h200'; 'cpu' without GPUs, 'gpu' if they differ."""
    found = {
        type_of_model(line.partition(":")[2])
        for path in Path("/proc/driver/nvidia/gpus").glob("*/information")
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith("Model:")
    }
    if not detect_gpus():
        return "cpu"
    return found.pop() if len(found) == 1 else ANY_GPU


def type_of_model(model: str) -> str:
    """A GPU type in the words of Ray, in lower case, from what the driver calls the model."""
    words = [word for word in model.lower().split() if word not in ("nvidia", "tesla", "geforce", "quadro")]
    if not words:
        return ANY_GPU
    series = words[0] in ("rtx", "gtx", "titan") and len(words) > 1
    return clean_type("-".join(words[:2]) if series else words[0].split("-")[0])


def try_wall(account: str | None = None) -> subprocess.Popen[str]:
    """Begin to find out whether this machine allows a wall around jobs, of this account."""
    words = [sys.executable, "-m", "swell.engines.supervisor", "--trial", *filter(None, [account])]
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def wall_trouble(trial: subprocess.Popen[str], home: Path) -> str:
    """Why jobs of this home cannot be walled off; empty if they can."""
    try:
        _, said = trial.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        trial.kill()
        trial.wait()
        return f"the trial took longer than {TRIAL_S:g} s"
    if Path(sys.prefix).resolve().is_relative_to(home.resolve()):
        return f"the Python of jobs, {sys.prefix}, is inside the home"
    return "" if trial.returncode == 0 else said.strip() or f"exit code {trial.returncode}"


class LocalSite:
    """Workers as processes of this machine."""

    name = "local"

    def __init__(
        self,
        home: Path,
        nodes: str | None = None,
        slots: int | None = None,
        per_gpu: int = 1,
        *,
        walled: bool = False,
        run_as: str | None = None,
        pass_env: tuple[str, ...] = (),
    ) -> None:
        """`nodes`: virtual nodes, such as '2x4'. Without it there is one node with `slots` slots, by default
        `per_gpu` for each GPU, or one for each core if there are no GPUs. `run_as`: the account that jobs run
        as, 'submitter' for that of each job's owner, None for this process's. `pass_env`: variables of the
        platform's environment that jobs get besides those on the list."""
        if nodes is not None and slots is not None:
            raise InputError("give either nodes or slots, not both", field="nodes")
        if slots is not None and slots < 1:
            raise InputError(f"slots must be at least 1, got {slots}", field="slots")
        self.home = home
        self._gpus, self._per_gpu = detect_gpus(), per_gpu
        if per_gpu < 1 or (per_gpu > 1 and not self._gpus):
            allowed = "at least 1" if self._gpus else "1, because this machine has no GPU"
            raise InputError(f"per_gpu: got {per_gpu}, must be {allowed}", field="per_gpu")
        count = slots or self._gpus * per_gpu or os.cpu_count() or 1
        parsed = Cluster.parse(nodes or f"1x{count}", detect_gpu_type())
        self._cluster = Cluster(tuple(replace(node, per_gpu=per_gpu) for node in parsed.nodes))
        self._walled = walled
        """Whether jobs are kept from the platform and from each other by a wall, where this machine can."""
        self._run_as, self._pass_env = run_as, pass_env
        self._wall_trial: subprocess.Popen[str] | None = None
        self._nursery: Nursery | None = None

    def prepare(self) -> None:
        """Start the nursery, which has to import torch."""
        if self._nursery is None:
            self._nursery = Nursery(self.home / "nursery.log")

    def open(self, poke: Callable[[], None]) -> None:
        """Prepare for the jobs to come."""
        groups.tidy()
        account = None if self._run_as == SUBMITTER else self._run_as
        why_not = "" if self._walled else "--no-wall"
        wall.WallSetting(walled=self._walled, why_not=why_not, account=account).write(self.home)
        if self._walled:
            self._wall_trial = try_wall(account)
        self.prepare()

    def close(self) -> None:
        """End the nursery. Jobs go on."""
        if self._nursery is not None:
            self._nursery.close()

    def look(self, jobs: Sequence[SupervisedJob], now_s: float) -> bool:
        """Have a nursery that was killed come back. The nodes never change here."""
        if self._nursery is not None:
            self._nursery.renew()
        return False

    # -- the slots ---------------------------------------------------------------------------------------

    def cluster(self) -> Cluster:
        """The nodes. They never change here."""
        return self._cluster

    def usable(self, slots: Placement) -> Placement:
        return slots

    def retired(self) -> frozenset[int]:
        return frozenset()

    # -- the jobs ----------------------------------------------------------------------------------------

    def check(self, launch: Launch) -> None:
        """Refuse jobs with requirements of their own, because all workers share this machine's Python; and
        jobs of users without the account that their jobs would run as."""
        account, script = self.account(launch.owner), launch.workdir / launch.request.script
        if (account is not None and not account.can_read(script)) or self._hides(launch, script):
            raise no_script(script)  # as if it were not there: whether it is, is none of the user's business
        if launch.request.pip:
            raise InputError(
                "pip: the local engine runs jobs with the packages that are installed here; install "
                f"{' '.join(launch.request.pip)} beside swell, or use 'swell up --engine ray'",
                field="pip",
            )

    def account(self, owner: str) -> Account | None:
        """The account that jobs of this user run as; None for the platform's own."""
        return of_job(self._run_as, owner)

    def may_start(self, job: SupervisedJob) -> bool:
        """Wait for a nursery that is being prepared, and for processes of an earlier run that still end."""
        nursery = None if job.runs_any_command else self._nursery
        if nursery is not None and nursery.in_preparation:
            return False  # the job starts sooner from there than without it
        return groups.end_orphans(job.directory)

    def order_extras(self) -> dict[str, Any]:
        """The GPUs, and how many slots each of them is."""
        return {"gpus": self._gpus, "per_gpu": self._per_gpu}

    def start_supervisor(self, job: SupervisedJob) -> Child:
        """Fork the supervisor from the nursery, or start it as a new process; in a group of its own."""
        env = job.environment(for_jobs(os.environ, self._pass_env))
        if groups.where() is not None:
            env[groups.VARIABLE] = groups.beginning(job.directory)
        if self._can_wall():
            env[wall.VARIABLE] = json.dumps(self._hidden())
        child: Child | None = None
        if self._nursery is not None and not job.runs_any_command:
            child = self._nursery.supervisor(job.directory, env)
        child = child or job.spawn_supervisor(env)
        try:
            groups.enter(job.directory, child.pid)  # the supervisor waits for this
        except OSError:
            child.kill()
            raise
        return child

    def abandoned(self, job: SupervisedJob) -> bool:
        """Never: this machine ends with all of its processes."""
        return False

    def sweep(self, job: SupervisedJob) -> bool:
        """Kill what is left of a job: what is in its control group, and what carries its mark."""
        return groups.end_orphans(job.directory) and sweep(job.directory)

    # -- the wall ----------------------------------------------------------------------------------------

    def _hides(self, launch: Launch, script: Path) -> bool:
        """Whether the wall would hide a job's script from it."""
        real = script.resolve()
        if not self._walled or not real.is_relative_to(self.home.resolve()):
            return False
        visible = wall.shown(self.home, launch.job_dir, [launch.workdir, script])
        return not any(real.is_relative_to(path) for path in visible)

    def _can_wall(self) -> bool:
        """Whether jobs are walled off: they are to be, and this machine allows it."""
        if self._wall_trial is not None:
            why_not = wall_trouble(self._wall_trial, self.home)
            self._wall_trial, self._walled = None, not why_not
            if why_not:
                log.warning("jobs are not walled off from swell (docs/guides/security.md): %s", why_not)
        return self._walled

    def _hidden(self) -> dict[str, Any]:
        """The home that jobs must not see, and what they must not change: the groups they are found by."""
        mounted = groups.mount_point() if groups.where() is not None else None
        return {
            "home": str(self.home.resolve()),
            "read_only": [] if mounted is None else [str(mounted)],
        }
