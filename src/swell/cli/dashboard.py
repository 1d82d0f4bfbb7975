"""`swell dashboard`: the live page of the control plane, in a browser."""

from __future__ import annotations

import os

import click

from swell.cli._common import home_option, json_option, print_json


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
