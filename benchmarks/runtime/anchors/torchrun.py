"""torchrun's elastic mode: all workers are started again after a death or a join, from the last checkpoint.

By default torchrun keeps one store for the workers of all restarts. A worker with gloo that starts again
can read there where a worker of the previous start listened, and it fails because nobody listens there
any more; in the end torchrun gives up (https://github.com/pytorch/pytorch/issues/135712). torch's own
switch against this is TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. The figures are taken with it, and
`default_settings` says what happens without it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

from benchmarks.runtime.anchors.rows import Change, Failed, summary
from benchmarks.runtime.anchors.trial import WAIT_S, Trial, attempt

SCRIPT = ["-m", "benchmarks.runtime.anchors.torchrun_script"]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
DEFAULT_WAIT_S = 20.0
"""How long a death with the default settings is waited for; otherwise it takes some 4 s."""


def measure(rounds: int = 2) -> dict[str, Any]:
    """Deaths and a join with a store for each restart, and one death with torchrun's default settings."""
    deaths = [attempt(lambda: _death(OWN_STORE, WAIT_S)) for _ in range(rounds)]
    joins = [attempt(_join)]
    by_default = attempt(lambda: _death({}, DEFAULT_WAIT_S))
    outcome = str(by_default) if isinstance(by_default, Failed) else f"a pause of {by_default.pause_s:.1f} s"
    return {"death": summary(deaths), "join": summary(joins), "default_settings": {"death": outcome}}


def _death(env: dict[str, str], wait_s: float) -> Change:
    """One of the three workers of one torchrun is killed."""
    with Trial(wait_s=wait_s) as trial:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=3"]
        trial.start(*command, *SCRIPT, **env)
        trial.settled("rank0", 3)
        victim = trial.settled("rank1", 3).pid
        killed_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return trial.change("rank0", killed_s, 3, restart=True)


def _join() -> Change:
    """A third torchrun comes to two that train, each with one worker: torchrun grows by whole nodes."""
    with Trial() as trial:
        command = ["-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--rdzv-id=anchor"]
        # How long the first two wait for a third before they begin; it has no part in the pause of the join.
        command += ["--rdzv-conf=last_call_timeout=1"]
        for _ in range(2):
            trial.start(*command, *SCRIPT, **OWN_STORE)
        trial.settled("rank0", 2)
        asked_s = time.monotonic()
        trial.start(*command, *SCRIPT, **OWN_STORE)
        return trial.change("rank0", asked_s, 3, restart=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
