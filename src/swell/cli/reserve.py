"""`swell reserve`: capacity that belongs to services part of the time."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from swell.cli._common import (
    DEADLINE,
    DURATION,
    connect,
    home_option,
    json_option,
    new_table,
    print_json,
    print_rich,
    say_duration,
    say_moment,
)
from swell.domain import InputError, SwellError

if TYPE_CHECKING:
    from swell.api.schemas import ReservationView


SAY_AGAIN_S = 30.0
"""How often a demand that has not changed is said again, so that its age is known."""


@click.group(epilog="\b\nExample:\n  swell reserve list\n")
def reserve() -> None:
    """Keep slots for services part of the time; training shrinks and grows around them.

    See docs/guides/services.md.
    """


@reserve.command(
    epilog="\b\nExample:\n  swell reserve add evening --gpus 1 --from 18:00 --for 4h --every 1d\n"
    "  swell reserve add web --most 2\n"
)
@click.argument("name")
@click.option("--gpus", type=click.IntRange(min=0), default=0, help="How many slots, whichever they are.")
@click.option(
    "--node", "nodes", multiple=True, metavar="NODE", help="All slots of this node; may be repeated."
)
@click.option("--from", "start_s", type=DEADLINE, help="When it begins, such as 18:00 or 2h [default: now].")
@click.option("--for", "length_s", type=DURATION, help="For how long, such as 4h [default: no end].")
@click.option("--every", "every_s", type=DURATION, help="The same hours again: 1d for every day.")
@click.option("--most", type=click.IntRange(min=1), help="Follow a service that never wants more than this.")
@click.option("--owner", default="", metavar="USER", help="A user who may say what the service wants.")
@click.option("--force", is_flag=True, help="Reserve even if that breaks what was promised to a job.")
@json_option
@home_option
def add(
    name: str,
    gpus: int,
    nodes: tuple[str, ...],
    start_s: float | None,
    length_s: float | None,
    every_s: float | None,
    most: int | None,
    owner: str,
    force: bool,
    as_json: bool,
    home: str | None,
) -> None:
    """Make the reservation NAME, or change it.

    With --most it follows a service: 'swell reserve follow NAME' or 'swell reserve demand NAME' says how many
    slots the service wants. Promises to jobs then count only on what the service never wants.
    """
    if length_s is not None and start_s is None:
        start_s = time.time()
    end_s = None if length_s is None or start_s is None else start_s + length_s
    with connect(home, admin=True) as client:
        made = client.reserve(
            name,
            gpus=gpus,
            nodes=nodes,
            start_s=start_s,
            end_s=end_s,
            every_s=every_s,
            most=most,
            owner=owner,
            force=force,
        )
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    click.echo(f"{name}: {_what(made)}, {_hours(made)}.")
    for job_id in made.endangered:
        click.echo(f"In danger: the promised finish of {job_id}.")


@reserve.command("list", epilog="\b\nExample:\n  swell reserve list\n")
@json_option
@home_option
def list_(as_json: bool, home: str | None) -> None:
    """Show the reservations, and the slots that they have now."""
    with connect(home, prefer_admin=True) as client:
        found = client.reservations()
    if as_json:
        print_json([one.model_dump(mode="json") for one in found])
        return
    if not found:
        click.echo("Nothing is reserved; 'swell reserve add --help' shows how.")
        return
    table = new_table(["reservation", "wants", "when", "slots now", "state"])
    for one in found:
        slots = ", ".join(map(str, one.slots)) or "-"
        wants = bool(one.nodes) or one.gpus > 0
        state = "idle" if not (one.active and wants) else "yielded" if one.yielded else "waiting for workers"
        if one.most is not None and one.heard_s is not None:
            state += f", heard {say_duration(time.time() - one.heard_s)} ago"
        table.add_row(one.name, _what(one), _hours(one), slots, state)
    print_rich(table)


@reserve.command(epilog="\b\nExample:\n  swell reserve remove evening\n")
@click.argument("name")
@json_option
@home_option
def remove(name: str, as_json: bool, home: str | None) -> None:
    """Remove the reservation NAME; training takes its slots again."""
    with connect(home, admin=True) as client:
        gone = client.unreserve(name)
    if as_json:
        print_json(gone.model_dump(mode="json"))
    else:
        click.echo(f"{name} is removed; training may have its slots again.")


@reserve.command(epilog="\b\nExample:\n  swell reserve demand web 1\n")
@click.argument("name")
@click.argument("gpus", type=click.IntRange(min=0))
@json_option
@home_option
def demand(name: str, gpus: int, as_json: bool, home: str | None) -> None:
    """Say that the service behind the reservation NAME wants so many slots now."""
    with connect(home, prefer_admin=True) as client:
        now = client.demand(name, gpus)
    if as_json:
        print_json(now.model_dump(mode="json"))
    else:
        click.echo(f"{name} wants {gpus} of at most {now.most} slots.")


@reserve.command(epilog="\b\nExample:\n  swell reserve follow web --command 'echo 1' --times 1\n")
@click.argument("name")
@click.option("--command", "command", metavar="TEXT", help="Prints a number; split as a shell would.")
@click.option("--url", help="A page of metrics in the Prometheus format.")
@click.option("--metric", metavar="NAME", help="The metric of --url, such as 'busy{job=\"web\"}'.")
@click.option("--per", type=float, default=1.0, show_default=True, help="How much of it one slot serves.")
@click.option("--every", "every_s", type=DURATION, default="0.5s", help="Time between two looks [0.5s].")
@click.option("--times", type=click.IntRange(min=1), help="Look only so often, then end.")
@home_option
def follow(
    name: str,
    command: str | None,
    url: str | None,
    metric: str | None,
    per: float,
    every_s: float,
    times: int | None,
    home: str | None,
) -> None:
    """Follow the demand of the service behind the reservation NAME, until interrupted.

    The number is read by a command or from a metric; --per 50 makes one slot of every 50. While it cannot be
    read, the service keeps what it wanted last.
    """
    from swell.domain import InputError

    if (command is None) == (url is None) or (url is None) != (metric is None):
        raise InputError("give either --command, or --url and --metric", field="command")
    if not per > 0:
        raise InputError(f"per must be more than 0, got {per:g}", field="per")
    if command is not None:
        read = command_source(shlex.split(command))
    else:
        read = metric_source(str(url), str(metric))
    said: int | None = None
    trouble, said_s, looks = "", 0.0, 0
    with connect(home, prefer_admin=True) as client:
        found = next((one for one in client.reservations() if one.name == name), None)
        if found is None or found.most is None:
            raise InputError(
                f"name: there is no reservation '{name}' that follows a service;"
                f" make one with 'swell reserve add {name} --most N'",
                field="name",
            )
        while times is None or looks < times:
            began_s = time.monotonic()
            try:
                wanted = to_gpus(read(), per=per, most=found.most)
            except SourceFailed as error:
                if str(error) != trouble:
                    click.echo(f"{error}; {name} keeps what it wanted", err=True)
                trouble = str(error)
            else:
                trouble = ""
                if wanted != said or began_s - said_s > SAY_AGAIN_S:
                    client.demand(name, wanted)
                    if wanted != said:
                        click.echo(f"{name} wants {wanted} slots")
                    said, said_s = wanted, began_s
            looks += 1
            if times is None or looks < times:
                time.sleep(max(every_s - (time.monotonic() - began_s), 0.0))


def _what(one: ReservationView) -> str:
    from swell.domain import many

    if one.nodes:
        return "nodes " + ", ".join(one.nodes)
    slots = many(one.gpus, "slot")
    return slots if one.most is None else f"{slots} now, {one.most} at most"


def _hours(one: ReservationView) -> str:
    if one.end_s is None:
        return "always" if one.start_s <= time.time() else f"from {say_moment(one.start_s)}"
    hours = f"{say_moment(one.start_s)} to {say_moment(one.end_s)}"
    return hours if one.every_s is None else f"{hours}, every {say_duration(one.every_s)}"


# What a service wants, read from outside: a command that prints a number, or one metric of Prometheus.
#
#     read = command_source(["./wanted.sh"])
#     read = metric_source("http://web:9090/metrics", 'requests_per_second{job="web"}')
#     gpus = to_gpus(read(), per=50.0, most=8)
#
# A source raises `SourceFailed`, with a line for people, if there is no number to be had.


READ_LIMIT_S = 10.0
MOST_BYTES = 4 << 20
Source = Callable[[], float]

_METRIC = re.compile(r"\s*([A-Za-z_:][\w:]*)\s*(?:\{(.*)\})?\s*", re.DOTALL)
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"([^"\\]*)"\s*(?:,|$)')


class SourceFailed(SwellError):
    """The demand of a service could not be read."""


def command_source(words: Sequence[str]) -> Source:
    """Runs a command; the last word of its output is the number."""
    if not words:
        raise InputError("command: give a command that prints a number", field="command")

    def read() -> float:
        try:
            done = subprocess.run(
                list(words), capture_output=True, text=True, timeout=READ_LIMIT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise SourceFailed(f"'{words[0]}' took longer than {READ_LIMIT_S:g} s") from None
        except OSError as error:
            raise SourceFailed(f"'{words[0]}' cannot be run: {error.strerror}") from error
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [""])[-1][:200]
            raise SourceFailed(f"'{words[0]}' ended with exit code {done.returncode}: {said}")
        return _number((done.stdout.split() or [""])[-1], f"'{words[0]}' printed")

    return read


def metric_source(url: str, metric: str) -> Source:
    """Reads a page in the Prometheus text format; the sum of all samples of the metric with its labels."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"url must begin with http:// or https://, got {url!r}", field="url")
    name, labels = _parse_metric(metric)

    def read() -> float:
        import httpx2
        from prometheus_client.parser import text_string_to_metric_families

        try:
            answer = httpx2.get(url, timeout=READ_LIMIT_S, follow_redirects=False)
            answer.raise_for_status()
            families = list(text_string_to_metric_families(answer.text[:MOST_BYTES]))
        except (httpx2.HTTPError, ValueError) as error:
            raise SourceFailed(f"{url} cannot be read: {error}") from error
        samples = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not samples:
            raise SourceFailed(f"{url} has no metric '{metric}'")
        return _number(math.fsum(samples), f"'{metric}' is")

    return read


def to_gpus(value: float, *, per: float, most: int) -> int:
    """How many slots a service wants whose metric has this value, at `per` of it for each slot."""
    return min(math.ceil(max(value, 0.0) / per - 1e-9), most)


def _number(text: str | float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise SourceFailed(f"{what} {text!r}, which is no number") from None
    if not math.isfinite(value):
        raise SourceFailed(f"{what} {value}, which is no number of anything")
    return value


def _parse_metric(text: str) -> tuple[str, dict[str, str]]:
    found = _METRIC.fullmatch(text)
    rest, labels = (found[2] or "") if found else "", dict[str, str]()
    while found and rest.strip():
        label = _LABEL.match(rest)
        if label is None:
            found = None
            break
        labels[label[1]] = label[2]
        rest = rest[label.end() :]
    if found is None:
        raise InputError(f'metric must be NAME or NAME{{label="value"}}, got {text!r}', field="metric")
    return found[1], labels
