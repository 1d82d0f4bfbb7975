"""`swell report`: event logs as a page to share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from swell.report.runs import Run


EPILOG = """\b
Example:
  swell generate --jobs 50 --seed 1 -o jobs.csv
  swell simulate jobs.csv --cluster 4x4 --policy afs-l --events afs.jsonl
  swell report afs.jsonl -o report.html
  swell report afs.jsonl -o figure --format svg
"""


@click.command(epilog=EPILOG)
@click.argument("logs", nargs=-1, required=True, metavar="EVENTS...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="FILE", type=click.Path(path_type=Path), help="What to write."
)
@click.option("--title", default="swell report", show_default=True, help="Title of the page.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "svg", "png"]),
    default="html",
    show_default=True,
    help="One page, or for papers a chart in each of several files such as FILE-resizes.svg.",
)
def report(logs: tuple[Path, ...], output: Path, title: str, form: str) -> None:
    """Make one page, without scripts and links, from event logs of live periods or of simulations.

    Event logs are written by `swell simulate --events` and `swell events --json`. Logs with the same jobs are
    compared with each other; each is named after its file, or by NAME=FILE.
    """

    check_writable(output)
    runs = [_read(path) for path in logs]
    for path in write_report(runs, output, title, form):
        click.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def _read(given: Path) -> Run:
    from swell.domain import InputError, read_events
    from swell.report.runs import Run

    label, equals, rest = str(given).partition("=")
    path = Path(rest) if equals and not given.exists() else given
    label = label if path is not given else given.stem
    try:
        with path.open(encoding="utf-8") as file:
            run = Run.read(label, read_events(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"EVENTS: cannot read {path}: {error};"
            " 'swell events --json' and 'swell simulate --events' write such"
            " files",
            field="logs",
        ) from error
    except InputError as error:
        raise InputError(
            f"EVENTS: {path}: {error}; 'swell events --json' and 'swell simulate --events' write such files",
            field="logs",
        ) from error
    if not run.lanes.jobs:
        raise InputError(f"EVENTS: {path} has no event of a job; give a log with some", field="logs")
    return run


def write_report(
    runs: Sequence[Run],
    output: Path,
    title: str,
    form: str = "html",
    groups: Sequence[tuple[str, Sequence[Run]]] | None = None,
) -> list[Path]:
    """Write the report, and return the files written."""
    from swell.report import svg
    from swell.report.page import charts, grouped, page, pixels

    groups = groups or grouped(runs)
    if form == "html":
        output.write_text(page(title, groups), encoding="utf-8")
        return [output]
    written = []
    for number, (_, members) in enumerate(groups, 1):
        labels = [run.label for run in members]
        made = [
            (name, svg.figure(drawn, labels if "polyline" in drawn else ()))
            for name, drawn, _ in charts(members)
        ]
        made += [(f"lanes {run.label}", svg.figure(svg.swim_lanes(run))) for run in members]
        for name, drawn in made:
            words = "".join(c if c.isalnum() or c in ".-" else "-" for c in name.lower())
            part = f"{number}-" if len(groups) > 1 else ""
            written.append(output.with_name(f"{output.stem}-{part}{words}.{form}"))
            written[-1].write_bytes(pixels(drawn) if form == "png" else drawn.encode())
    return written


# Files that commands write.


def check_writable(path: Path) -> None:
    """Refuse an output file that cannot be written now, rather than after an hour of work."""
    from swell.domain import InputError

    folder = path.parent
    if path.is_dir():
        raise InputError(f"{path}: is a directory; give the name of a file to write")
    if not folder.is_dir():
        raise InputError(f"{path}: there is no directory '{folder}'; make it, or give another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{path}: cannot be written: permission denied; give another file")
