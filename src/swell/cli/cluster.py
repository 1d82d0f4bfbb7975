"""Commands about the cluster: its nodes, and the policy that decides."""

from __future__ import annotations

import click

from swell.cli._common import (
    connect,
    home_option,
    json_option,
    new_table,
    print_json,
    print_rich,
)
from swell.cli._when import say_until


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
