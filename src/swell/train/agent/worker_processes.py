"""Where a job's workers live, as its launcher sees it: on this machine, or on Ray (`engines/ray/workers`)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from swell.train.agent.children import Child
from swell.train.agent.prepared import ZygoteProcess
from swell.train.agent.protocol import Exited, Lost, Unstartable
from swell.train.agent.run_config import RunConfig

_PREPARATIONS = 3
"""How often a zygote that was killed before it could prepare itself is started again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot go on."""

    code: int
    reason: str
    aloud: bool = False
    """Whether the user is told at once, before the launcher has ended everything."""


News = Exited | Lost | Unstartable | Failed


class Workers(Protocol):
    """What a launcher asks of the place where its workers live. No call waits for a worker."""

    def start(self, config: RunConfig, logs: Path) -> None:
        """Get ready: the job runs from now on."""

    def names(self) -> list[str]:
        """The workers that were started and have not ended."""

    def spawn(self, order: dict[str, Any], slot: int | None) -> None:
        """Start the worker that the order describes (see `RunConfig.order`)."""

    def kill(self, worker: str) -> None:
        """End a worker; nothing happens if there is no such one."""

    def kill_all(self) -> None:
        """End all workers, because the job is over."""

    def watched(self) -> list[Any]:
        """What can be read from when there may be news."""

    def hear(self) -> list[News]:
        """What happened since the last call."""

    def child_ended(self, pid: int, code: int, *, again: bool) -> list[News]:
        """A child of this process ended: what that means. `again`: the job goes on."""

    def close(self) -> None:
        """End what is left."""


class LocalWorkers:
    """Workers as processes of this machine, each a process group of its own.

    A script that imports torch is run by forks of a zygote. Workers survive their zygote, as children of the
    launcher; only those that it was just starting do not.
    """

    def __init__(self, slot_env: Callable[[int], Mapping[str, str]] = lambda slot: {}) -> None:
        """`slot_env`: the environment variables that a worker gets because of its slot."""
        self._slot_env = slot_env
        self._pids: dict[str, int] = {}
        """Of every worker process that exists (0: being started)."""
        self._doomed: set[str] = set()
        """Workers to be killed as soon as they have started."""
        self._children: dict[int, Child] = {}
        """Those that no zygote started. A `Popen` that nobody holds might take its child's exit code away."""
        self._zygote: ZygoteProcess | None = None
        self._unprepared = 0
        """How many zygotes in a row were killed before they had started a worker."""

    def start(self, config: RunConfig, logs: Path) -> None:
        """Start the zygote, which is for scripts that import torch."""
        if not (config.cold or config.command or importlib.util.find_spec("torch") is None):
            self._zygote = ZygoteProcess(logs / "zygote.log")

    def names(self) -> list[str]:
        """The workers that were started and have not ended."""
        return list(self._pids)

    def spawn(self, order: dict[str, Any], slot: int | None) -> None:
        """Have the zygote fork the worker, or start it as a new process."""
        worker = order["spawn"]
        if slot is not None:
            order["env"] |= self._slot_env(slot)
        self._pids[worker] = 0
        if self._zygote is not None:
            self._zygote.order(order)
        else:
            self._note(worker, self._begin(order, slot))

    def _begin(self, order: dict[str, Any], slot: int | None) -> Child:
        with Path(order["log"]).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", order["module"], order["script"], *order["arguments"]],
                env={**os.environ, **order["env"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def _note(self, worker: str, child: Child) -> None:
        self._pids[worker] = child.pid
        self._children[child.pid] = child

    def kill(self, worker: str) -> None:
        """Kill a worker and the processes that it started."""
        pid = self._pids.get(worker)
        if pid:
            _kill_group(pid)
        elif pid == 0:
            self._doomed.add(worker)

    def kill_all(self) -> None:
        """Kill all workers."""
        for worker in self.names():
            self.kill(worker)
        if self._zygote is not None and not self._zygote.alive and not any(self._pids.values()):
            self._pids.clear()  # those that it was to start

    def watched(self) -> list[Any]:
        """The zygote, while there is one."""
        return [self._zygote] if self._zygote is not None and self._zygote.alive else []

    def hear(self) -> list[News]:
        """Hear from the zygote which workers have started and ended."""
        news: list[News] = []
        for message in self._zygote.hear() if self._zygote is not None else []:
            if "started" in message:
                worker = message["started"]
                self._pids[worker] = int(message["pid"])
                if worker in self._doomed:
                    self._doomed.discard(worker)
                    self.kill(worker)
            elif "exited" in message and self._pids.get(message["exited"]) == message["pid"]:
                news.append(self._exited(message["exited"], int(message["code"])))
        return news

    def _exited(self, worker: str, code: int) -> Exited:
        if pid := self._pids.pop(worker, 0):
            _kill_group(pid)  # loader processes of a killed worker
        return Exited(worker, code)

    def child_ended(self, pid: int, code: int, *, again: bool) -> list[News]:
        """The zygote or a worker ended, if it was one."""
        if self._zygote is not None and pid == self._zygote.process.pid:
            self._zygote.process.returncode = code
            return self._lost_zygote(self._zygote, code, again=again)
        if (child := self._children.pop(pid, None)) is not None:
            child.returncode = code
        return [self._exited(name, code) for name, its in list(self._pids.items()) if its == pid]

    def _lost_zygote(self, lost: ZygoteProcess, code: int, *, again: bool) -> list[News]:
        """Start the next zygote, unless the job is over or this one could not prepare itself."""
        news = self.hear()
        prepared = lost.spoke
        lost.close()
        if not again:
            return news
        self._unprepared = 0 if prepared else self._unprepared + 1
        if not prepared and (code >= 0 or self._unprepared > _PREPARATIONS):
            log = lost.log.read_text(errors="replace").rstrip()[-4000:]
            end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            said = log or "nothing was said"
            return [*news, Failed(1, f"the process that prepares workers failed ({end}):\n{said}")]
        self._zygote = ZygoteProcess(lost.log)
        starting = [name for name, pid in self._pids.items() if pid == 0]
        return [*news, *(self._exited(name, -int(signal.SIGKILL)) for name in starting)]

    def close(self) -> None:
        """End the zygote."""
        if self._zygote is not None:
            self._zygote.close()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
