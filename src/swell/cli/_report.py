"""How the outcome of simulations is shown: a progress display while they run, and one table in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table


class Display:
    """A bar per run that is under way: jobs ended and simulated time."""

    def __init__(self, titles: Sequence[str], jobs: Sequence[int], console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("jobs  {task.fields[clock]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: list[TaskID] = [
            self._progress.add_task(title, total=total, clock="", visible=False)
            for title, total in zip(titles, jobs)
        ]

    def start(self) -> None:
        """Begin to draw."""
        self._progress.start()

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def update(self, run: int, now_s: float, ended: int, jobs: int) -> None:
        """A run has come this far."""
        self._progress.update(
            self._tasks[run], completed=ended, total=jobs, clock=clock(now_s), visible=ended < jobs
        )


def clock(seconds: float) -> str:
    """Simulated time as people say it."""
    days, rest = divmod(int(seconds), 86400)
    hours, minutes = divmod(rest // 60, 60)
    return f"{days} d {hours:02}:{minutes:02}" if days else f"{hours:02}:{minutes:02}"


def _seconds(value: Any) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"


def _two(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"


def _count(value: Any) -> str:
    return f"{value:,}"


# (heading, field, how it is written)
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("finished", "finished", _count),
    ("refused", "rejected", _count),
    ("avg JCT s", "avg_jct_s", _seconds),
    ("p50 JCT s", "p50_jct_s", _seconds),
    ("p99 JCT s", "p99_jct_s", _seconds),
    ("makespan s", "makespan_s", _seconds),
    ("deadlines met", "deadline_ratio", _ratio),
    ("avg rho", "avg_rho", _two),
    ("max rho", "max_rho", _two),
    ("GPUs used", "gpu_utilisation", _ratio),
    ("resizes", "resizes", _count),
    ("decision ms", "decision_ms_mean", _two),
    ("CPU s", "cpu_s", _two),
)
_ONLY_IF_SOME = {"rejected", "deadline_ratio"}


def results_table(records: Sequence[dict[str, Any]]) -> Table:
    """A row per trace and policy. Columns that would say nothing are left out."""
    columns = [c for c in _COLUMNS if c[1] not in _ONLY_IF_SOME or any(r.get(c[1]) for r in records)]
    table = Table(header_style="bold", pad_edge=False)
    table.add_column("trace", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    table.add_column("knows", no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for record in records:
        if last is not None and record["trace"] != last:
            table.add_section()
        last = record["trace"]
        table.add_row(
            record["trace"],
            record["policy"],
            record.get("belief", ""),
            *(write(record.get(name)) for _, name, write in columns),
        )
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table at its full width where the output is not a terminal, so that nothing is cut off."""
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table).maximum)
    console.print(table)
