"""Commands about the cluster: its nodes, the policy that decides, its teams, and the dashboard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from swell.cli._common import (
    clean,
    connect,
    home_option,
    json_option,
    new_table,
    print_json,
    print_rich,
    say_until,
)

if TYPE_CHECKING:
    from swell.api.schemas import TeamView


@click.command(epilog="\b\nExample:\n  swell nodes\n")
@json_option
@home_option
def nodes(as_json: bool, home: str | None) -> None:
    """Show the nodes, how many of their slots are in use, and the GPU type.

    A node on which workers stay slow or cannot be started is said to be so, and until when it is avoided.

    Where nodes are rented, it also says how many are wanted, and why.
    """
    with connect(home) as client:
        found = client.nodes()
        rented = None if as_json else client.autoscaler()
    if as_json:
        print_json([node.model_dump(mode="json") for node in found])
        return
    others = any(node.held for node in found)
    columns = ["node", "slots", "in use", *(["others"] if others else []), "type", "state"]
    table = new_table(columns, right=["slots", "in use", "others"])
    for node in found:
        state = "down" if not node.up else "drained" if node.draining and not node.used else "up"
        state = "draining" if node.draining and node.used else state
        state = "not rented" if node.rentable and not node.up else state
        if node.slow is not None and node.up and not node.draining:
            until_s = node.avoided_until_s
            away = (
                ", used because it is needed" if until_s is None else f", avoided until {say_until(until_s)}"
            )
            state = f"{node.slow:.1f} times slower{away}"
        if node.unstartable and node.avoided_until_s is not None and not node.draining:
            state = f"no worker starts: {node.unstartable}; avoided until {say_until(node.avoided_until_s)}"
        held = [str(node.held)] if others else []
        table.add_row(node.name, str(node.gpus), str(node.used), *held, node.gpu_type, state)
    print_rich(table)
    if rented is not None:
        now = f"{rented.ready} nodes are rented, {rented.coming} coming, {len(rented.leaving)} leaving"
        allowed = f"allowed are {rented.least} to {rented.most}"
        click.echo(f"{now}; {rented.wanted} are wanted ({allowed}): {rented.reason}")
        per_hour = (rented.ready + rented.coming) * rented.price_per_hour
        budget = "" if rented.budget_per_hour is None else f" of at most {rented.budget_per_hour:g}"
        click.echo(f"They cost {per_hour:g}{budget} per hour.")


@click.command(epilog="\b\nExample:\n  swell drain n0 --undo\n")
@click.argument("node")
@click.option("--undo", is_flag=True, help="Use the node again.")
@json_option
@home_option
def drain(node: str, undo: bool, as_json: bool, home: str | None) -> None:
    """Move all jobs off a NODE and give it none until --undo. No work is lost."""
    with connect(home, admin=True) as client:
        found = client.undrain(node) if undo else client.drain(node)
    if as_json:
        print_json([one.model_dump(mode="json") for one in found])
    elif undo:
        click.echo(f"{node} gets jobs again.")
    else:
        click.echo(f"{node} is being drained; 'swell nodes' shows when it is empty, --undo uses it again.")


@click.command(epilog="\b\nExample:\n  swell policy elasticflow\n")
@click.argument("name", required=False)
@json_option
@home_option
def policy(name: str | None, as_json: bool, home: str | None) -> None:
    """Show the policy that decides how many slots each job gets, or switch to another while jobs run.

    Options are given behind the name: pollux:p=-1. `swell policies` lists the policies.
    """
    with connect(home, admin=name is not None) as client:
        now = client.policy() if name is None else client.set_policy(name)
    if as_json:
        print_json({"policy": now})
    elif name is None:
        click.echo(f"{now} ('swell policies' lists the others, 'swell policy NAME' switches)")
    else:
        click.echo(f"{now} decides from now on; running jobs keep their slots until it resizes them.")


# `swell teams`: who shares the cluster, and how many slots each team has for itself.


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


# `swell dashboard`: the live page of the control plane, in a browser.


@click.command(epilog="\b\nExample:\n  swell dashboard --no-browser\n")
@click.option("--browser/--no-browser", default=True, help="Open a browser, or only print the address.")
@json_option
@home_option
def dashboard(browser: bool, as_json: bool, home: str | None) -> None:
    """Open the dashboard: the cluster, the queue and every job, live.

    It asks for a token. Tokens never become part of an address, so none is given to the browser.
    """
    from swell.api.home import ServerFile, home_dir, token_file
    from swell.cli._platform import running_pid
    from swell.domain import SwellError

    where, url = home_dir(home), None if home is not None else os.environ.get("SWELL_URL")
    readable: list[str] = []
    if url is None:
        found = ServerFile.read(where)
        if running_pid(where) is None or found is None:
            raise SwellError(f"no control plane is running here (home {where}): start one with 'swell up'")
        url = found.url
        tokens = [token_file(where, role) for role in ("admin", "user")]
        readable = [str(path) for path in tokens if os.access(path, os.R_OK)]
    url = url.split(",")[0].strip().rstrip("/")  # of several control planes any one will do
    if as_json:
        print_json({"url": f"{url}/", "token_files": readable})
        return
    click.echo(f"The dashboard: {url}/")
    click.echo(
        f"To sign in, paste the token in {readable[0]}" if readable else "To sign in, paste your token."
    )
    if browser:
        import webbrowser

        if not webbrowser.open(f"{url}/"):
            click.echo("No browser could be opened here: open the address by hand.", err=True)
