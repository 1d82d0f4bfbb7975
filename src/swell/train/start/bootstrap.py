"""Run the user's script as one worker: arguments, output, the traceback of a failure, the exit code.

python -m swell.train.start.bootstrap script.py arguments...

That is a cold start; the zygote calls `run` after a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from swell.train.agent.errors import RESPAWN
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.run_config import BEGUN
from swell.train.agent.saying import first_to_say
from swell.train.data import room
from swell.train.replicas import ending
from swell.train.start import plain


def watch_lifeline() -> None:
    """End this worker and its child processes when the process that holds its lifeline is gone.

    That process is the launcher or, on another host, the one that SWELL_LIFELINE points to.
    """
    given = os.environ.get("SWELL_LIFELINE")
    lifeline = Path(given or Path(os.environ.get("SWELL_JOB_DIR", "")) / "lifeline")
    if not lifeline.exists():
        return
    descriptor = os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)

    def wait() -> None:
        while os.read(descriptor, 64):
            pass
        own_group = os.getpgid(0) == os.getpid()
        (os.killpg if own_group else os.kill)(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="swell-lifeline", daemon=True).start()


class ForgivingFile(io.FileIO):
    """A file whose full disk costs what is written to it, and not the process that writes."""

    def write(self, data: Any) -> int:
        """Write, or drop what there is no room for."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return len(memoryview(data).cast("B"))


def forgive_full_disks() -> None:
    """Let `print` and tracebacks survive a full disk: training must go on, and its output is worth less."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with contextlib.suppress(OSError, ValueError):
            getattr(sys, name).flush()
        raw = ForgivingFile(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)


def note_begun() -> None:
    """Note that this process could be started here; from now on a failure is the script's."""
    if target := os.environ.pop(BEGUN, None):
        with contextlib.suppress(OSError):
            Path(target).touch()


def run(script: str, arguments: list[str]) -> int:
    """Run `script` as `__main__`; return its exit code. A traceback goes to stderr and SWELL_ERROR_FILE."""
    watch_lifeline()
    forgive_full_disks()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with _watched(script):
            if Path(script).is_file():
                note_begun()
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)  # noqa: T201 - as python itself does
            return 1
        return stop.code or 0
    except BaseException as error:
        if (samples := _too_large(error)) is not None:
            sys.stderr.write(
                f"{error}\na batch of {samples} does not fit the memory; starting again with less\n"
            )
            return RESPAWN
        if ending.lost_a_mate(error):
            sys.stderr.write(
                f"another worker of this replica is gone; the replica is started again. What torch said: "
                f"{type(error).__name__}: {error!s:.500}\n"
            )
            ending.wait_for_the_end()
            return RESPAWN
        text = "".join(traceback.format_exception(type(error), error, _users_part(error)))
        directory = os.environ.get("SWELL_JOB_DIR")
        if not directory or first_to_say(Path(directory), text):
            sys.stderr.write(text)
        else:
            sys.stderr.write("the same error as another worker's ended this one\n")
        target = os.environ.get("SWELL_ERROR_FILE")
        if target:
            with contextlib.suppress(OSError):
                Path(target).write_text(text)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _watched(script: str) -> AbstractContextManager[None]:
    """The context that makes an unmodified script a worker, for a job with the setting `auto`.

    For other jobs: the context that recognises an unmodified script, which needs that setting.
    """
    directory, worker = os.environ.get("SWELL_JOB_DIR"), os.environ.get("SWELL_WORKER")
    if not directory or not worker:
        return nullcontext()
    if not JobDirectory(Path(directory)).config().auto:
        return plain.recognised(Path(script), Path(directory))
    from swell.train.auto import watch as auto

    return auto.watched(Path(script), Path(directory), worker)


def _too_large(error: BaseException) -> int | None:
    """The batch whose forward pass ran out of memory, if a worker with smaller pieces may succeed."""
    directory, worker = os.environ.get("SWELL_JOB_DIR"), os.environ.get("SWELL_WORKER")
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if kind is None or not isinstance(error, kind) or not directory or not worker:
        return None
    return room.give_up(Path(directory), worker)


def _users_part(error: BaseException) -> TracebackType | None:
    """The traceback without the frames that only started the script."""
    tb = error.__traceback__
    skip = (__file__, runpy.__file__, "<frozen runpy>")
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in skip:
        tb = tb.tb_next
    return tb


def leave(code: int) -> None:
    """End a forked process as the interpreter would, without returning into its parent's code.

    The exit code is also written to SWELL_EXIT_FILE, for readers without a message from the forking process.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        target = os.environ.get("SWELL_EXIT_FILE")
        if target:
            with contextlib.suppress(OSError):
                Path(target).write_text(str(code & 0xFF))
        os._exit(code & 0xFF)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
