"""`swell token`: the tokens with which people use this control plane."""

from __future__ import annotations

import click

from swell.cli._common import (
    DURATION,
    connect,
    home_option,
    json_option,
    new_table,
    print_json,
    print_rich,
    say_until,
)


@click.group(epilog="\b\nExample:\n  swell token list\n")
def token() -> None:
    """Create, list and revoke the tokens with which people use this control plane."""


@token.command(epilog="\b\nExample:\n  swell token create ada --expires 30d\n")
@click.argument("user")
@click.option("--role", type=click.Choice(["user", "viewer", "admin"]), default="user", show_default=True)
@click.option("--expires", type=DURATION, help="Lifetime of the token, such as 30d [default: no end].")
@json_option
@home_option
def create(user: str, role: str, expires: float | None, as_json: bool, home: str | None) -> None:
    """Make a token for USER. It is shown only now."""
    with connect(home, admin=True) as client:
        made = client.create_token(user, role=role, ttl_s=expires)
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    click.echo(made.token)
    click.echo(
        f"The token cannot be shown again. {user} sets SWELL_TOKEN to it and SWELL_URL to this server's"
        f" address; 'swell token revoke {made.token_id}' revokes it.",
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


@token.command(epilog="\b\nExample:\n  swell token reset\n")
@click.option(
    "--everybody", is_flag=True, help="Replace all tokens of all users, not only the administrator's."
)
@click.option("--store", metavar="URL", envvar="SWELL_STORE", help="The store that `swell up` is given.")
@json_option
@home_option
def reset(everybody: bool, store: str | None, as_json: bool, home: str | None) -> None:
    """Make a new administrator's token without a control plane, for an operator who is locked out.

    The old one is good no longer. Needs access to the home and its store, and no control plane that runs.
    """
    from swell.api.home import home_dir
    from swell.cli._platform import check_store, only_one
    from swell.cli.safekeeping import reset_tokens
    from swell.control.store import Store
    from swell.control.store import connect as open_database

    where = home_dir(home)
    with only_one(where):
        opened = Store(open_database(store or str(where / "store.db")))
        try:
            check_store(where, opened)
            written = reset_tokens(opened, where, everybody=everybody)
        finally:
            opened.close()
    if as_json:
        print_json([str(path) for path in written])
        return
    for path in written:
        click.echo(f"A new token was written to {path}; the old one is good no longer.")


@token.command(epilog="\b\nExample:\n  swell token revoke ada\n")
@click.argument("which")
@json_option
@home_option
def revoke(which: str, as_json: bool, home: str | None) -> None:
    """Revoke a token, or all tokens of a user, at once. WHICH is a token or a user of `swell token list`."""
    from swell.control.errors import NotFound

    with connect(home, admin=True) as client:
        found = [one.token_id for one in client.tokens() if which in (one.token_id, one.user)]
        if not found:
            raise NotFound(f"there is no token or user '{which}'; 'swell token list' shows them")
        revoked = [client.revoke_token(token_id) for token_id in found]
    if as_json:
        print_json([one.model_dump(mode="json") for one in revoked])
        return
    for one in revoked:
        click.echo(f"Token {one.token_id} of {one.user} is revoked.")


@click.command(epilog="\b\nExample:\n  swell whoami\n")
@json_option
@home_option
def whoami(as_json: bool, home: str | None) -> None:
    """Show which platform and which user commands are for."""
    from swell.api.transport import find_server

    with connect(home) as client:
        who = client.me()
    url = find_server(None, None, home, "user", None).url
    if as_json:
        print_json({"user": who.user, "role": who.role, "url": url})
        return
    click.echo(f"{who.user} ({who.role}) at {url}")
