"""Ends a worker whose replica lost another worker, without blaming the script.

Imports nothing of torch, because the process may not have loaded it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from swell.train.agent.jobdir import JobDirectory

PATIENCE_S = 2.0
"""How long the worker waits to be ended with its replica, before it ends by itself."""
_TORCHS = ("DistBackendError", "DistNetworkError", "DistStoreError")
"""Errors that torch raises when a collective fails, besides the RuntimeErrors of gloo."""


def lost_a_mate(error: BaseException) -> bool:
    """Whether a script's error means that another worker of its replica is gone."""
    directory, worker = os.environ.get("SWELL_JOB_DIR"), os.environ.get("SWELL_WORKER")
    if not directory or not worker:
        return False
    if JobDirectory(Path(directory)).config().workers_per_replica == 1:
        return False
    return any(_of_a_collective(one) for one in _chain(error))


def wait_for_the_end() -> None:
    """Wait until the coordinator has the reason of the other worker's end: its script may have failed."""
    time.sleep(PATIENCE_S)


def _of_a_collective(error: BaseException) -> bool:
    return type(error).__name__ in _TORCHS or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
