"""What the commands share: options, output, times and sizes, and how they reach the control plane."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from swell.api.client import Client
    from swell.api.schemas import EstimateView, JobView, PromiseView


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


# Texts of jobs on a person's terminal: shown, never obeyed.
#
# A job's reason, its arguments and its output are its owner's to choose, and a terminal obeys escape
# sequences: it can be told to change its title, to move the cursor over what was printed, to answer as if a
# person had typed.


_UNSEEN = "\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069"  # C1 controls, and marks that turn text around
_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f{_UNSEEN}]")
_NO_COLOURS = re.compile(rf"\x1b(?!\[[0-9;]{{0,30}}m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f{_UNSEEN}]")


def clean(text: str) -> str:
    """The text with control characters written out; line ends and tabs stay."""
    return _CONTROLS.sub(_written_out, text)


def output(text: str) -> str:
    """A job's output: a terminal obeys only its colours and carriage returns; a file gets it unchanged."""
    return _NO_COLOURS.sub(_written_out, text) if sys.stdout.isatty() else text


def add_row(table: Table, *cells: Any) -> None:
    """Add a row to a table; texts are shown as they are, and are no markup."""
    from rich.text import Text

    table.add_row(*(Text(clean(cell)) if isinstance(cell, str) else cell for cell in cells))


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


# Durations, moments and sizes as people write them: reading and printing.


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = re.compile(r"\d+(\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(today|tomorrow)\s+)?(\d{1,2}):(\d{2})", re.IGNORECASE)
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_duration(text: str) -> float:
    """Seconds of '90s', '90m', '2h', '1h30m' or '1.5d'; a number without a unit could mean any of them."""
    cleaned = text.strip()
    if _NUMBER.fullmatch(cleaned):
        raise ValueError(f"'{text}' has no unit; write {cleaned}s, {cleaned}m, {cleaned}h or {cleaned}d")
    if not cleaned or _PART.sub("", cleaned).strip():
        raise ValueError(f"'{text}' is not a duration; write it like 90s, 90m, 2h, 1h30m or 3d")
    seconds = sum(float(number) * _UNITS_S[unit.lower()] for number, unit in _PART.findall(cleaned))
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"'{text}' must be a duration of more than 0 seconds, like 90m or 2h")
    return seconds


def parse_interval(text: str) -> float:
    """Seconds of a duration, or 0."""
    return 0.0 if text.strip() == "0" else parse_duration(text)


def parse_deadline(text: str, now_s: float | None = None) -> float:
    """The Unix time of '2h' (from now), '18:30', 'tomorrow 09:00' or '2026-03-01 09:00' (local time)."""
    now_s = time.time() if now_s is None else now_s
    cleaned = " ".join(text.split())
    clock = _CLOCK.fullmatch(cleaned)
    if clock is not None:
        moment = _at_clock(clock, datetime.fromtimestamp(now_s))
    elif _NUMBER.fullmatch(cleaned):
        raise ValueError(
            f"'{text}' has no unit; write {cleaned}s, {cleaned}m or {cleaned}h for a time from now"
        )
    else:
        with contextlib.suppress(ValueError):
            return now_s + parse_duration(cleaned)
        try:
            moment = datetime.fromisoformat(cleaned)
        except ValueError:
            raise ValueError(
                f"'{text}' is not a deadline; write it like 2h, 18:30, 'tomorrow 09:00' or 2026-03-01T09:00"
            ) from None
    if moment.timestamp() <= now_s:
        raise ValueError(f"'{text}' is in the past (it is {say_moment(now_s)} now); give a later deadline")
    return moment.timestamp()


def _at_clock(clock: re.Match[str], now: datetime) -> datetime:
    day, hour, minute = clock.groups()
    if int(hour) > 23 or int(minute) > 59:
        raise ValueError(f"'{clock[0]}' is not a time of day; write it like 'tomorrow 09:00'")
    moment = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
    if day is not None and day.lower() == "tomorrow":
        return moment + timedelta(days=1)
    # A time without a day means the next time the clock shows it.
    return moment + timedelta(days=1) if day is None and moment <= now else moment


def parse_bytes(text: str) -> int:
    """Bytes of '512MB', '2GiB', '1.5g' or a bare number."""
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"'{text}' is not an amount of memory; write it like 512MiB or 4GB")
    base = 1024 if found[3] else 1000
    size = float(found[1]) * base ** " kmgt".index(found[2].lower() or " ")
    return int(size)


def say_duration(seconds: float | None) -> str:
    """A duration as people write it: 45s, 3m 20s, 2h 05m, 3d 04h."""
    if seconds is None or math.isnan(seconds):
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"


def say_moment(moment_s: float | None, now_s: float | None = None) -> str:
    """A moment as people write it: the time, and the date unless it is today."""
    if moment_s is None:
        return "-"
    moment, today = datetime.fromtimestamp(moment_s), datetime.fromtimestamp(now_s or time.time()).date()
    if moment.date() == today:
        return f"{moment:%H:%M:%S}"
    if moment.date() == today + timedelta(days=1):
        return f"tomorrow {moment:%H:%M}"
    return f"{moment:%Y-%m-%d %H:%M}"


def say_until(moment_s: float | None, now_s: float | None = None) -> str:
    """A moment, and how far away it is."""
    if moment_s is None:
        return "-"
    now_s = time.time() if now_s is None else now_s
    away = (
        f"in {say_duration(moment_s - now_s)}"
        if moment_s >= now_s
        else f"{say_duration(now_s - moment_s)} ago"
    )
    return f"{say_moment(moment_s, now_s)} ({away})"


class _Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in click's newest
    """The type of an option whose text one of the functions above reads."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, or a refusal that says how to write it."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = _Parsed("duration", parse_duration)
INTERVAL = _Parsed("duration", parse_interval)
DEADLINE = _Parsed("deadline", parse_deadline)
BYTES = _Parsed("size", parse_bytes)


# An event as one line for people.


def subject(job_id: str | None, node: str | None, data: Mapping[str, Any]) -> str:
    """What an event is about."""
    return job_id or node or str(data.get("reservation") or data.get("policy") or "autoscaler")


def line(time_s: float, kind: str, subject: str, data: Mapping[str, Any]) -> str:
    """One line: when it happened, the job or node, what happened."""
    clock = time.strftime("%H:%M:%S", time.localtime(time_s))
    return clean(f"{clock}  {subject:<24} {_describe(time_s, kind, data)}").rstrip()


def _describe(time_s: float, kind: str, data: Mapping[str, Any]) -> str:
    match kind:
        case "submitted":
            deadline_s = data.get("deadline_s")
            return "submitted" + (
                "" if deadline_s is None else f", deadline {say_moment(deadline_s, time_s)}"
            )
        case "admitted":
            finish_s = data.get("finish_s")
            return "admitted" + (
                "" if finish_s is None else f", will finish by {say_moment(finish_s, time_s)}"
            )
        case "rejected":
            earliest_s = data.get("earliest_deadline_s")
            offer = "" if earliest_s is None else f"; {say_moment(earliest_s, time_s)} would be possible"
            return f"refused: {data.get('reason', '')}{offer}"
        case "allocated":
            return f"starts on {_slots(data.get('gpus', ()))}"
        case "resized":
            pause = f", {data['pause_s'] * 1e3:.0f} ms pause" if data.get("pause_s") else ""
            why = f" ({data['reason']})" if data.get("reason") else ""
            return f"{len(data.get('before', ()))} -> {len(data.get('gpus', ()))} workers{pause}{why}"
        case "preempted":
            why = data.get("reason") or "for a reason that was not reported"
            return f"{len(data.get('before', ()))} -> 0 workers ({why})"
        case "progress":
            of = "" if data.get("of") is None else f" of {data['of']:g}"
            return f"step {data.get('done', 0):g}{of}{figures(data)}"
        case "worker_lost":
            return f"worker {data.get('worker', '?')} was lost: {data.get('reason', '')}"
        case "noticed":
            return str(data.get("text", ""))
        case "checkpoint_saved":
            return f"checkpoint saved at step {data.get('step', '?')}"
        case "finished":
            met = {"True": ", deadline met", "False": ", deadline missed"}.get(str(data.get("met")), "")
            return f"finished after {say_duration(data.get('jct_s'))}{met}"
        case "failed":
            return f"failed: {' '.join(str(data.get('reason', '')).split())}"
        case "cancelled":
            return f"cancelled by {data.get('by', 'its owner')}"
        case "node_joined":
            why = f" ({data['reason']})" if data.get("reason") else ""
            return f"in service with {data.get('gpus', '?')} slots{why}"
        case "node_lost":
            return f"out of service ({data.get('reason', 'lost')})"
        case "node_slow":
            return f"new workers are slow here too, {data.get('times', 0):.1f} times; see 'swell nodes'"
        case "scaled":
            return f"{data.get('before', '?')} -> {data.get('nodes', '?')} nodes: {data.get('reason', '')}"
        case "policy_replaced":
            return f"failed and is replaced by '{data.get('by', '?')}': {data.get('reason', '')}"
        case "reserved":
            return f"reserved by {data.get('by', '?')}"
        case "unreserved":
            return f"removed by {data.get('by', '?')}"
        case "held":
            return f"has {len(data.get('gpus', ()))} slots, had {len(data.get('before', ()))}"
        case "yielded":
            return f"workers have left its {len(data.get('gpus', ()))} slots, after {data['after_s']:.2f} s"
    return kind


def figures(data: Mapping[str, Any]) -> str:
    """Loss, learning rate and metrics of a progress report, if it has any."""
    values = {name: data.get(name) for name in ("loss", "lr")} | dict(data.get("metrics") or {})
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return "".join(f", {name} {value:.4g}" for name, value in numbers.items())


def _slots(gpus: Any) -> str:
    numbers = list(gpus)
    return f"slot {numbers[0]}" if len(numbers) == 1 else f"slots {', '.join(map(str, numbers))}"


# Promises, estimates and outcomes, in words.


REFUSED = 3
"""Exit code for a deadline that cannot be promised."""

_SOURCES = {
    "model": "from what the job has shown so far",
    "history": "from earlier runs of this script",
    "kin": "from runs of this script with other arguments, so it is rough and no promise is made from it",
    "profile": "from a short profiling run",
}


def promise_lines(promise: PromiseView, deadline_s: float | None) -> list[str]:
    if not promise.admitted:
        return refusal_lines(promise, deadline_s)
    lines = []
    if promise.guaranteed_s is not None:
        lines.append(f"Promised: done by {say_until(promise.guaranteed_s)}.")
    if promise.reason:
        lines.append(f"{promise.reason[:1].upper()}{promise.reason[1:].rstrip('.')}.")
    if promise.estimate.finish_s is not None:
        lines.append(f"Estimate: {estimate(promise.estimate)}.")
    elif not promise.pending and not promise.reason:
        lines.append("Estimate: none yet, this script has never run here. 'swell describe' shows it later.")
    return lines


def refusal_lines(promise: PromiseView, deadline_s: float | None) -> list[str]:
    """A refusal as a few lines: the reason, and what would be possible."""
    lines = []
    if deadline_s is not None:
        lines.append(f"Refused: {say_until(deadline_s)} cannot be promised.")
    lines.append(f"Reason: {promise.reason.rstrip('.')}.")
    if promise.earliest_deadline_s is not None:
        lines.append(f"Counter-offer: {say_until(promise.earliest_deadline_s)} would be promised.")
        lines.append(f"To take it: --deadline {offer(promise.earliest_deadline_s)}")
    else:
        lines.append("Leave the deadline out to run the job as best effort.")
    return lines


def offer(earliest_s: float) -> str:
    """The earliest deadline as a person can type it; a little later, for the time it takes to type."""
    seconds = (earliest_s - time.time()) * 1.05 + 15.0
    return f"{int(seconds / 60) + 1}m" if seconds > 600 else f"{int(seconds) + 1}s"


def estimate(view: EstimateView) -> str:
    """An estimated finish, with its range and its source."""
    if view.finish_s is None:
        return "not known yet"
    text = f"done at about {say_until(view.finish_s)}"
    if view.earliest_s is not None and view.latest_s is not None:
        text += f", between {say_moment(view.earliest_s)} and {say_moment(view.latest_s)}"
    return text + (f", {_SOURCES[view.source]}" if view.source in _SOURCES else "")


def outcome(job: JobView) -> str:
    """How a job ended, in a line."""
    from swell.domain.words import many

    took = say_duration((job.ended_s or time.time()) - job.submitted_s)
    text = f"{job.job_id} {job.phase.value} after {took}"
    if job.phase.value == "finished" and job.request.deadline_s is not None and job.ended_s is not None:
        met = job.ended_s <= job.request.deadline_s
        text += ", by its deadline" if met else ", after its deadline"
    if job.phase.value != "finished" and job.reason:
        text += f": {clean(job.reason)}"
    if job.resizes:
        text += f"; {many(job.resizes, 'resize')} paused it for {say_duration(job.pause_s)} in all"
    return text
