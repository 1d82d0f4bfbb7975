"""What a launcher is asked to run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.replicas import check_multiple

HASH_SEED = "PYTHONHASHSEED"
"""Python reads it when a process begins, so it is set for the processes that workers are forked from."""
PER_GPU = "SWELL_PER_GPU"
"""The variable that tells a worker how many workers share its GPU."""
BEGUN = "SWELL_BEGUN_FILE"
"""The variable with the path of a file that a worker makes once it begins to run the script."""


def same_hashes(environment: Mapping[str, str]) -> dict[str, str]:
    """The setting by which sets of texts have one order in all processes; what is set already stays."""
    return {HASH_SEED: environment.get(HASH_SEED, "0")}


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """What `swell run` was asked for."""

    script: str
    arguments: list[str] = field(default_factory=list)
    minimum: int = 1
    maximum: int = 1
    workers: int | None = None
    """The number of workers to begin with; the maximum if not given."""
    slots: list[int] | None = None
    """The slots of the first workers, one for each; None for a job without slots."""
    spares: int = 0
    """Prepared workers kept waiting beyond those that train."""
    name: str | None = None
    directory: Path | None = None
    silent_after_s: float = 5.0
    gather_s: float = 1.0
    threads: int | None = None
    """CPU threads for each worker; the cores divided by the maximum if not given."""
    cold: bool = False
    """Start every worker as a new Python process instead of forking a prepared one."""
    env: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Further entries of job.json, for the runtime inside the workers."""

    @property
    def command(self) -> bool:
        """Whether the script is any program, resized by save and restart (docs/guides/any-command.md)."""
        return bool(self.settings.get("command"))

    @property
    def path(self) -> Path:
        """The script's absolute path. Links to programs stay: a virtual environment's Python is one."""
        return Path(self.script).absolute() if self.command else Path(self.script).resolve()

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(
                f"workers: got {self.minimum}:{self.maximum}, must be MIN:MAX with 1 <= MIN <= MAX"
            )
        if self.workers is not None and not self.minimum <= self.workers <= self.maximum:
            raise ValueError(
                f"workers: cannot begin with {self.workers}, allowed are {self.minimum} to {self.maximum}"
            )
        size = int(self.settings.get("workers_per_replica", 1))
        for count in (self.minimum, self.maximum, self.workers or size):
            check_multiple(count, size)
        check_multiple(self.spares, size, "spares")
        if self.silent_after_s <= 0:
            raise ValueError(f"silent_after_s: got {self.silent_after_s}, must be positive")
        if not Path(self.script).is_file():
            raise ValueError(f"script: there is no file {self.script}")

    def order(self, worker: str, job: JobDirectory, launch: str) -> dict[str, Any]:
        """What the zygote must know to become this worker."""
        threads = self.threads or max(1, (os.cpu_count() or 1) // self.maximum)
        env = {
            "SWELL_JOB_DIR": str(job.path),
            "SWELL_WORKER": worker,
            "SWELL_LAUNCH": launch,
            "SWELL_ERROR_FILE": str(job.path / "logs" / f"{worker}.error"),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            **(same_hashes(os.environ) if self.settings.get("auto") else {}),
            **self.env,
        }
        return {
            "spawn": worker,
            "env": env,
            "cwd": str(Path.cwd()),
            "log": str(job.log(worker)),
            "threads": threads,
            "module": f"swell.train.start.{'command' if self.command else 'bootstrap'}",
            "script": str(self.path),
            "arguments": self.arguments,
            "sharded": int(self.settings.get("workers_per_replica", 1)) > 1,
        }
