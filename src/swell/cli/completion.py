"""`swell completion`: what a shell needs to complete swell's commands and options."""

from __future__ import annotations

import click

EPILOG = """\b
Setting up:
  bash:  swell completion bash >> ~/.bashrc
  zsh:   swell completion zsh >> ~/.zshrc
  fish:  swell completion fish > ~/.config/fish/completions/swell.fish

\b
Example:
  swell completion bash
"""


@click.command(epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the lines that make SHELL complete swell's commands and options."""
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # click has one for each of the choices
    click.echo(made(ctx.find_root().command, {}, "swell", "_SWELL_COMPLETE").source())
