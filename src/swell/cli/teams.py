"""`swell teams`: who shares the cluster, and how many slots each team has for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from swell.cli._common import connect, home_option, json_option, new_table, print_json, print_rich
from swell.cli._terminal import clean

if TYPE_CHECKING:
    from swell.api.teams import TeamView

NOBODY = "(no team)"


@click.group(epilog="\b\nExample:\n  swell teams list\n")
def teams() -> None:
    """Share the slots out among teams; a team's idle slots are lent, and come back when it has work.

    See docs/guides/teams.md.
    """


@teams.command("set", epilog="\b\nExample:\n  swell teams set vision --slots 1 --user ann --user ben\n")
@click.argument("name")
@click.option(
    "--slots",
    type=click.IntRange(min=0),
    required=True,
    help="The quota: slots that the team has for itself.",
)
@click.option(
    "--user",
    "users",
    multiple=True,
    metavar="USER",
    help="A user of the team; may be repeated. The team has these users then, and no others "
    "[default: those it has].",
)
@click.option("--no-users", is_flag=True, help="Remove all users from the team.")
@click.option("--force", is_flag=True, help="Even if that breaks what was promised to a job.")
@json_option
@home_option
def set_(
    name: str,
    slots: int,
    users: tuple[str, ...],
    no_users: bool,
    force: bool,
    as_json: bool,
    home: str | None,
) -> None:
    """Make the team NAME, or change it."""
    from swell.domain import InputError, many

    if users and no_users:
        raise InputError("give either --user or --no-users, not both", field="user")
    with connect(home, admin=True) as client:
        named = users if users or no_users else None
        made = client.set_team(name, slots=slots, users=named, force=force)
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    people = ", ".join(made.users) or "nobody yet"
    click.echo(clean(f"{name}: {many(made.slots, 'slot')}; its users: {people}."))
    _warn(made)


@teams.command("list", epilog="\b\nExample:\n  swell teams list\n")
@json_option
@home_option
def list_(as_json: bool, home: str | None) -> None:
    """Show the teams, and the slots that they have and borrow now."""
    with connect(home, prefer_admin=True) as client:
        found = client.teams()
    if as_json:
        print_json([one.model_dump(mode="json") for one in found])
        return
    if not found:
        click.echo("There are no teams; 'swell teams set --help' shows how to make one.")
        return
    table = new_table(["team", "quota", "has", "borrowed", "running", "waiting", "users"])
    for one in found:
        quota = str(one.slots) if one.name else f"{one.own} left"
        if one.name and one.own < one.slots:
            quota += f" ({one.own} now)"
        counts = [str(value) for value in (one.used, one.borrowed, one.running, one.waiting)]
        table.add_row(one.name or NOBODY, quota, *counts, clean(", ".join(one.users)))
    print_rich(table)


@teams.command(epilog="\b\nExample:\n  swell teams remove vision\n")
@click.argument("name")
@click.option("--force", is_flag=True, help="Even if that breaks what was promised to a job.")
@json_option
@home_option
def remove(name: str, force: bool, as_json: bool, home: str | None) -> None:
    """Remove the team NAME; its users are in no team then, and their jobs go on."""
    with connect(home, admin=True) as client:
        gone = client.remove_team(name, force=force)
    if as_json:
        print_json(gone.model_dump(mode="json"))
        return
    click.echo(f"{name} is removed; its users share what no quota takes.")
    _warn(gone)


def _warn(changed: TeamView) -> None:
    for job_id in changed.endangered:
        click.echo(f"In danger: the promised finish of {job_id}.")
