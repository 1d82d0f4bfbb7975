"""Run one job on this machine: coordinator, zygote and workers, from the first process to the last.

The launcher is the job's *agent*: it starts and ends workers when the coordinator says so and reports their
exits. It restarts the coordinator when that dies, and shows the workers' output. It leaves no process behind:
every worker is a process group of its own, and all of them hold the end of a pipe that closes when the
launcher dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swell.train.agent import children
from swell.train.agent.jobdir import JobDirectory, home
from swell.train.agent.lines import said
from swell.train.agent.outputs import Outputs
from swell.train.agent.polling import readable
from swell.train.agent.prepared import ZygoteProcess, end
from swell.train.agent.regular import read_regular
from swell.train.agent.run_config import RunConfig
from swell.train.agent.tracker import Tracker
from swell.train.agent.wire import Connection, Message, WireError, new_secret

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
_PREPARATIONS = 3
"""How often a zygote that was killed before it could prepare itself is started again."""


def _beginning(path: Path) -> str:
    """The beginning of a file that a worker wrote."""
    try:
        return read_regular(path).decode(errors="replace")
    except OSError as error:
        return str(error)


class Launcher:
    """One job's processes."""

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        self.config = config
        self.name = config.name or f"{Path(config.script).stem}-{secrets.token_hex(2)}"
        self.path = config.directory or home() / "jobs" / self.name
        self.say = say
        self._launch = secrets.token_hex(8)
        self.job = JobDirectory.create(
            self.path,
            {
                "name": self.name,
                "launch": self._launch,
                "secret": new_secret(),
                "script": str(config.path),
                "minimum": config.minimum,
                "maximum": config.maximum,
                "target": config.workers or config.maximum,
                "slots": config.slots,
                "spares": config.spares,
                "silent_after_s": config.silent_after_s,
                "gather_s": config.gather_s,
                **config.settings,
            },
        )
        self._workers: dict[str, int] = {}
        """Name -> pid of every worker process that exists (0: being started)."""
        self._doomed: set[str] = set()
        self._cold: dict[int, str] = {}
        self._coordinator: children.Child | None = None
        self._connection: Connection | None = None
        self._zygote: ZygoteProcess | None = None
        self._tracker: Tracker | None = None
        lifeline = self.path / "lifeline"
        lifeline.unlink(missing_ok=True)
        os.mkfifo(lifeline)
        # Workers open the reading end, which reaches its end of file when this process is gone.
        self._lifeline_w = os.open(lifeline, os.O_RDWR)
        self._unprepared = 0
        """How many zygotes in a row were killed before they had started a worker."""
        self._finish: tuple[int, str] | None = None
        self._unsent: list[Message] = []
        self._outputs = Outputs(self.path / "logs")
        self.failure = ""
        """The traceback of the first worker that failed, or ''."""
        self._last_lines: dict[str, str] = {}
        """Of a job that runs any program: the last line that each worker printed."""
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)

    @property
    def reason(self) -> str:
        """Why the job is over."""
        return self._finish[1] if self._finish is not None else ""

    # ------------------------------------------------------------------ life

    def run(self, each_turn: Callable[[], None] = lambda: None) -> int:
        """Run the job to its end and return its exit code. `each_turn` is called several times a second."""
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

        def stop(number: int, _frame: object) -> None:
            self._finish = self._finish or (128 + number, f"stopped by {signal.Signals(number).name}")

        handlers: dict[int, Any] = {
            number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w)
        try:
            plain = self.config.cold or self.config.command or importlib.util.find_spec("torch") is None
            if not plain:  # the zygote is for scripts that import torch
                self._zygote = ZygoteProcess(self.job.path / "logs" / "zygote.log")
            self._start_coordinator()
            if self.config.settings.get("track"):
                self._tracker = Tracker(self.path, self.config.env)
            while self._finish is None:
                self._turn(0.2)
                each_turn()
            code, reason = self._finish
            return self._close(code, reason)
        finally:
            self._end_everything()
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _turn(self, timeout_s: float) -> None:
        watch: list[Any] = [self._wake_r]
        if self._connection is not None:
            watch.append(self._connection)
        if self._zygote is not None and self._zygote.alive:
            watch.append(self._zygote)
        with contextlib.suppress(InterruptedError):
            ready = readable(watch, timeout_s)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            if self._zygote in ready:
                self._hear_zygote()
            if self._connection in ready:
                self._hear_coordinator()
        self._reap()
        self._connect()
        self._show_output()

    # ------------------------------------------------------------------ coordinator

    def _start_coordinator(self) -> None:
        log = self.job.path / "logs" / "coordinator.log"
        self._coordinator = children.start(
            "swell.train.agent.coordinator", [str(self.path), self._launch], log
        )
        self._connect()

    def _connect(self) -> None:
        if self._connection is not None or self._coordinator is None or self._finish is not None:
            return
        try:
            connection = Connection.to_job(self.job.address(), self.job.config(), timeout_s=2.0)
            connection.send({"type": "hello", "role": "agent", "alive": list(self._workers)})
            connection.receive(2.0)
        except (OSError, WireError, TimeoutError):
            time.sleep(0.01)
            return
        self._connection = connection
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._tell(message)

    def _hear_coordinator(self) -> None:
        assert self._connection is not None
        try:
            messages = self._connection.pending()
        except (OSError, WireError):
            self._connection.close()
            self._connection = None
            return
        for message in messages:
            kind = message["type"]
            if kind == "spawn":
                self._spawn(str(message["worker"]), message.get("slot"))
            elif kind == "kill":
                self._kill(str(message["worker"]))
            elif kind == "finish":
                self._finish = self._finish or (int(message["code"]), str(message["reason"]))

    def _tell(self, message: Message) -> None:
        if self._connection is None:
            self._unsent.append(message)
            return
        try:
            self._connection.send(message)
        except OSError:
            self._unsent.append(message)

    # ------------------------------------------------------------------ workers

    def _order(self, worker: str, slot: int | None = None) -> dict[str, Any]:
        return self.config.order(worker, self.job, self._launch)

    def _spawn(self, worker: str, slot: int | None = None) -> None:
        order = self._order(worker, slot)
        self._workers[worker] = 0
        if self._zygote is not None:
            self._zygote.order(order)
            return
        with Path(order["log"]).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", order["module"], order["script"], *order["arguments"]],
                env={**os.environ, **order["env"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        self._workers[worker] = process.pid
        self._cold[process.pid] = worker

    def _kill(self, worker: str) -> None:
        pid = self._workers.get(worker)
        if pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        elif pid == 0:
            self._doomed.add(worker)

    def _exited(self, worker: str, code: int) -> None:
        pid = self._workers.pop(worker, 0)
        if pid:  # loader processes of a killed worker
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        message: Message = {"type": "exited", "worker": worker, "code": code}
        error = self.path / "logs" / f"{worker}.error"
        if code > 0 and error.exists():
            text = f"worker {worker} failed; its traceback:\n{_beginning(error).rstrip()}"
            self.failure = self.failure or text
            message["note"] = f"the script failed in worker {worker}"
        elif code > 0 and self.config.command:
            self._show_output()
            last = self._last_lines.get(worker, "it printed nothing")
            message["note"] = f"the program ended with exit code {code} in worker {worker}: {last:.200}"
        self._tell(message)

    # ------------------------------------------------------------------ zygote

    def _hear_zygote(self) -> None:
        assert self._zygote is not None
        for message in self._zygote.hear():
            if "started" in message:
                worker = message["started"]
                self._workers[worker] = int(message["pid"])
                if worker in self._doomed:
                    self._doomed.discard(worker)
                    self._kill(worker)
            elif "exited" in message and self._workers.get(message["exited"]) == message["pid"]:
                self._exited(message["exited"], int(message["code"]))

    # ------------------------------------------------------------------ processes

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._coordinator is not None and pid == self._coordinator.pid:
                self._coordinator.returncode = code
                if self._finish is None:
                    if self._connection is not None:
                        self._connection.close()
                        self._connection = None
                    self._start_coordinator()
            elif self._tracker is not None and pid == self._tracker.process.pid:
                self._tracker.ended(code, again=self._finish is None)
            elif self._zygote is not None and pid == self._zygote.process.pid:
                self._zygote.process.returncode = code
                self._lost_zygote()
            else:
                worker = self._cold.pop(pid, None) or next(
                    (name for name, p in self._workers.items() if p == pid), None
                )
                if worker is not None and worker in self._workers:
                    self._exited(worker, code)

    def _lost_zygote(self) -> None:
        """Workers survive their zygote, as children of the launcher; those it was just starting do not."""
        assert self._zygote is not None
        self._hear_zygote()
        prepared = self._zygote.spoke
        self._zygote.close()
        if self._finish is not None:
            return
        code = self._zygote.process.returncode or 0
        self._unprepared = 0 if prepared else self._unprepared + 1
        if not prepared and (code >= 0 or self._unprepared > _PREPARATIONS):
            log = self._zygote.log.read_text(errors="replace").rstrip()[-4000:]
            end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._finish = (
                1,
                f"the process that prepares workers failed ({end}):\n{log or 'nothing was said'}",
            )
            return
        self._zygote = ZygoteProcess(self._zygote.log)
        for worker in [name for name, pid in self._workers.items() if pid == 0]:
            self._exited(worker, -int(signal.SIGKILL))

    def _close(self, code: int, reason: str) -> int:
        self._show_output(all_of_it=True)
        last = self.failure.rsplit("\n", 1)[-1]
        if last and not self._outputs.had(last):  # its worker had no time to say it
            self.say(self.failure)
        if code != 0:
            self.say(f"job {self.name}: {reason} (exit code {code}); logs are in {self.path / 'logs'}")
        return code

    def _end_everything(self) -> None:
        self._end_workers()
        if self._tracker is not None:
            self._tracker.close(hurry=self.reason.startswith("stopped by SIG"))
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send({"type": "goodbye"})
            self._connection.close()
        if self._zygote is not None:
            self._zygote.close()
        if self._coordinator is not None and self._coordinator.returncode is None:
            end(self._coordinator)
        os.close(self._lifeline_w)
        for descriptor in (self._wake_r, self._wake_w):
            os.close(descriptor)
        self._outputs.close()

    def _end_workers(self) -> None:
        if self._finish is not None:  # the coordinator would start others in place of those that end now
            self._tell({"type": "ending", "code": self._finish[0], "reason": self._finish[1]})
        deadline = time.monotonic() + _GRACE_S
        while self._workers and time.monotonic() < deadline:
            for worker in list(self._workers):
                self._kill(worker)
            if self._zygote is not None and not self._zygote.alive and not any(self._workers.values()):
                return
            self._turn(0.02)

    # ------------------------------------------------------------------ output

    def _show_output(self, *, all_of_it: bool = False) -> None:
        """Show what the workers printed since the last turn, a bounded amount, or all of it at the end."""
        for worker, lines in self._outputs.new_lines(all_of_it=all_of_it):
            for line in lines:
                self.say(f"{worker}| {line}")
            if self.config.command:
                self._listen(worker, lines)
        if self._tracker is not None:
            for line in self._tracker.said():
                self.say(line)

    def _listen(self, worker: str, lines: list[str]) -> None:
        """Pass on what a program says about itself: of several figures of one kind only the last."""
        figures: dict[str, Any] = {}
        for line in lines:
            self._last_lines[worker] = line or self._last_lines.get(worker, line)
            figures |= said(line) or {}
        if figures:
            self._tell({"type": "said", "worker": worker, "figures": figures})
