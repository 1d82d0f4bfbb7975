"""How simulations are shown: a progress display while they run, and one table at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table


class Display:
    """A bar for each run under way: jobs ended and simulated time."""

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
        """Show how far a run has come."""
        self._progress.update(
            self._tasks[run], completed=ended, total=jobs, clock=clock(now_s), visible=ended < jobs
        )


def clock(seconds: float) -> str:
    """Simulated time in days, hours and minutes."""
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


# (heading, field, how it is written), in the order shown
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("finished", "finished", _count),
    ("refused", "rejected", _count),
    ("avg JCT s", "avg_jct_s", _seconds),
    ("p50 JCT s", "p50_jct_s", _seconds),
    ("p99 JCT s", "p99_jct_s", _seconds),
    ("makespan s", "makespan_s", _seconds),
    ("cost", "cost", _two),
    ("deadlines met", "deadline_ratio", _ratio),
    ("avg rho", "avg_rho", _two),
    ("max rho", "max_rho", _two),
    ("GPUs held", "gpu_utilisation", _ratio),
    ("resizes", "resizes", _count),
    ("decision ms", "decision_ms_mean", _two),
    ("CPU s", "cpu_s", _two),
)
_ONLY_IF_SOME = {"rejected", "deadline_ratio", "cost"}
_FIRST_TO_GO = ("avg_rho", "p50_jct_s", "decision_ms_mean", "max_rho", "cpu_s", "resizes", "gpu_utilisation")
"""Figures that are left out, in this order, if the terminal is too narrow."""


def results_table(records: Sequence[dict[str, Any]], console: Console) -> Table:
    """A row per trace and policy, with as many columns as the console has room for."""
    hidden = {name for name in _ONLY_IF_SOME if not any(r.get(name) for r in records)}
    table = _results_table(records, hidden)
    for name in _FIRST_TO_GO:
        if not console.is_terminal or _natural_width(table, console) <= console.width:
            break
        hidden.add(name)
        table = _results_table(records, hidden)
        table.caption = "Some figures do not fit on this terminal; --json has them all."
    return table


def _results_table(records: Sequence[dict[str, Any]], hidden: set[str]) -> Table:
    columns = [column for column in _COLUMNS if column[1] not in hidden]
    table = Table(header_style="bold")
    for heading in ("trace", "policy", "knows"):
        table.add_column(heading, no_wrap=True)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for record in records:
        if last is not None and record["trace"] != last:
            table.add_section()
        last = record["trace"]
        figures = (write(record.get(name)) for _, name, write in columns)
        table.add_row(*map(escape, (record["trace"], record["policy"], record["belief"])), *figures)
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table; if the output is not a terminal, at full width, so that nothing is cut off."""
    if not console.is_terminal:
        console.width = max(console.width, _natural_width(table, console))
    console.print(table)


def _natural_width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum
