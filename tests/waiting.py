"""Waiting for something to become true, instead of sleeping for as long as it usually takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Answer = TypeVar("Answer")


def wait_until(
    condition: Callable[[], Answer],
    timeout_s: float,
    what: str | Callable[[], object],
    *,
    poll_s: float = 0.02,
) -> Answer:
    """Call `condition` until its answer is true and return that answer; fail after `timeout_s` seconds.

    `what` completes the sentence "waited 30 s for ...". A function is called only on failure, so that the
    message can show the state at that moment.
    """
    give_up_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > give_up_s:
            raise AssertionError(f"waited {timeout_s:g} s for {what() if callable(what) else what}")
        time.sleep(poll_s)
    return answer


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though whoever adopted it may not have looked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
