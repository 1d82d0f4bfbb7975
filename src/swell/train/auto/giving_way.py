"""A worker that cannot follow the others says why, and leaves; the job goes on without it.

It never ends the job, and never ends without a word: an event `could_not_follow` names the reason and the
line of the script. Another worker comes in its place. After three in a row the job goes on with the workers
that it has, with the last one's reason; a worker that has trained with the others for a while ends the row.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from swell.train.agent.client import JobClient
from swell.train.agent.errors import RESPAWN
from swell.train.auto import held
from swell.train.sync.link import Link

TRIES = 3
"""After so many workers in a row that could not follow, the job goes on with those it has."""
LASTING_STEPS = 50
"""A worker that has made so many steps with the others could follow."""


def give_way(
    link: Link, why: str, *, steps: int = 0, error: BaseException | None = None, counts: bool = True
) -> NoReturn:
    """End this worker, which cannot follow the others because `why`, `steps` steps into the job.

    Without `counts` another worker will be able to follow, so this one does not count.
    """
    where = _line_of(error.__traceback__) if error is not None else _present_line()
    at = f" ({where})" if where else ""
    if counts:
        say(f"worker {link.name} could not follow the others: {why}{at}")
    tries = _count(link) if counts else 0
    link.event("could_not_follow", step=steps, why=why, where=where, tries=tries)
    if tries >= TRIES:
        _confine(link, why)
    link.flush()
    os._exit(RESPAWN)


def say(line: str) -> None:
    """Tell people, past the script's own output, which only the leader's reaches."""
    with contextlib.suppress(OSError, ValueError):
        sys.__stderr__.write(f"--auto: {line}\n")  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]


def what_ended(error: BaseException) -> str:
    """The exception with which a script ended, in one line."""
    if isinstance(error, SystemExit):
        return f"its script ended with {error.code}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def stayed(link: Link) -> None:
    """A newcomer has trained with the others for a while: those before it that could not do not count."""
    with contextlib.suppress(OSError):
        _note(link).unlink()


def _count(link: Link) -> int:
    """How many workers in a row could not follow, with this one."""
    note = _note(link)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with note.open("a") as file:
            file.write(f"{link.name}\n")
        return len(note.read_text().splitlines())
    except OSError:
        return 1


def _confine(link: Link, why: str) -> None:
    """Have the job go on with the workers that it has."""
    with contextlib.suppress(Exception), JobClient(link.directory, wait_s=5.0) as client:
        workers = max(len([m for m in client.status()["members"] if m != link.name]), 1)
        reason = f"{TRIES} workers in a row could not follow it ({why})"
        say(f"the job goes on with {workers} {'worker' if workers == 1 else 'workers'}: {reason}")
        link.event("confined", workers=workers, reason=reason)  # may end this worker


def _line_of(trace: TracebackType | None) -> str:
    """The innermost line of the script's own code in a traceback."""
    own = [frame for frame in traceback.extract_tb(trace) if held.is_own("", frame.filename)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _present_line() -> str:
    frames = held.script_frames()
    return f"{Path(frames[-1].f_code.co_filename).name}:{frames[-1].f_lineno}" if frames else ""


def _note(link: Link) -> Path:
    return link.directory.path / "private" / "could-not-follow"
