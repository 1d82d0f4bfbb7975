"""Job files: a TOML, YAML or JSON file can say everything that the flags of `swell submit` can.

Files, flags and the template for a new file are derived from the fields of `swell.domain.JobRequest`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swell.cli._when import parse_bytes, parse_deadline, parse_duration
from swell.domain import InputError, JobOptions, nearest
from swell.domain.request import FIELDS, Kind, name_from, unknown_option

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
