"""`swell init`: a commented job file to start from."""

from __future__ import annotations

from pathlib import Path

import click

from swell.cli._common import json_option, print_json

EPILOG = """\b
Example:
  swell init train.py --output train.toml --force
"""


@click.command(epilog=EPILOG)
@click.argument("script", default="train.py")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write [default: job.toml].",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@json_option
def init(script: str, output: Path | None, force: bool, as_json: bool) -> None:
    """Write a job file for SCRIPT in which every field is explained."""
    from swell.cli._jobfile import template
    from swell.domain import InputError
    from swell.domain.request import name_from

    path = output or Path("job.toml")
    if path.suffix != ".toml":
        raise InputError(f"output must end in .toml, got '{path}'", field="output")
    if path.exists() and not force:
        raise InputError(f"{path} already exists; --force overwrites it", field="output")
    name = name_from(script)
    try:
        path.write_text(template(str(path), name, script.replace("\\", "/")))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); give another --output", field="output"
        ) from error
    if as_json:
        print_json({"file": str(path), "name": name})
        return
    click.echo(f"Wrote {path}. Check it, then: swell submit {path}")
