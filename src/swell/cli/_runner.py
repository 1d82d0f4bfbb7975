"""Several simulations at once, in processes that report their progress and end with their parent.

A single run is done in this process. For more runs, processes are forked before any thread starts. Each has a
pipe: the number of a run goes in; progress and at the end a record come out. The pipe of a process that is
killed is closed, so the parent never waits in vain.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from swell.domain import NO_TEAMS, Cluster, Event, InputError, SwellError, Teams
from swell.perf.profiles import ProfileSet
from swell.policies.by_user import NO_USER_LIMITS, UserLimits
from swell.sim import ResizeCost, parse_cloud, simulate
from swell.sim.traces import Trace

Progress = Callable[[int, float, int, int], None]
"""Called with the number of the run, simulated seconds, jobs ended and jobs in all."""

_REPORT_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trace, with the profiles and the cluster it runs on."""

    trace: Trace
    profiles: ProfileSet
    profiles_from: str
    cluster: Cluster
    gpu_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One trace under one policy."""

    source: Source
    policy: str
    cluster_text: str
    interval_s: float | None
    resize_cost: ResizeCost
    seed: int
    belief: str | None
    autoscale: str | None = None
    """Options of the autoscaler, if there is one."""
    blind_to_types: bool = False
    teams: Teams = NO_TEAMS
    user_limits: UserLimits = NO_USER_LIMITS
    events: Path | None = None

    @property
    def title(self) -> str:
        """The name of the run for people."""
        return f"{self.source.trace.name} {self.policy}"

    def execute(self, on_progress: Callable[[float, int, int], None] | None = None) -> dict[str, Any]:
        """Simulate, and return the figures as a record."""
        cluster, cloud = self.source.cluster, None
        if self.autoscale is not None:
            cloud = parse_cloud(self.autoscale, cluster, self.seed)
        with _event_file(self.events) as on_event:
            result = simulate(
                self.source.trace.jobs,
                self.source.profiles,
                cluster,
                self.policy,
                interval_s=self.interval_s,
                resize_cost=self.resize_cost,
                seed=self.seed,
                belief=self.belief,
                cloud=cloud,
                blind_to_types=self.blind_to_types,
                teams=self.teams,
                user_limits=self.user_limits,
                on_event=on_event,
                on_progress=on_progress,
            )
        figures = {key: _plain(value) for key, value in result.record().items()}
        named = {"trace": self.source.trace.name, "policy": self.policy, "cluster": self.cluster_text}
        settings = {
            "seed": self.seed,
            "interval_s": self.interval_s,
            "profiles": self.source.profiles_from,
            "gpu_type": self.source.gpu_type,
            "per_gpu": self.source.cluster.per_gpu,
            "autoscale": self.autoscale,
            "teams": self.teams.quotas or None,
            "slots_per_user": self.user_limits.slots,
            "running_per_user": self.user_limits.running,
            "skipped_rows": self.source.trace.skipped,
        }
        return {**named, **{k: v for k, v in figures.items() if k not in named}, **settings}


def run_all(
    runs: Sequence[Run], *, processes: int, on_start: Callable[[], None], on_progress: Progress
) -> list[dict[str, Any]]:
    """Do all runs, at most `processes` at a time, and return their records in the same order.

    `on_start` is called once the processes are forked: from then on threads may be started.
    """
    try:
        if min(processes, len(runs)) == 1:
            on_start()
            return [_one(run, index, on_progress) for index, run in enumerate(runs)]
        return _in_workers(runs, min(processes, len(runs)), on_start, on_progress)
    finally:
        for run in runs:
            if run.events is not None:
                _unfinished(run.events).unlink(missing_ok=True)


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one(run: Run, index: int, on_progress: Progress) -> dict[str, Any]:
    record = run.execute(_seldom(partial(on_progress, index)))
    _over(index, record, on_progress)
    return record


def _over(index: int, record: dict[str, Any], on_progress: Progress) -> None:
    on_progress(index, record["makespan_s"] or 0.0, record["jobs"], record["jobs"])


def _in_workers(
    runs: Sequence[Run], count: int, on_start: Callable[[], None], on_progress: Progress
) -> list[dict[str, Any]]:
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    records: dict[int, dict[str, Any]] = {}
    waiting = iter(range(len(runs)))
    busy: dict[Connection, int] = {}
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, runs), daemon=True)
            worker.start()
            theirs.close()
            workers[ours] = worker
        on_start()
        for pipe in workers:
            _hand_out(pipe, waiting, busy)
        while busy:
            ready: list[Any] = wait(list(busy))
            for pipe in ready:
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    workers[pipe].join(timeout=5)
                    _died(runs[busy[pipe]], workers[pipe].exitcode)
                if kind == "progress":
                    on_progress(busy[pipe], *content)
                elif kind == "record":
                    index = busy.pop(pipe)
                    records[index] = content
                    _over(index, content, on_progress)
                    _hand_out(pipe, waiting, busy)
                elif kind == "refused":
                    raise content
                else:
                    raise RuntimeError(f"{runs[busy[pipe]].title} failed:\n{content}")
    finally:
        for worker in workers.values():
            worker.terminate()
        for pipe, worker in workers.items():
            worker.join(timeout=5)
            pipe.close()
    return [records[index] for index in range(len(runs))]


def _hand_out(pipe: Connection, waiting: Iterator[int], busy: dict[Connection, int]) -> None:
    index = next(waiting, None)
    if index is not None:
        pipe.send(index)
        busy[pipe] = index


def _died(run: Run, exitcode: int | None) -> NoReturn:
    how = f"was killed by signal {-exitcode}" if exitcode is not None and exitcode < 0 else "ended early"
    raise SwellError(
        f"the process simulating {run.title} {how}; out of memory? Try fewer at once with --jobs 1"
    )


def _work(pipe: Connection, runs: Sequence[Run]) -> None:
    """The main function of a process: do the runs that the parent asks for, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def report(now_s: float, ended: int, jobs: int) -> None:
        pipe.send(("progress", (now_s, ended, jobs)))

    while True:
        try:
            index = pipe.recv()
            try:
                answer: tuple[str, Any] = ("record", runs[index].execute(_seldom(report)))
            except InputError as error:
                answer = ("refused", InputError(str(error), field=error.field))
            except BrokenPipeError:
                raise
            except Exception:
                answer = ("failed", traceback.format_exc())
            pipe.send(answer)
        except (EOFError, OSError):
            return


def _seldom(report: Callable[[float, int, int], None]) -> Callable[[float, int, int], None]:
    """The same function, called at most every `_REPORT_EVERY_S` seconds."""
    due = 0.0

    def maybe(now_s: float, ended: int, jobs: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _REPORT_EVERY_S
            report(float(now_s), int(ended), int(jobs))

    return maybe


@contextmanager
def _event_file(path: Path | None) -> Iterator[Callable[[Event], None] | None]:
    """A function that writes events to a file, which gets its name only when it is complete."""
    if path is None:
        yield None
        return
    with _unfinished(path).open("w", encoding="utf-8") as file:

        def write(event: Event) -> None:
            file.write(event.to_json() + "\n")

        yield write
    _unfinished(path).replace(path)


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _plain(value: Any) -> Any:
    """The value for JSON: None in place of infinity and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
