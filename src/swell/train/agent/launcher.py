"""Run one job on this machine: coordinator, zygote and workers, from the first process to the last.

The launcher is the job's *agent*: it starts and ends workers when the coordinator says so and reports their
exits. It restarts the coordinator when that dies, and shows the workers' output. It leaves no process behind:
every worker is a process group of its own, and all of them hold the end of a pipe that closes when the
launcher dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swell.train.agent import protocol
from swell.train.agent.coordinator_process import CoordinatorProcess
from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory, home
from swell.train.agent.lines import said
from swell.train.agent.outputs import Outputs
from swell.train.agent.polling import readable
from swell.train.agent.protocol import Exited, Lost, Unstartable
from swell.train.agent.regular import read_regular
from swell.train.agent.run_config import RunConfig
from swell.train.agent.tracker import Tracker
from swell.train.agent.wire import Message, new_secret
from swell.train.agent.worker_processes import Failed, LocalWorkers, News, Workers

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0


class Launcher:
    """One job's processes."""

    def __init__(self, config: RunConfig, say: Callable[[str], None], workers: Workers | None = None) -> None:
        """`workers`: where the workers live, if they are not plain processes of this machine."""
        self.config = config
        self.name = config.name or f"{Path(config.script).stem}-{secrets.token_hex(2)}"
        self.say = say
        self._launch = secrets.token_hex(8)
        own = protocol.JobFile(
            name=self.name,
            launch=self._launch,
            secret=new_secret(),
            script=str(config.path),
            minimum=config.minimum,
            maximum=config.maximum,
            target=config.workers or config.maximum,
            slots=config.slots,
            spares=config.spares,
            silent_after_s=config.silent_after_s,
            gather_s=config.gather_s,
        )
        settings = protocol.plain(own) | config.settings
        protocol.read(protocol.JobFile, settings)  # of the settings the job's processes read what it declares
        self.job = JobDirectory.create(config.directory or home() / "jobs" / self.name, settings)
        lifeline = self.job.path / "lifeline"
        lifeline.unlink(missing_ok=True)
        os.mkfifo(lifeline)
        # Workers open the reading end, which reaches its end of file when this process is gone.
        self._lifeline_w = os.open(lifeline, os.O_RDWR)
        self._workers = workers if workers is not None else LocalWorkers()
        self._coordinator = CoordinatorProcess(self.job, self._launch, self._workers.names)
        self._tracker: Tracker | None = None
        self._outputs = Outputs(self.job.path / "logs")
        self._woken = -1
        """A descriptor that can be read from after a signal, while the job runs."""
        self._result: tuple[int, str] | None = None
        """The job's exit code and the reason of its end, once it is over."""
        self.last_report: Message = {}
        """The leader's last report, once the job is over."""
        self.failure = ""
        """The traceback of the first worker that failed, or ''."""

    @property
    def reason(self) -> str:
        """Why the job is over."""
        return self._result[1] if self._result is not None else ""

    def _finish(self, code: int, reason: str) -> None:
        """The job is over; later calls change nothing."""
        self._result = self._result or (code, reason)

    # ------------------------------------------------------------------ life

    def run(self, each_turn: Callable[[], None] = lambda: None) -> int:
        """Run the job to its end and return its exit code. `each_turn` is called several times a second."""
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with _signals(lambda it: self._finish(128 + it, f"stopped by {it.name}")) as self._woken:
            try:
                self._workers.start(self.config, self.job.path / "logs")
                self._coordinator.start()
                if self.config.settings.get("track"):
                    self._tracker = Tracker(self.job.path, self.config.env)
                while self._result is None:
                    self._turn(0.2)
                    each_turn()
                return self._close(*self._result)
            finally:
                self._end_everything()

    def _turn(self, timeout_s: float) -> None:
        ready: list[Any] = []
        with contextlib.suppress(InterruptedError):
            watched = [self._woken, *self._coordinator.watched(), *self._workers.watched()]
            ready = readable(watched, timeout_s)
        if self._woken in ready:
            os.read(self._woken, 4096)
        self._take_in(self._workers.hear())
        if any(connection in ready for connection in self._coordinator.watched()):
            for message in self._coordinator.hear():
                self._obey(message)
        self._reap()
        if self._result is None:
            self._coordinator.connect()
        self._show_output()

    def _obey(self, message: protocol.ToLauncher) -> None:
        """Do what the coordinator orders."""
        match message:
            case protocol.Spawn(worker, slot):
                self._workers.spawn(self.config.order(worker, self.job, self._launch), slot)
            case protocol.Kill(worker):
                self._workers.kill(worker)
            case protocol.Finish(code, reason, report):
                self.last_report = report
                self._finish(code, reason)
            case protocol.Error(error):
                self.say(f"the job's coordinator refused a message of its launcher: {error}")

    def _take_in(self, news: list[News]) -> None:
        """Tell the coordinator what became of workers."""
        for one in news:
            match one:
                case Exited(worker, code):
                    self._coordinator.tell(Exited(worker, code, self._note(worker, code)))
                case Lost():
                    self._coordinator.tell(one)
                case Unstartable(worker, node, _, reason):
                    self.say(f"worker {worker} cannot be started on {node}: {reason}")
                    self._coordinator.tell(one)
                case Failed(code, reason, aloud):
                    if aloud and self._result is None:
                        self.say(reason)
                    self._finish(code, reason)

    def _note(self, worker: str, code: int) -> str:
        """Why a worker ended, for the coordinator; empty if it needs no reason."""
        if self.config.command:  # what the program printed last may be figures: they are reported first
            self._show_output(worker, all_of_it=True)
        error = self.job.path / "logs" / f"{worker}.error"
        if code > 0 and error.exists():
            text = f"worker {worker} failed; its traceback:\n{_beginning(error).rstrip()}"
            self.failure = self.failure or text
            return f"the script failed in worker {worker}"
        if code > 0 and self.config.command:
            last = self._outputs.last(worker)
            last = "it printed nothing" if last is None else last
            return f"the program ended with exit code {code} in worker {worker}: {last:.200}"
        return ""

    def _reap(self) -> None:
        """Hear of the ends of children; those whose parent ended are children of this process too."""
        for pid, code in _ended_children():
            again = self._result is None
            try:
                if self._coordinator.child_ended(pid, code, again=again):
                    continue
            except TrainError as error:
                self._finish(1, str(error))
                continue
            if self._tracker is not None and pid == self._tracker.process.pid:
                self._tracker.ended(code, again=again)
            else:
                self._take_in(self._workers.child_ended(pid, code, again=again))

    # ------------------------------------------------------------------ the end

    def _close(self, code: int, reason: str) -> int:
        self._show_output(all_of_it=True)
        last = self.failure.rsplit("\n", 1)[-1]
        if last and not self._outputs.had(last):  # its worker had no time to say it
            self.say(self.failure)
        if code != 0:
            logs = self.job.path / "logs"
            self.say(f"job {self.name}: {reason} (exit code {code}); logs are in {logs}")
        return code

    def _end_everything(self) -> None:
        self._end_workers()
        if self._tracker is not None:
            self._tracker.close(hurry=self.reason.startswith("stopped by SIG"))
        self._coordinator.close()
        self._workers.close()
        os.close(self._lifeline_w)
        self._outputs.close()

    def _end_workers(self) -> None:
        if self._result is not None:  # the coordinator would start others in place of those that end now
            code, reason = self._result
            self._coordinator.tell(protocol.LauncherEnds(code, reason))
        deadline = time.monotonic() + _GRACE_S
        while self._workers.names() and time.monotonic() < deadline:
            self._workers.kill_all()
            if self._workers.names():
                self._turn(0.02)

    # ------------------------------------------------------------------ output

    def _show_output(self, only: str | None = None, *, all_of_it: bool = False) -> None:
        """Show what the workers printed since the last turn, a bounded amount, or all of it at the end."""
        for worker, lines in self._outputs.new_lines(only, all_of_it=all_of_it):
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
            figures |= said(line) or {}
        if figures:
            self._coordinator.tell(protocol.Said(worker, protocol.Figures(**figures)))


@contextlib.contextmanager
def _signals(stop: Callable[[signal.Signals], None]) -> Iterator[int]:
    """Call `stop` with signals that end a job; yields a descriptor that any signal makes readable."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before: dict[int, Any] = {
        number: signal.signal(number, lambda number, _frame: stop(signal.Signals(number)))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def _ended_children() -> Iterator[tuple[int, int]]:
    """The children of this process that have ended, with their exit codes."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _beginning(path: Path) -> str:
    """The beginning of a file that a worker wrote."""
    try:
        return read_regular(path).decode(errors="replace")
    except OSError as error:
        return str(error)
