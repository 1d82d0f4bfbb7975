"""Job files: a TOML or YAML file says the same as the flags of `swell submit`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swell.cli._when import parse_bytes, parse_deadline, parse_duration
from swell.domain import InputError, nearest

if TYPE_CHECKING:
    from swell.api.calls import JobOptions

SUFFIXES = (".toml", ".yaml", ".yml")

TEMPLATE = """\
# A job for swell. `swell submit {file}` hands it in; flags given there override what is written here.
# There is no number of GPUs: the job gets what it is worth, more when the cluster is quiet.

name = "{name}"
script = "{script}"            # relative to this file
args = []                      # for example ["--epochs", "10"]

# workdir = "."                # where the script runs, relative to this file
# auto = true                  # for a plain PyTorch script that does not import swell

# deadline = "2h"              # or "18:30", "tomorrow 09:00", "2026-03-01T09:00"; without one: best effort

# min_workers = 1              # bounds, only if you insist
# max_workers = 8
# workers = 1                  # what policies that do not resize give it

# memory = "4GiB"              # most memory for each worker
# checkpoint = "60s"           # how often its state is saved
# max_restarts = 3             # after all its workers died for no fault of its own

# pip = ["einops==0.8.1"]      # requirements to install for it (swell up --engine ray)

# [env]                        # extra environment variables
# OMP_NUM_THREADS = "1"
"""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text, got {value!r}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, got {value!r}")
    return value


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else parse_duration(_text(value))


def _moment(value: Any) -> float:
    if hasattr(value, "isoformat"):  # TOML and YAML have dates of their own
        value = value.isoformat()
    return parse_deadline(value if isinstance(value, str) else f"{_seconds(value):g}")


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


# field of a file -> (name for the SDK, how it is read)
_FIELDS: dict[str, tuple[str, Any]] = {
    "name": ("name", _text),
    "script": ("script", _text),
    "args": ("args", _words),
    "workdir": ("workdir", _text),
    "env": ("env", _environment),
    "auto": ("auto", _flag),
    "deadline": ("deadline_s", _moment),
    "min_workers": ("min_workers", _count),
    "max_workers": ("max_workers", _count),
    "workers": ("workers", _count),
    "memory": ("memory_bytes", _size),
    "checkpoint": ("checkpoint_s", _seconds),
    "max_restarts": ("max_restarts", _count),
    "pip": ("pip", _words),
}


def read_job(path: Path) -> tuple[str, JobOptions]:
    """Script and options of a job file; paths in it are relative to the file."""
    raw = _load(path)
    options: dict[str, Any] = {}
    for field, value in raw.items():
        if field not in _FIELDS:
            known = ", ".join(_FIELDS)
            hint = nearest(field, list(_FIELDS))
            raise InputError(f"{path}: there is no field '{field}'.{hint} Fields: {known}", field=field)
        name, read = _FIELDS[field]
        try:
            options[name] = read(value)
        except ValueError as error:
            raise InputError(f"{path}: {field}: {error}", field=field) from error
    if "script" not in options:
        raise InputError(f'{path}: script is missing; add a line such as script = "train.py"', field="script")
    options["workdir"] = str((path.parent / options.get("workdir", ".")).absolute())
    options["script"] = str((path.parent / options["script"]).absolute())
    options.setdefault("name", path.stem)
    script = options.pop("script")
    return script, options  # type: ignore[return-value]  # each field was checked above


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); 'swell init' writes a job file") from error
    if path.suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not TOML: {error}") from error
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: must be a mapping with a field 'script'", field="script")
    return found
