"""`swell token`: who may use this control plane."""

from __future__ import annotations

import click

from swell.cli._common import connect, home_option, json_option, new_table, print_json, print_rich
from swell.cli._when import DURATION, say_until


@click.group(epilog="\b\nExample:\n  swell token list\n")
def token() -> None:
    """Create, list and revoke the tokens by which people use this control plane."""


@token.command(epilog="\b\nExample:\n  swell token create ada --expires 30d\n")
@click.argument("user")
@click.option("--role", type=click.Choice(["user", "admin"]), default="user", show_default=True)
@click.option("--expires", type=DURATION, help="After this long, such as 30d [default: never].")
@json_option
@home_option
def create(user: str, role: str, expires: float | None, as_json: bool, home: str | None) -> None:
    """Make a token for USER. It is shown this once."""
    with connect(home, admin=True) as client:
        made = client.create_token(user, role=role, ttl_s=expires)
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    click.echo(made.token)
    click.echo(
        f"It cannot be shown again. {user} sets SWELL_TOKEN to it and SWELL_URL to this server's address;"
        f" 'swell token revoke {made.token_id}' makes it worthless.",
        err=True,
    )


@token.command("list", epilog="\b\nExample:\n  swell token list\n")
@json_option
@home_option
def list_(as_json: bool, home: str | None) -> None:
    """List the tokens, without their secrets."""
    with connect(home, admin=True) as client:
        found = client.tokens()
    if as_json:
        print_json([one.model_dump(mode="json") for one in found])
        return
    table = new_table(["token", "user", "role", "expires"])
    for one in found:
        table.add_row(
            one.token_id, one.user, one.role, "never" if one.expires_s is None else say_until(one.expires_s)
        )
    print_rich(table)


@token.command(epilog="\b\nExample:\n  swell token revoke 0123456789ab\n")
@click.argument("token_id")
@json_option
@home_option
def revoke(token_id: str, as_json: bool, home: str | None) -> None:
    """Make a token worthless at once. TOKEN_ID is as `swell token list` shows it."""
    with connect(home, admin=True) as client:
        gone = client.revoke_token(token_id)
    if as_json:
        print_json(gone.model_dump(mode="json"))
    else:
        click.echo(f"Token {gone.token_id} of {gone.user} is worthless now.")
