"""The commands that people type. The module of a command is imported only when the command is called."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

import click

from swell import __version__

# heading -> name -> (module:attribute, the line shown by `swell --help`)
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Platform": {
        "up": ("swell.cli.up:up", "Start the control plane on this machine."),
        "down": ("swell.cli.up:down", "Stop the control plane."),
        "dashboard": ("swell.cli.cluster:dashboard", "Open the live dashboard in a browser."),
        "nodes": ("swell.cli.cluster:nodes", "Show the nodes and their slots."),
        "drain": ("swell.cli.cluster:drain", "Move all jobs off a node."),
        "reserve": ("swell.cli.reserve:reserve", "Keep slots for services part of the time."),
        "teams": ("swell.cli.cluster:teams", "Share the slots out among teams."),
        "policy": ("swell.cli.cluster:policy", "Show the policy, or switch it while jobs run."),
        "token": ("swell.cli.tokens:token", "Create, list and revoke tokens."),
        "whoami": ("swell.cli.tokens:whoami", "Show which platform and user commands are for."),
        "doctor": ("swell.cli.doctor:doctor", "Check home, store, disk and machine."),
        "backup": ("swell.cli.safekeeping:backup", "Write store, tokens and checkpoints to a file."),
        "restore": ("swell.cli.safekeeping:restore", "Bring a backup back."),
        "gc": ("swell.cli.safekeeping:gc", "Delete what need not be kept of ended jobs."),
    },
    "Jobs": {
        "init": ("swell.cli.submit:init", "Write a commented job file to start from."),
        "submit": ("swell.cli.submit:submit", "Submit a job; get a promise, then its logs."),
        "quote": ("swell.cli.submit:quote", "Show what would be promised, without submitting."),
        "sweep": ("swell.cli.sweep:sweep", "Search for good hyper-parameters with many trials."),
        "queue": ("swell.cli.jobs:queue", "List jobs."),
        "describe": (
            "swell.cli.jobs:describe",
            "Show why a job runs or waits, and when it will be done.",
        ),
        "logs": ("swell.cli.jobs:logs", "Show a job's output."),
        "pause": ("swell.cli.jobs:pause", "Have a job give its slots back until it is resumed."),
        "resume": ("swell.cli.jobs:resume", "Let a paused job go on."),
        "resize": ("swell.cli.jobs:resize", "Change a running job's workers, or bound them."),
        "cancel": ("swell.cli.jobs:cancel", "End a job."),
        "top": ("swell.cli.top:top", "Watch nodes, jobs and slots live."),
        "events": ("swell.cli.jobs:events", "Show what has happened, or follow what happens."),
        "usage": ("swell.cli.usage:usage", "Show who used how many GPU-hours, and what became of them."),
        "replay": ("swell.cli.usage:replay", "Show what would have happened under other policies."),
    },
    "Without a control plane": {
        "demo": ("swell.cli.demo:demo", "Watch real jobs swell and ebb on this machine, in two minutes."),
        "simulate": ("swell.cli.simulate:simulate", "Run traces under one or more policies and compare."),
        "report": ("swell.cli.report:report", "Make a page to share from event logs."),
        "policies": ("swell.cli.simulate:policies", "List the policies: paper, goal and options."),
        "generate": ("swell.cli.simulate:generate", "Write a synthetic workload."),
        "run": ("swell.cli.run:run", "Run a training script elastically on this machine."),
        "completion": ("swell.cli.completion:completion", "Complete commands and options in a shell."),
    },
}
COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}
FORMER = {"scale": "resize"}
"""Names that commands had; they still work, and no help shows them."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = FORMER.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A refusal becomes one line on stderr; Ctrl-C leaves no traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(130)
        except ImportError as error:
            from swell.extras import missing_extra

            missing = missing_extra(error, f"'swell {ctx.invoked_subcommand}'")
            if missing is None:
                raise
            click.echo(f"swell: {missing}", err=True)
            ctx.exit(1)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                where = f": {error.filename}" if error.filename else ""
                click.echo(f"swell: {error.strerror}{where}. Make room there, then try again.", err=True)
                ctx.exit(1)
            if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                where = f"{error.filename}: " if error.filename else ""
                remedy = "Run swell as the account that owns it, or name another place (--home, -o)."
                click.echo(f"swell: {where}{error.strerror} for uid {os.geteuid()}. {remedy}", err=True)
                ctx.exit(1)
            # Not imported at the top, to start fast: a command that raises a SwellError has imported it.
            errors = sys.modules.get("swell.domain.errors")
            if errors is None or not isinstance(error, errors.SwellError):
                raise
            from swell.cli._common import clean

            click.echo(f"swell: {clean(str(error))}", err=True)
            ctx.exit(2 if isinstance(error, errors.InputError) else 1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, section in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, line) for name, (_, line) in section.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS | FORMER and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="swell")
def main() -> None:
    """swell: elastic deep-learning training, and the simulator that runs the very same policies.

    \b
    Example:
      swell generate --jobs 100 --seed 1 -o jobs.csv
      swell simulate jobs.csv --cluster 16x4 --policy afs-l --policy tiresias
    """
