"""`swell demo`: the platform in three minutes, with real jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swell.api.client import Client
from swell.api.schemas import EventView, JobView
from swell.cli._common import parse_duration, say_duration
from swell.domain import SwellError


@click.command(epilog="\b\nExample:\n  swell demo --no-dashboard\n")
@click.option(
    "--dashboard/--no-dashboard",
    default=None,
    help="Open the live page in a browser [default: if this is a terminal].",
)
@click.pass_context
def demo(ctx: click.Context, dashboard: bool | None) -> None:
    """Run real training jobs on four CPU slots of this machine: they swell and ebb, a promise is kept.

    Takes about two minutes, in a temporary home, and leaves nothing behind.
    """
    from importlib.util import find_spec

    from swell.domain import SwellError

    for module in ("torch", "fastapi", "sklearn"):
        if find_spec(module) is None:
            raise SwellError(f"the demo needs {module}: pip install 'swell[demo]'")

    ctx.exit(run(sys.stdout.isatty() if dashboard is None else dashboard))


# The platform in three minutes: real training jobs swell and ebb on four CPU slots of this machine.
#
# `swell demo` and `make demo` run it. It starts a control plane in a temporary directory, submits PyTorch
# jobs from examples/ (one with a deadline, one with a deadline that cannot be kept), shows who has how many
# workers as they run, and ends with what was promised and what happened. Nothing of it is left behind.
#
# The jobs wait a few milliseconds for each sample, as if it came from slow storage: so more workers help
# even on a machine with two cores.


DIGITS = ("examples/digits_cnn.py", "--epochs", "16", "--fetch-ms", "2")
GPT = (
    *("examples/tiny_gpt.py", "--epochs", "2", "--windows", "3600", "--fetch-ms", "4"),
    *("--layers", "1", "--width", "48", "--context", "32"),
)
SLOTS = 4
LIMIT_S = 210.0
"""The demo gives up after this long; it usually takes about two minutes."""
BARS = " ▂▄▆█"
COLOURS = ("cyan", "magenta", "green", "yellow", "blue")


def run(open_dashboard: bool, kind: type[Demo] | None = None) -> int:
    """Run the demo, or a kind of it; returns an exit code."""
    kind = kind or Demo
    began_s = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="swell-demo-"))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 130
    shutil.copytree(examples(), home / "work" / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    demo = kind(home, console, began_s, open_dashboard)
    try:
        return demo.run()
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    finally:
        demo.clean_up()


def examples() -> Path:
    """The example scripts: in the package if it was installed, beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "examples", package.parent.parent / "examples"):
        if (folder / "digits_cnn.py").exists():
            return folder
    raise SwellError("the example scripts are not installed; install swell again, or run the demo in a clone")


@dataclass
class Demo:
    home: Path
    console: Console
    began_s: float
    open_dashboard: bool = False
    workers: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By job: moments since the start, and how many workers it had from then on."""
    shown: str = ""

    def run(self) -> int:
        say = self.console.print
        say("[bold]swell[/bold] on this machine: 4 CPU slots, jobs that share them, nobody says how many.\n")
        self.swell("up", "-d", "--slots", str(SLOTS))
        self.show_dashboard()
        with Client(home=self.home) as client:
            say("A convolutional network on handwritten digits. Nobody has seen this script run yet:")
            self.swell("submit", "-d", "--name", "digits", *DIGITS)
            self.watch(client, self.digits_has_grown)
            say("\nA small language model on Python's own documentation joins; digits makes room:")
            self.swell("submit", "-d", "--name", "gpt", *GPT)
            self.watch(client, lambda jobs: _over(jobs, "digits"))
            say("\nDigits is done, and known now. Again, this time within eight seconds?")
            offer = self.refused("--deadline", "8s", *DIGITS)
            say("\nSo be it. (Half as much again as the counter-offer: this machine has other things to do.)")
            self.swell("submit", "-d", "--name", "digits-again", "--deadline", _half_more(offer), *DIGITS)
            self.watch(client, lambda jobs: _over(jobs, "gpt", "digits-again"))
            jobs = sorted(client.jobs(), key=lambda job: job.submitted_s)
            events = list(client.events(since=0, follow=False))
        say()
        self.report(jobs, events)
        say("\nWhat would have happened otherwise? The cluster's own event log, replayed:")
        self.swell("replay", "--policy", "tide", "--policy", "elasticflow", "--policy", "tiresias")
        say(NEXT)
        say(f"[dim]All of this took {say_duration(time.monotonic() - self.began_s)}.[/dim]")
        good = all(job.phase.value == "finished" for job in jobs if job.name != "digits-in-8s")
        kept = all(_in_time(job) for job in jobs if job.promise.guaranteed_s is not None)
        return 0 if good and kept and time.monotonic() - self.began_s < LIMIT_S + 60 else 1

    def show_dashboard(self) -> None:
        """Say where the live page is, and open it if that was asked for."""
        words = ("dashboard",) if self.open_dashboard else ("dashboard", "--no-browser")
        self.swell(*words)
        self.console.print()

    def swell(self, *words: str, expect: int = 0) -> str:
        """Say a command, run it, show what it answers."""
        shown = " ".join(word if word and " " not in word else f"'{word}'" for word in words)
        self.console.print(f"[bold green]$[/bold green] swell {shown}", soft_wrap=True)
        done = subprocess.run(
            [sys.executable, "-m", "swell", *words],
            cwd=self.home / "work",
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        text = (done.stdout + done.stderr).partition("\nNext:\n")[0].strip("\n")
        self.console.print(f"[dim]{text.replace('[', chr(92) + '[')}[/dim]", soft_wrap=True)
        if done.returncode != expect:
            raise SystemExit(f"swell {words[0]} ended with exit code {done.returncode}")
        return text

    def refused(self, *words: str) -> str:
        """Ask for too much; returns the deadline that would be promised."""
        text = self.swell("submit", "--name", "digits-in-8s", *words, expect=3)
        found = re.search(r"To take it: --deadline (\w+)", text)
        if found is None:
            raise SystemExit("it was refused without a counter-offer")
        return found[1]

    def environment(self) -> dict[str, str]:
        """For commands of the demo: its own home, whatever the user's is."""
        kept = {k: v for k, v in os.environ.items() if k not in ("SWELL_URL", "SWELL_TOKEN", "SWELL_CA")}
        return kept | {"SWELL_HOME": str(self.home), "COLUMNS": str(max(self.console.width, 120))}

    # -- the live view -----------------------------------------------------------------------------------

    def watch(self, client: Client, until: object) -> None:
        """Show who has how many workers until something is true; a line for each change off a terminal."""
        assert callable(until)
        live = Live(console=self.console, auto_refresh=False, transient=True)
        with live:
            while True:
                jobs = sorted(client.jobs(), key=lambda job: job.submitted_s)
                jobs = [job for job in jobs if job.phase.value != "refused"]
                for job in jobs:
                    self.note(job)
                if self.console.is_terminal:
                    live.update(self.picture(jobs), refresh=True)
                else:
                    self.line(jobs)
                if until(jobs):
                    break
                if time.monotonic() - self.began_s > LIMIT_S:
                    raise SystemExit(
                        "the demo takes too long on this machine; it is busy, perhaps:"
                        " try again when it is idle"
                    )
                time.sleep(0.5)
        if self.console.is_terminal:
            self.console.print(self.picture(jobs))

    def note(self, job: JobView) -> None:
        """Remember how many workers a job has now."""
        seen = self.workers.setdefault(job.job_id, [])
        if not seen or seen[-1][1] != len(job.wanted):
            seen.append((time.monotonic() - self.began_s, len(job.wanted)))

    def picture(self, jobs: list[JobView]) -> Group:
        """A row for each job: its workers now, and over time."""
        table = Table(box=None, pad_edge=False, show_header=False)
        for i, job in enumerate(jobs):
            colour = COLOURS[i % len(COLOURS)]
            share = f"{job.done / job.of:4.0%}" if job.of else "    "
            table.add_row(
                Text(f"{job.name:<13}", colour),
                Text(f"{'■' * len(job.wanted):<{SLOTS}} {len(job.wanted)}", colour),
                Text(self.strip(job.job_id), colour),
                share,
                job.phase.value,
            )
        elapsed = say_duration(time.monotonic() - self.began_s)
        return Group(Text(f"{elapsed}: workers now, and since the start", "dim"), table)

    def strip(self, job_id: str, width: int = 60) -> str:
        """Workers over time, the last so many columns of two seconds each."""
        now_s, changes, out = time.monotonic() - self.began_s, self.workers[job_id], ""
        for column in range(int(now_s / 2) + 1):
            at_s = min(2.0 * column + 2.0, now_s)
            had = [count for moment, count in changes if moment <= at_s]
            out += BARS[min(had[-1], len(BARS) - 1)] if had else " "
        return f"{out[-width:]:<{width}}"

    def line(self, jobs: list[JobView]) -> None:
        """The same as text, whenever somebody's workers changed."""
        text = "   ".join(
            f"{job.name} {'■' * len(job.wanted) + '·' * (SLOTS - len(job.wanted))}"
            for job in jobs
            if not job.over
        )
        if text != self.shown:
            self.shown = text
            self.console.print(f"{time.monotonic() - self.began_s:5.0f} s   {text}")

    def digits_has_grown(self, jobs: list[JobView]) -> bool:
        """Whether digits has had all slots for a few seconds, or will not any more."""
        (job,) = jobs
        since_s, workers = self.workers[job.job_id][-1]
        held_s = time.monotonic() - self.began_s - since_s
        return job.over or (workers == SLOTS and held_s > 5) or (workers > 1 and held_s > 15)

    # -- the end -----------------------------------------------------------------------------------------

    def report(self, jobs: list[JobView], events: list[EventView]) -> None:
        """What was promised, what happened, and what resizing cost."""
        told = {e.job_id: e.data.get("estimate_s") for e in events if e.kind == "admitted"}
        table = Table(title="Promised, and happened", header_style="bold", title_justify="left")
        for name in (
            "job",
            "promised",
            "expected",
            "happened",
            "workers",
            "resizes",
            "pause each",
        ):
            table.add_column(name, justify="left" if name in ("job", "promised") else "right")
        for job in jobs:
            took_s = (job.ended_s or time.time()) - job.submitted_s
            if job.phase.value == "refused":
                table.add_row(job.name, "refused (counter-offer)", "-", "-", "-", "-", "-")
                continue
            mine = [e for e in events if e.job_id == job.job_id and e.kind in ("allocated", "resized")]
            table.add_row(
                job.name,
                _promise(job),
                _expected(job, told.get(job.job_id), took_s),
                say_duration(took_s) if job.phase.value == "finished" else job.phase.value,
                " ".join(str(len(e.data["gpus"])) for e in mine),
                str(job.resizes),
                f"{1000 * job.pause_s / job.resizes:.0f} ms" if job.resizes else "-",
            )
        self.console.print(table)

    def clean_up(self) -> None:
        """Stop the control plane and its jobs, and remove the temporary home."""
        subprocess.run(
            [sys.executable, "-m", "swell", "down"],
            env=self.environment(),
            cwd=self.home / "work",
            capture_output=True,
            timeout=120,
            check=False,
        )
        shutil.rmtree(self.home, ignore_errors=True)


def _half_more(deadline: str) -> str:
    return f"{int(1.5 * parse_duration(deadline))}s"


def _over(jobs: list[JobView], *names: str) -> bool:
    return all(job.over for job in jobs if job.name in names)


def _in_time(job: JobView) -> bool:
    assert job.promise.guaranteed_s is not None
    return job.ended_s is not None and job.ended_s <= job.promise.guaranteed_s


def _promise(job: JobView) -> str:
    if job.promise.guaranteed_s is None:
        return "best effort"
    within = say_duration(job.promise.guaranteed_s - job.submitted_s)
    return f"within {within}: {'kept' if _in_time(job) else 'BROKEN'}"


def _expected(job: JobView, estimate_s: float | None, took_s: float) -> str:
    if estimate_s is None:
        return "unknown script"
    expected_s = estimate_s - job.submitted_s
    return f"{say_duration(expected_s)} ({(expected_s - took_s) / took_s:+.0%})"


NEXT = """
[bold]What to type next[/bold]
  swell up -d                        your own control plane, with all of this machine
  swell init train.py                a commented job file for a script of yours
  swell submit --deadline 2h train.py
  swell dashboard                    watch
  make demo-sim                      in a clone: the same policies on a simulated cluster
In a clone, `. .venv/bin/activate` makes these work; docs/guides/quickstart.md takes it from there."""
