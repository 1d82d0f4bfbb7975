"""`swell submit`, `swell quote` and `swell init`: a job, its promise, its job file."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from swell.cli._common import (
    BYTES,
    DEADLINE,
    DURATION,
    connect,
    follow_logs,
    home_option,
    json_option,
    parse_bytes,
    parse_deadline,
    parse_duration,
    print_json,
)
from swell.domain import InputError, JobOptions, nearest
from swell.domain.launch_line import understand
from swell.domain.request import FIELDS, JOB_FILES, Kind, RequestField, name_from, unknown_option

if TYPE_CHECKING:
    from swell.api.client import Client
    from swell.api.schemas import JobView


# Job files: a TOML, YAML or JSON file can say everything that the flags of `swell submit` can.
#
# Files, flags and the template for a new file are derived from the fields of `swell.domain.JobRequest`.


FORMS = {Kind.MOMENT: "2h, 18:30, 'tomorrow 09:00' or 2026-03-01T09:00"}
"""The ways to write a value, where there are several."""
HEAD = """\
# A job for swell. `swell submit {file}` hands it in; flags given there override what is written here.
# There is no number of GPUs: swell decides it, and gives the job more when the cluster is quiet.
# Paths are relative to this file.

"""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, got {value!r}")
    return value


def _seconds(value: Any) -> float:
    return parse_duration(f"{value:g}" if _is_number(value) else _text(value))


def _moment(value: Any) -> float:
    if hasattr(value, "isoformat"):  # TOML and YAML have dates of their own
        value = value.isoformat()
    return parse_deadline(f"{value:g}" if _is_number(value) else _text(value))


def _size(value: Any) -> int:
    if isinstance(value, int | float) and math.isfinite(value):
        return int(value)
    return parse_bytes(_text(value))


def _words(value: Any) -> list[str]:
    if not isinstance(value, list) or any(isinstance(v, dict | list | bool) for v in value):
        raise ValueError(f'must be a list of texts, such as ["--epochs", "10"], got {value!r}')
    return [str(word) for word in value]


def _environment(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a table of names and values, got {value!r}")
    return {str(name): str(text) for name, text in value.items()}


_READERS: dict[Kind, Callable[[Any], Any]] = {
    Kind.TEXT: _text,
    Kind.PATH: _text,
    Kind.SWITCH: _switch,
    Kind.COUNT: _count,
    Kind.BYTES: _size,
    Kind.DURATION: _seconds,
    Kind.MOMENT: _moment,
    Kind.WORDS: _words,
    Kind.VARIABLES: _environment,
}
"""How a value in a file is read, by kind; each function raises ValueError for a value that is not allowed."""


def read_job(path: Path) -> tuple[str, JobOptions]:
    """Script and options from a job file; paths in the file are relative to it."""
    return job_of(load(path), path)


def job_of(table: dict[str, Any], path: Path) -> tuple[str, JobOptions]:
    """Script and options from a table of the file `path`."""
    fields = {field.spoken: field for field in FIELDS.values()}
    options: dict[str, Any] = {}
    for spoken, value in table.items():
        if spoken not in fields:
            hint = unknown_option(spoken) or nearest(spoken, list(fields))
            raise InputError(
                f"{path}: there is no field '{spoken}'.{hint} Fields: {', '.join(fields)}", field=spoken
            )
        field = fields[spoken]
        try:
            options[field.name] = _READERS[field.about.kind](value)
        except ValueError as error:
            raise InputError(f"{path}: {spoken}: {error}", field=spoken) from error
    if "script" not in options:
        raise InputError(f'{path}: script is missing; add a line such as script = "train.py"', field="script")
    options.setdefault("workdir", ".")
    options.setdefault("name", name_from(path))
    for name, value in options.items():
        if FIELDS[name].about.kind is Kind.PATH:
            options[name] = str((path.parent / value).absolute())
    script = options.pop("script")
    return script, options  # type: ignore[return-value]  # each field was checked above


def template(file: str, name: str, script: str) -> str:
    """A job file for a script, with all other fields as comments."""
    given = {"name": name, "script": script, "args": []}
    top, others, tables = list[str](), list[str](), list[str]()
    for field in FIELDS.values():
        example, help = field.about.example, field.about.help
        if isinstance(example, dict):  # TOML wants tables after everything else
            tables += ["", f"{f'# [{field.spoken}]':<30} # {help}"]
            tables += [f"# {key} = {_toml(value)}" for key, value in example.items()]
        elif field.name in given:
            top.append(f"{f'{field.spoken} = {_toml(given[field.name])}':<30} # {help}")
        else:
            forms = f" Such as {FORMS[field.about.kind]}." if field.about.kind in FORMS else ""
            others.append(f"{f'# {field.spoken} = {_toml(example)}':<30} # {help}{forms}")
    return HEAD.format(file=file) + "\n".join([*top, "", *others, *tables, ""])


def _toml(value: Any) -> str:
    """A text, a number, true or false, or a list of them, as TOML writes it."""
    return json.dumps(value, ensure_ascii=False)


def load(path: Path) -> dict[str, Any]:
    """The tables of a TOML, YAML or JSON file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); 'swell init' writes a job file") from error
    if path.suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not TOML: {error}; 'swell init' writes a job file") from error
    if path.suffix == ".json":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}; 'swell init' writes a job file") from error
    else:
        import yaml

        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(
                f"{path} is not YAML: {' '.join(str(error).split())}; 'swell init' writes a job file"
            ) from error
    if not isinstance(found, dict):
        raise InputError(
            f"{path}: must be a mapping with a field 'script'; 'swell init' writes such a file",
            field="script",
        )
    return found


F = TypeVar("F", bound=Callable[..., Any])

SUBMIT_EPILOG = """\b
Flags of swell stand before the script, the script's own arguments behind it. Exit codes: 0 finished (or
accepted, with -d), 1 failed or cancelled, 3 the deadline was refused.
`--command -- ./train.sh 300` submits any program (docs/guides/any-command.md).
`--auto -- torchrun --nproc-per-node 8 train.py` takes a line of torchrun or `accelerate launch` as it is
(docs/guides/frameworks.md).

\b
Example:
  swell submit --deadline 2h train.py --epochs 2
  swell submit --auto -- torchrun --nproc-per-node 8 train_ddp.py
"""
QUOTE_EPILOG = """\b
Exit code 3: the deadline would be refused.

\b
Example:
  swell quote --deadline 2h train.py --epochs 2
"""

_TOLD_ELSEWHERE = ("submitted", "progress", "finished", "failed", "rejected", "cancelled")
"""Events that `submit` does not show as such, because the lines around them say the same."""

_CLICK_TYPES: dict[Kind, dict[str, Any]] = {
    Kind.TEXT: {},
    Kind.PATH: {"type": click.Path(file_okay=False)},
    Kind.SWITCH: {"is_flag": True},
    Kind.COUNT: {},
    Kind.BYTES: {"type": BYTES},
    Kind.DURATION: {"type": DURATION},
    Kind.MOMENT: {"type": DEADLINE},
    Kind.WORDS: {"multiple": True, "metavar": "TEXT"},
    Kind.VARIABLES: {"multiple": True, "metavar": "NAME=VALUE"},
}


def job_options(command: F) -> F:
    """Add the flags that describe a job to `submit` or `quote`: one for each field of a request."""
    flags = [flag(field) for field in FIELDS.values() if not field.about.positional]
    flags += [click.argument("script"), click.argument("arguments", nargs=-1, type=click.UNPROCESSED)]
    for one in reversed(flags):
        command = one(command)
    return command


def flag(field: RequestField) -> Callable[[F], F]:
    """The flag of `submit`, `quote` or `run` for a field of a request."""
    about, settings = field.about, dict(_CLICK_TYPES[field.about.kind])
    if about.kind is Kind.COUNT:
        settings["type"] = click.IntRange(None if about.least is None else int(about.least))
    words = about.help
    if about.kind in (Kind.MOMENT, Kind.BYTES):
        words += f" Such as {FORMS.get(about.kind, about.example)}."
    default = about.unless_given or _default(field)
    words += f" [default: {default}]" if default else ""
    names = [f"--{about.also}"] if about.also else []
    names += [f"--{field.spoken.replace('_', '-')}", field.spoken]
    return click.option(*names, help=words, **settings)


def _default(field: RequestField) -> str:
    """The default of a field as a person would type it; empty if the help need not mention it."""
    if field.about.kind is Kind.DURATION and not field.optional:
        return f"{field.default:g}s"
    mentioned = field.about.kind in (Kind.TEXT, Kind.PATH, Kind.COUNT) and not field.optional
    return str(field.default) if mentioned else ""


class ScriptCommand(click.Command):
    """A command whose own options stand before a script; all that follows the script is the script's."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings["context_settings"] = {"allow_interspersed_args": False}
        super().__init__(*args, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; an option that others have and swell has not is explained."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            options = [name for param in self.params for name in param.opts]
            bound = "--max-workers N" if "--max-workers" in options else "--workers MIN:MAX"
            if said := unknown_option(error.option_name, bound):
                text = f"No such option '{error.option_name}'.{said}"
                raise click.UsageError(text, ctx) from None
            raise


@click.command(cls=ScriptCommand, epilog=SUBMIT_EPILOG)
@click.option("-d", "--detach", is_flag=True, help="Submit the job and return at once.")
@job_options
@json_option
@home_option
@click.pass_context
def submit(ctx: click.Context, /, detach: bool, as_json: bool, home: str | None, **flags: Any) -> None:
    """Submit a training SCRIPT or a job file (.toml, .yaml, .json); shows the promise and the output.

    Ctrl-C stops watching; the job goes on.
    """
    from swell.cli._common import REFUSED, outcome, promise_lines

    flags = launched(flags)
    note_misplaced(ctx, flags["script"], flags["arguments"])
    script, options = script_and_options(**flags)
    with connect(home) as client:
        job = client.submit(script, **options)
        if as_json:
            job = job if detach or job.over else client.wait(job)
            print_json(job.model_dump(mode="json"))
            ctx.exit(_code(job, detach))
        if job.promise.admitted:
            click.echo(f"Job {job.job_id} was accepted.")
        for line in promise_lines(job.promise, job.request.deadline_s):
            click.echo(line, err=not job.promise.admitted)
        if not job.promise.admitted:
            ctx.exit(REFUSED)
        if detach:
            _next_steps(job.job_id)
            return
        if not _follow(client, home, job):
            click.echo(f"\nStopped watching; job {job.job_id} goes on.")
            _next_steps(job.job_id)
            ctx.exit(130)
        job = client.job(job)
        if job.phase.value == "refused":
            for line in promise_lines(job.promise, job.request.deadline_s):
                click.echo(line, err=True)
        else:
            click.echo(outcome(job), err=job.phase.value != "finished")
        click.echo(f"\nNext:\n  swell describe {job.job_id}\n  swell logs {job.job_id}")
        ctx.exit(_code(job, detach))


@click.command(cls=ScriptCommand, epilog=QUOTE_EPILOG)
@job_options
@json_option
@home_option
@click.pass_context
def quote(ctx: click.Context, /, as_json: bool, home: str | None, **flags: Any) -> None:
    """Show what would be promised for a SCRIPT or a job file, without submitting it."""
    from swell.cli._common import REFUSED, promise_lines

    flags = launched(flags)
    note_misplaced(ctx, flags["script"], flags["arguments"])
    script, options = script_and_options(**flags)
    with connect(home) as client:
        promise = client.quote(script, **options)
    if as_json:
        print_json(promise.model_dump(mode="json"))
    else:
        for line in promise_lines(promise, options.get("deadline_s")) or ["The job would be admitted."]:
            click.echo(line)
    ctx.exit(0 if promise.admitted else REFUSED)


def launched(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a job whose script is the beginning of another launcher's line, such as torchrun's."""
    script, where = flags["script"], Path(flags.get("workdir") or ".")
    if flags.get("command") or (where / script).is_file():
        return flags
    if (line := understand([script, *flags["arguments"]])) is None:
        return flags
    if not flags["auto"]:
        words = shlex.join([script, *flags["arguments"]])
        raise InputError(
            f"script: '{script}' is a launcher: give --auto before it, such as '--auto -- {words}', and "
            "swell takes its place; or run it as it is with --command (docs/guides/any-command.md)",
            field="script",
        )
    given = tuple(f"{name}={value}" for name, value in line.environment.items())
    env = (*given, *flags.get("env", ()))  # what the person sets comes last and wins
    return flags | {"script": line.script, "arguments": line.arguments, "env": env}


def misplaced(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Options of swell that stand after the script, where the script gets them."""
    given = [argument.partition("=")[0] for argument in arguments]
    return [option for option in options if option in given]


def note_misplaced(ctx: click.Context, script: str, arguments: Sequence[str]) -> None:
    """Say which options that swell knows go to the script because they stand after it."""
    if ctx.params.get("command"):
        return  # any program has options of its own
    known = [name for p in ctx.command.params for name in p.opts if name.startswith("--")]
    for option in misplaced(arguments, known):
        click.echo(
            f"note: {option} stands after {script} and goes to the script; put options of swell before it",
            err=True,
        )


def script_and_options(script: str, arguments: tuple[str, ...], **flags: Any) -> tuple[str, JobOptions]:
    """Script and options of a job. If a job file is given, flags override what is written there."""
    options: dict[str, Any] = {}
    if Path(script).suffix.lower() in JOB_FILES and not flags.get("command"):
        script, options = read_job(Path(script))  # type: ignore[assignment]  # any TypedDict is a dict
    else:
        where = Path(flags["workdir"] or ".").absolute()
        path = where / script
        if flags.get("command") and not path.is_file():
            path = Path(shutil.which(script) or path)
        if not path.is_file():
            raise InputError(
                f"script: there is no file '{path}'; check the path, or give --workdir", field="script"
            )
        options["workdir"] = str(where)
        script = str(path)
    if arguments:
        options["args"] = list(arguments)
    for name, field in FIELDS.items():
        given = flags.get(field.spoken)
        if given is None or given is False or given == ():
            continue
        if field.about.kind is Kind.PATH:
            given = str(Path(given).absolute())
        elif field.about.kind is Kind.WORDS:
            given = list(given)
        elif field.about.kind is Kind.VARIABLES:
            given = options.get(name, {}) | variables(given)
        options[name] = given
    return script, options  # type: ignore[return-value]  # each flag has been checked by its type


def variables(pairs: tuple[str, ...]) -> dict[str, str]:
    """Environment variables by name, from texts such as NAME=VALUE."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(
                f"env must be NAME=VALUE, got '{pair}'; give it such as --env SEED=1", field="env"
            )
        found[name] = value
    return found


def _follow(client: Client, home: str | None, job: JobView) -> bool:
    """Show a job's output and its events until it is over; False on Ctrl-C."""
    threading.Thread(target=_show_events, args=(home, job), daemon=True).start()
    try:
        follow_logs(client, job)
    except KeyboardInterrupt:
        return False
    return True


def _show_events(home: str | None, job: JobView) -> None:
    """Print a job's events on standard error, until this process ends."""
    from swell.cli._common import line
    from swell.domain import SwellError

    try:
        with connect(home) as client:
            for event in client.events(job=job, since=0):
                if event.kind not in _TOLD_ELSEWHERE:
                    text = line(event.time_s, event.kind, "--", event.data)
                    click.secho(text, err=True, dim=True)
    except SwellError:
        return  # the thread that shows the output reports the error


def _code(job: JobView, detach: bool) -> int:
    from swell.cli._common import REFUSED

    if job.phase.value == "refused":
        return REFUSED
    return 0 if detach or job.phase.value == "finished" else 1


def _next_steps(job_id: str) -> None:
    steps = {
        f"swell logs -f {job_id}": "its output",
        f"swell describe {job_id}": "why it runs or waits, and when it will be done",
        f"swell cancel {job_id}": "end it",
        "swell top": "the whole cluster, live",
    }
    width = max(map(len, steps))
    click.echo("\nNext:\n" + "\n".join(f"  {command:<{width}}   {what}" for command, what in steps.items()))


# `swell init`: a commented job file to start from.


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
