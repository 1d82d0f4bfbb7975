"""`swell backup`, `swell restore` and `swell gc`: what is kept, and what need not be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from swell.cli._common import connect, home_option, json_option, print_json
from swell.cli._when import BYTES, DURATION, say_moment

if TYPE_CHECKING:
    from swell.cli._backup import Restored

RESTORE_EPILOG = """\b
Example:
  swell restore swell-backup.tar --home /srv/swell
"""


@click.command(epilog="\b\nExample:\n  swell backup swell-backup.tar\n")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--without-checkpoints", is_flag=True, help="Leave out the checkpoints of jobs that are not over."
)
@json_option
@home_option
def backup(file: Path, without_checkpoints: bool, as_json: bool, home: str | None) -> None:
    """Write store, tokens and checkpoints of unfinished jobs into FILE, also while swell runs.

    The file is readable by its owner only: it holds tokens, and the environments of jobs.
    """
    from swell.api.home import home_dir
    from swell.cli._backup import save

    done = save(home_dir(home), file, checkpoints=not without_checkpoints)
    if as_json:
        print_json({"file": str(file), "jobs": done.jobs, "bytes": done.bytes, "left_out": done.left_out})
        return
    click.echo(f"{file}: the store, the tokens and {len(done.jobs)} unfinished jobs, {done.bytes} bytes.")
    _say_left_out(done.left_out, "is not in it")
    click.echo("'swell restore' brings it back, here or on another machine.")


@click.command(epilog=RESTORE_EPILOG)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--paused", is_flag=True, help="Pause all unfinished jobs, for a person to resume.")
@click.option("--new-tokens", is_flag=True, help="Accept none of the backup's tokens; make new ones.")
@click.option("--force", is_flag=True, help="Replace the store that is there; it is kept beside the new one.")
@json_option
@home_option
def restore(file: Path, paused: bool, new_tokens: bool, force: bool, as_json: bool, home: str | None) -> None:
    """Bring a backup back into a home in which no control plane and no job runs.

    Everything is as it was at the moment of the backup: jobs that ended since then run again (unless
    --paused), jobs submitted since then are not known, and tokens revoked since then are good again (unless
    --new-tokens).
    """
    from swell.api.home import home_dir
    from swell.cli._backup import bring_back

    done = bring_back(home_dir(home), file, paused=paused, new_tokens=new_tokens, force=force)
    if as_json:
        print_json(
            {
                "home": str(done.home),
                "jobs": done.jobs,
                "made_s": done.made_s,
                "set_aside": done.set_aside,
                "left_out": done.left_out,
            }
        )
        return
    _say(done, paused, new_tokens)


def _say_left_out(left_out: dict[str, str], what: str) -> None:
    """Name the jobs whose checkpoints a backup does not have whole."""
    from swell.cli._terminal import clean

    for job, reason in left_out.items():
        click.echo(clean(f"swell: what job {job} has saved {what}: {reason}"), err=True)


def _say(done: Restored, paused: bool, new_tokens: bool) -> None:
    click.echo(f"{done.home} is as it was at {say_moment(done.made_s)}.")
    if done.jobs:
        after = "are paused: 'swell resume' lets one go on" if paused else "go on with the next 'swell up'"
        click.echo(f"Unfinished jobs that {after}: {', '.join(done.jobs)}")
    _say_left_out(done.left_out, "was not restored whole")
    if done.set_aside:
        click.echo(f"The store that was there is kept as {done.set_aside}.")
    old = (
        "Only the new tokens in tokens/ are good."
        if new_tokens
        else "Tokens revoked since then are good again."
    )
    click.echo(f"Jobs submitted since then are not known. {old}")
    click.echo("\nNext:\n  swell up -d\n  swell token list\n")


@click.command(epilog="\b\nExample:\n  swell gc --dry-run\n  swell gc --keep 7d\n")
@click.option("--keep", "keep_s", type=DURATION, help="Keep jobs for so long after their end.")
@click.option(
    "--keep-size", "keep_bytes", type=BYTES, help="Keep at most so much of ended jobs' directories."
)
@click.option("--dry-run", "dry", is_flag=True, help="Only say what would be deleted.")
@json_option
@home_option
def gc(keep_s: float | None, keep_bytes: int | None, dry: bool, as_json: bool, home: str | None) -> None:
    """Delete what need not be kept of jobs that are over. Swell does the same by itself once an hour.

    Records, events and directories go after 30 days, all checkpoints of a job but its newest after one day,
    unless `swell up` was told otherwise. Nothing that runs or waits is touched.
    """
    with connect(home, admin=True) as client:
        done = client.collect(keep_s=keep_s, keep_bytes=keep_bytes, dry=dry)
    if as_json:
        print_json(done.model_dump(mode="json"))
        return
    verb = "would be" if dry else "were"
    click.echo(
        f"{len(done.forgotten)} jobs {verb} forgotten, {len(done.thinned)} {verb} left with their newest"
        f" checkpoint, {done.freed_bytes / 2**20:.1f} MiB {verb} freed."
    )
