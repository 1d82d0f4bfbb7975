"""swell's three signals for Python programs (docs/guides/any-command.md). Copy this file: no library needed.

Alone, without swell, a program that uses it runs as one worker and keeps its state in ./state.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

workers = int(os.environ.get("SWELL_WORKERS", "1"))
rank = int(os.environ.get("SWELL_RANK", "0"))
meet = os.environ.get("SWELL_MEET", "127.0.0.1:29500")  # host:port where the ranks may find each other
state = Path(os.environ.get("SWELL_STATE", "state"))  # the same directory in every start, on every worker
_every_s = float(os.environ.get("SWELL_SAVE_EVERY_S", "60"))
_next_s = time.monotonic() + _every_s


def save_now() -> bool:
    """Whether swell asks this program to save and leave. Ranks see it at different moments: agree first."""
    return "SWELL_SAVE_NOW" in os.environ and Path(os.environ["SWELL_SAVE_NOW"]).exists()


def save_due() -> bool:
    """Whether it is time for a save, so that little is lost if a worker is killed."""
    return time.monotonic() >= _next_s


def save(name: str, write: Callable[[Path], object]) -> None:
    """Have `write` write a file, and put it in its place whole: a kill leaves the old one or the new one."""
    global _next_s
    state.mkdir(parents=True, exist_ok=True)
    write(state / f"new-{name}")
    (state / f"new-{name}").replace(state / name)
    _next_s = time.monotonic() + _every_s


def progress(done: float, of: float, **figures: float) -> None:
    """Say how far the program is; promises and estimates live on it."""
    print("swell:", *(f"{k}={v:.9g}" for k, v in {"progress": done, "of": of, **figures}.items()), flush=True)


def leave() -> NoReturn:
    """End, to be started again with other workers; a program that is finished ends with exit code 0."""
    sys.exit(75)
