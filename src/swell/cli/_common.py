"""What the platform's commands share: options, output, and how they reach the control plane."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from swell.cli._terminal import output

if TYPE_CHECKING:
    from rich.table import Table

    from swell.api.client import Client
    from swell.api.schemas import JobView

home_option = click.option(
    "--home", metavar="DIR", help="State directory [default: $SWELL_HOME, else ~/.swell]."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
admin_option = click.option(
    "--admin", is_flag=True, help="Use the administrator's token, which sees the jobs of all users."
)
MOST_CANDIDATES = 10
"""Most jobs that are listed if a text fits several."""


def connect(home: str | None, *, admin: bool = False, prefer_admin: bool = False) -> Client:
    """A client for the control plane of `home` or $SWELL_URL; refuses if none runs in the home.

    `prefer_admin` uses the administrator's token if it can be read, to see the jobs of all users.
    """
    from swell.api.client import Client
    from swell.domain import SwellError

    client = Client(home=home, role=role_for(home, admin=admin, prefer_admin=prefer_admin))
    if admin and home is None and os.environ.get("SWELL_TOKEN"):
        who = client.me()
        if who.role != "admin":
            client.close()
            raise SwellError(
                f"only an administrator may do that, and $SWELL_TOKEN is of {who.user} (role {who.role}): "
                "ask an administrator, or set SWELL_TOKEN to a token of one"
            )
    return client


def complete_job(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Names and ids of active jobs that begin so, for a shell; none if the platform does not answer."""
    from swell.api.client import Client

    try:
        with Client(retry_s=0.0) as client:
            jobs = active_jobs(client)
    except Exception:  # a shell must not show an error in the middle of a line
        return []
    names = [job.name for job in jobs if sum(other.name == job.name for other in jobs) == 1]
    return [text for text in [*names, *(job.job_id for job in jobs)] if text.startswith(incomplete)]


job_argument = click.argument("job", shell_complete=complete_job)


def role_for(home: str | None, *, admin: bool = False, prefer_admin: bool = False) -> str:
    """Which of the home's tokens a client should use; refuses if no control plane runs in the home."""
    from swell.api.home import home_dir, token_file
    from swell.cli._platform import running_pid
    from swell.domain import SwellError

    where = home_dir(home)
    local = home is not None or not os.environ.get("SWELL_URL")
    if local and running_pid(where) is None:
        raise SwellError(f"no control plane is running here (home {where}): start one with 'swell up'")
    if prefer_admin and (home is not None or not os.environ.get("SWELL_TOKEN")):
        admin = os.access(token_file(where, "admin"), os.R_OK)
    return "admin" if admin else "user"


def find_job(client: Client, text: str) -> JobView:
    """A job by its id, by its name or by the beginning of its id; refuses a text that fits several."""
    from swell.control.errors import NotFound

    try:
        return client.job(text)
    except NotFound:
        known = {job.job_id: job for job in [*active_jobs(client), *client.jobs(limit=1000)]}
    return choose_job(list(known.values()), text)


def choose_job(known: Sequence[JobView], text: str) -> JobView:
    """The job that has this text as its name or at the beginning of its id; of several the only active one.

    Of jobs with the same name that are all over it is the newest. Otherwise a text that fits several jobs is
    refused, because the wrong one would be ended or paused.
    """
    from swell.control.errors import NotFound
    from swell.domain import InputError, nearest

    named = [job for job in known if job.name == text]
    fitting = named or [job for job in known if text and job.job_id.startswith(text)]
    if not fitting:
        hint = nearest(text, [job.name for job in known])
        raise NotFound(f"there is no job '{text}'.{hint} 'swell queue --all' lists the jobs")
    found = [job for job in fitting if not job.over] or (
        [max(named, key=lambda job: job.submitted_s)] if named else fitting
    )
    if len(found) > 1:
        shown = sorted(found, key=lambda job: -job.submitted_s)[:MOST_CANDIDATES]
        lines = [f"  {job.job_id}  {job.phase.value}, submitted by {job.owner}" for job in shown]
        more = [f"  and {len(found) - len(shown)} more"] if len(found) > len(shown) else []
        begins = "is the name of" if named else "is the beginning of"
        raise InputError(
            "\n".join(
                [f"'{text}' {begins} {len(found)} jobs; give the id of the one you mean:", *lines, *more]
            ),
            field="job",
        )
    return found[0]


def follow_logs(client: Client, job: JobView) -> None:
    """Show a job's output until the job is over, also across restarts of the control plane."""
    for text in client.logs(job, follow=True):
        click.echo(output(text), nl=False)


def active_jobs(client: Client) -> list[JobView]:
    """All jobs that are not over, newest first."""
    found = [job for phase in ("queued", "running", "paused") for job in client.jobs(phase=phase)]
    # A job that changed its phase between two requests is in both answers.
    return sorted({job.job_id: job for job in found}.values(), key=lambda job: -job.submitted_s)


def print_json(value: Any) -> None:
    """Print plain values on standard output, as one JSON document."""
    click.echo(json.dumps(value, indent=2))


def new_table(columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """A plain table that reads well in a terminal and in a file."""
    from rich import box
    from rich.table import Table

    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


def print_rich(table: Table) -> None:
    """Print a table, at full width where the output is not a terminal."""
    from rich.console import Console

    from swell.cli._report import print_table

    print_table(table, Console(highlight=False))


def one_line(text: str, width: int = 80) -> str:
    """A text, which may have several lines, as one line that is cut to fit a table."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def bar(done: float, of: float | None, width: int = 10) -> str:
    """Progress as a small bar and a percentage."""
    if not of:
        return f"{done:g} steps" if done else "-"
    share = min(max(done / of, 0.0), 1.0)
    full = int(share * width)
    return f"{'█' * full}{'░' * (width - full)} {share:4.0%}"


def figure(value: float) -> str:
    """A number for people: four digits, and a power of ten only where nothing else is short."""
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4 or not math.isfinite(value):
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Numbers as a row of small bars, each the mean of a part of them."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    cells = min(width, len(finite))
    edges = [round(i * len(finite) / cells) for i in range(cells + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # all the same: rounding is no curve
        return "▄" * cells
    scale = 7 / (high - low)
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) * scale)] for mean in means)
