"""One worker of a job that runs any program: it starts the program and gives it swell's three signals.

    python -m swell.train.start.command PROGRAM ARGUMENTS...

The signals are environment variables and one file (docs/guides/any-command.md). This process stays beside the
program, ends it with the job, and ends as it ended. It imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from swell.train.agent import children
from swell.train.agent.errors import FENCED
from swell.train.agent.jobdir import JobDirectory, own_host
from swell.train.agent.regular import read_regular
from swell.train.agent.restarts import SAVED
from swell.train.start.bootstrap import note_begun, watch_lifeline

POLL_S = 0.05
MEET_S = 120.0
"""How long a worker waits for rank 0 of its generation to be started."""
_PR_SET_PDEATHSIG = 1
_OWN = ("JOB_DIR", "WORKER", "LAUNCH", "ERROR_FILE", "LIFELINE", "EXIT_FILE", "BEGUN_FILE", "HOST")
"""Variables (without SWELL_) between swell's own processes. The program must not take itself for one."""


def environment(
    given: Mapping[str, str], *, rank: int, workers: int, generation: int, meet: str, state: Path, save: Path
) -> dict[str, str]:
    """The program's environment: what the worker was given, with the signals in place of swell's own."""
    host, _, port = meet.partition(":")
    out = {name: value for name, value in given.items() if name not in {f"SWELL_{own}" for own in _OWN}}
    return out | {
        "SWELL_WORKERS": str(workers),
        "SWELL_RANK": str(rank),
        "SWELL_GENERATION": str(generation),
        "SWELL_MEET": meet,
        "SWELL_STATE": str(state),
        "SWELL_SAVE_NOW": str(save),
        # The names that launchers of distributed programs use.
        "WORLD_SIZE": str(workers),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def meeting_place(job: JobDirectory, number: int, rank: int, host: str) -> str:
    """Host and port where ranks of a generation may meet: rank 0 chooses a port, the others wait for it."""
    if rank == 0:
        with socket.create_server((host, 0)) as probe:
            job.write_rendezvous(number, host, probe.getsockname()[1])
    deadline = time.monotonic() + MEET_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            where, port = read_regular(job.rendezvous_file(number)).decode().split()
            return f"{where}:{int(port)}"
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 of generation {number} did not start in {MEET_S:g} s")
        time.sleep(POLL_S)


def _end_with_parent() -> None:
    """In the new process: be killed when the process that started it is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def run(command: list[str], env: Mapping[str, str], save: Path) -> int:
    """Run the program to its end; its exit code, negative if a signal ended it."""
    name = env.get("SWELL_SAVE_SIGNAL", "")
    wanted = getattr(signal, f"SIG{name.removeprefix('SIG')}") if name else None
    program = subprocess.Popen(command, env=env, preexec_fn=_end_with_parent)
    note_begun()
    watch_lifeline()  # only now: a process with threads should not run `preexec_fn`
    while True:
        try:
            return program.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if wanted is not None and save.exists():
                program.send_signal(wanted)
                wanted = None


def main() -> int:
    """Run the program whose path and arguments are given, as this worker of its job."""
    worker, job = os.environ["SWELL_WORKER"], JobDirectory(Path(os.environ["SWELL_JOB_DIR"]))
    children.set_name(f"swell-{worker}")
    config = job.config()
    number, members = job.current_generation()
    if config.launch != os.environ.get("SWELL_LAUNCH") or worker not in members:
        return FENCED  # the job has gone on without this worker
    rank, state = members.index(worker), Path(config.checkpoints or job.path / "checkpoints")
    state.mkdir(parents=True, exist_ok=True)
    host = own_host(config)
    try:
        meet = meeting_place(job, number, rank, host)
    except TimeoutError:
        return SAVED
    save = job.save_file(number)
    env = environment(
        os.environ, rank=rank, workers=len(members), generation=number, meet=meet, state=state, save=save
    )
    env["SWELL_SAVE_EVERY_S"] = f"{60.0 if config.checkpoint_s is None else config.checkpoint_s:g}"
    try:
        code = run(sys.argv[1:], env, save)
    except OSError as error:
        sys.stderr.write(f"{sys.argv[1]} cannot be started: {error}; is it executable?\n")
        return 126
    except AttributeError:
        given = env["SWELL_SAVE_SIGNAL"]
        sys.stderr.write(f"SWELL_SAVE_SIGNAL: got {given!r}, must be the name of a signal such as TERM\n")
        return 126
    if code < 0:  # end in the same way, so that the job's other processes see what happened
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
