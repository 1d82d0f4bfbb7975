"""A job as a person requests it. This is the one place where the fields of a job are declared.

Each field of `JobRequest` has its kind of value, its purpose and the allowed values.
Everything else is derived from that: the flags of `swell submit`, the job file and the template that
`swell init` writes, the HTTP schema, stored records, and what engines and the training runtime are given.
To add a field, add it to `JobRequest` and to `JobOptions` below it, and use it where it matters.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict

from swell.domain.errors import InputError
from swell.domain.teams import NORMAL, PRIORITIES

MAX_WORKERS = 100_000
MAX_WEIGHT = 1000
MAX_TEXT = 4096
"""Longest text, path or single argument, in characters."""
NO_NUL = r"^[^\x00]*$"
"""Texts must not contain a NUL, because neither a path nor an argument of a process can."""
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
"""Name of an environment variable, of at most MAX_VARIABLE characters."""
MAX_VARIABLE = 256
TRACKER = r"^(mlflow|tensorboard|wandb):[^\n\r\u2028\u2029\x00]+$"
"""An experiment tracker, and where it is."""
NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
"""Name of a job. Job ids begin with it: a '.' in front would hide directories, a '-' looks like a flag."""


class Kind(StrEnum):
    """The kind of a field's value. It decides how the value is written in a flag, a file and JSON."""

    TEXT = "text"
    PATH = "path"
    """Path of a file or a directory. Commands make it absolute before they send it."""
    SWITCH = "switch"
    """True or false."""
    COUNT = "count"
    BYTES = "bytes"
    DURATION = "duration"
    """Seconds; people write 90s or 2h."""
    MOMENT = "moment"
    """Unix time; people write 2h (from now), 18:30 or a date."""
    WORDS = "words"
    """A list of texts."""
    VARIABLES = "variables"
    """Environment variables: names and values."""


@dataclass(frozen=True, slots=True)
class About:
    """Checks, help and forms of one field of a request."""

    kind: Kind
    help: str
    """The purpose of the field, in one sentence for people."""
    example: Any
    """A value as a job file would hold it."""
    _: dataclasses.KW_ONLY
    least: float | None = None
    """The least value, or for texts, lists and variables the least length; `most` likewise."""
    most: float | None = None
    above: float | None = None
    """The value must be greater than this."""
    pattern: str | None = None
    """Pattern for a text, or for each text of a list; `allowed` describes it in words."""
    allowed: str = ""
    unless_given: str = ""
    """Value that commands and SDK use if the field is not given, where it is not the field's default."""
    positional: bool = False
    """Given to commands without a flag."""
    also: str = ""
    """Another, shorter name of the flag."""
    for_runtime: bool = False
    """Passed on to the training runtime inside the workers, through the run's job.json."""


def _about(kind: Kind, help: str, example: Any, **more: Any) -> dict[str, About]:
    """The metadata of a field."""
    return {"about": About(kind, help, example, **more)}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A submitted job. It has bounds for the number of GPUs at most, never the number itself."""

    name: str = field(
        metadata=_about(
            Kind.TEXT,
            "Name of the job; need not be unique.",
            "digits",
            least=1,
            most=100,
            pattern=NAME,
            allowed="1 to 100 letters, digits, '.', '_' or '-', the first neither '.' nor '-'",
            unless_given="made from the script's name",
        )
    )
    script: str = field(
        metadata=_about(Kind.PATH, "Training script, on the server's machine.", "train.py", positional=True)
    )
    args: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            Kind.WORDS, "Arguments of the script.", ["--epochs", "10"], most=1000, positional=True
        ),
    )
    workdir: str = field(
        default=".",
        metadata=_about(
            Kind.PATH, "Directory that the script runs in, on the server's machine.", ".", unless_given="here"
        ),
    )
    env: dict[str, str] = field(
        default_factory=dict,
        metadata=_about(Kind.VARIABLES, "Extra environment variables.", {"OMP_NUM_THREADS": "1"}, most=200),
    )
    auto: bool = field(
        default=False,
        metadata=_about(
            Kind.SWITCH,
            "The script is plain PyTorch and does not import swell: make it elastic.",
            True,
            for_runtime=True,
        ),
    )
    command: bool = field(
        default=False,
        metadata=_about(
            Kind.SWITCH,
            "The script is any program that saves and resumes its state by itself: run it as it is.",
            True,
            for_runtime=True,
        ),
    )
    deadline_s: float | None = field(
        default=None,
        metadata=_about(
            Kind.MOMENT,
            "When the job must be done; a job without a deadline is best effort.",
            "2h",
            above=0,
            most=1e11,
        ),
    )
    min_workers: int = field(
        default=1,
        metadata=_about(Kind.COUNT, "Fewest workers that the job can run on.", 1, least=1, most=MAX_WORKERS),
    )
    max_workers: int | None = field(
        default=None,
        metadata=_about(Kind.COUNT, "Most workers that the job may get.", 8, least=1, most=MAX_WORKERS),
    )
    weight: int = field(
        default=1,
        metadata=_about(
            Kind.COUNT,
            "Counts as this many jobs when slots are shared, with policies that obey weights.",
            1,
            least=1,
            most=MAX_WEIGHT,
        ),
    )
    priority: str = field(
        default=NORMAL,
        metadata=_about(
            Kind.TEXT,
            "Class of the job: of one team's jobs, higher classes get slots before lower ones.",
            "high",
            pattern="|".join(PRIORITIES),
            allowed="low, normal or high",
        ),
    )
    workers: int = field(
        default=1,
        metadata=_about(
            Kind.COUNT,
            "Workers that the job gets from policies that do not resize.",
            1,
            least=1,
            most=MAX_WORKERS,
        ),
    )
    workers_per_replica: int = field(
        default=1,
        metadata=_about(
            Kind.COUNT,
            "Workers that share one copy of the model (FSDP2); the job gets multiples of it.",
            2,
            least=1,
            most=MAX_WORKERS,
            also="replica",
            for_runtime=True,
        ),
    )
    memory_bytes: int | None = field(
        default=None,
        metadata=_about(
            Kind.BYTES,
            "Most memory for each worker; if a worker uses more, the job is ended.",
            "4GiB",
            least=1 << 20,
            most=1 << 50,
        ),
    )
    checkpoint_s: float = field(
        default=60.0,
        metadata=_about(
            Kind.DURATION,
            "How often the job's state is saved.",
            "60s",
            above=0,
            most=1e7,
            for_runtime=True,
        ),
    )
    track: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            Kind.WORDS,
            "Experiment tracker to send the job's figures to: mlflow:URI, tensorboard:DIR or wandb:PROJECT.",
            ["tensorboard:runs"],
            most=10,
            pattern=TRACKER,
            allowed="a list of at most 10 texts such as mlflow:URI, tensorboard:DIR or wandb:PROJECT",
            for_runtime=True,
        ),
    )
    time_limit_s: float | None = field(
        default=None,
        metadata=_about(
            Kind.DURATION,
            "Longest that the job may take from its first start; then it is ended.",
            "8h",
            above=0,
            most=1e9,
        ),
    )
    max_restarts: int = field(
        default=3,
        metadata=_about(
            Kind.COUNT,
            "How often the job is started again after all its workers died.",
            3,
            least=0,
            most=1000,
        ),
    )
    pip: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            Kind.WORDS,
            "Python packages to install for the job (engine ray only).",
            ["einops==0.8.1"],
            most=200,
        ),
    )

    def __post_init__(self) -> None:
        for name, known in FIELDS.items():
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            allowed = known.refuses(value)
            if allowed is not None:
                raise InputError(f"{name} must be {allowed}, got {value!r:.200}", field=name)
        self._check_replicas()
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise InputError(
                f"max_workers must be at least min_workers ({self.min_workers}), got {self.max_workers}",
                field="max_workers",
            )

        if self.command and self.auto:
            raise InputError(
                "command must be false for a job with auto: one is for any program, the other for PyTorch",
                field="command",
            )

    def _check_replicas(self) -> None:
        """Round the bounds to whole replicas; the minimum is one replica unless more was requested."""
        size = self.workers_per_replica
        for name in ("min_workers", "max_workers", "workers"):
            bound = getattr(self, name)
            if bound == FIELDS[name].default and bound is not None:
                object.__setattr__(self, name, max(bound, size))
            elif bound is not None and bound % size:
                raise InputError(
                    f"{name} must be a multiple of workers_per_replica ({size}), got {bound}", field=name
                )
        for name in ("auto", "command"):
            if size > 1 and getattr(self, name):
                raise InputError(
                    f"workers_per_replica must be 1 for a job with {name}, got {size}",
                    field="workers_per_replica",
                )

    def to_json(self) -> dict[str, Any]:
        """The request as plain values."""
        return {name: getattr(self, name) for name in FIELDS}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> JobRequest:
        """A request that was accepted and stored earlier, perhaps by an older or a newer swell.

        Fields that are missing get their default, and fields that are not known here are left out. The values
        are not checked again: a job that was accepted must not be lost because a limit became stricter.
        """
        request = object.__new__(cls)
        for name, known in FIELDS.items():
            value = raw[name] if known.required or name in raw else known.default
            if isinstance(value, list | dict):
                value = tuple(value) if isinstance(value, list) else dict(value)
            object.__setattr__(request, name, value)
        return request

    def for_runtime(self) -> dict[str, Any]:
        """The fields that are settings of the training runtime."""
        return {name: getattr(self, name) for name, known in FIELDS.items() if known.about.for_runtime}


class JobOptions(TypedDict, total=False):
    """The fields of a request as keyword arguments of the SDK; the script is an argument of its own."""

    name: str
    args: Sequence[str]
    workdir: str | os.PathLike[str]
    env: dict[str, str]
    auto: bool
    command: bool
    deadline_s: float | None
    within_s: float
    """In place of deadline_s: seconds from now."""
    min_workers: int
    max_workers: int | None
    weight: int
    priority: str
    workers: int
    workers_per_replica: int
    memory_bytes: int | None
    checkpoint_s: float
    track: Sequence[str]
    time_limit_s: float | None
    max_restarts: int
    pip: Sequence[str]


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of `JobRequest`, for the flags, files and schemas that are derived from it."""

    name: str
    about: About
    required: bool
    default: Any
    """The value if the field is not given. A default dict is shared by all requests: never change it."""

    @property
    def optional(self) -> bool:
        """Whether None is an allowed value."""
        return not self.required and self.default is None

    @property
    def spoken(self) -> str:
        """The field's name in flags and job files: without the unit, which people write with the value."""
        return self.name.removesuffix(_KINDS[self.about.kind].unit)

    def refuses(self, value: Any) -> str | None:
        """None if `value` is allowed, else what is allowed, in words."""
        if value is self.default:
            return None
        about, kind = self.about, _KINDS[self.about.kind]
        if not kind.holds(value):
            return about.allowed or kind.words
        measured = isinstance(value, str | tuple | dict)
        size, unit = (len(value), " long") if measured else (value, "")
        texts = value if isinstance(value, tuple) else (value,)
        if about.pattern is not None and not all(re.fullmatch(about.pattern, text) for text in texts):
            return about.allowed
        if about.least is not None and size < about.least:
            return about.allowed or f"at least {about.least}{unit}"
        if about.above is not None and not size > about.above:
            return about.allowed or f"more than {about.above}{unit}"
        if about.most is not None and size > about.most:
            return about.allowed or f"at most {about.most}{unit}"
        return None


_COUNTS = {
    "g", "gpu", "gpus", "n_gpus", "num_gpus", "ngpus", "nproc_per_node", "nproc", "devices", "num_workers",
    "nodes", "nnodes", "num_nodes", "ntasks",
}  # fmt: skip
"""Options of other launchers for the number of GPUs."""


def unknown_option(name: str, bound: str = "max_workers") -> str:
    """Why swell lacks an option for the number of GPUs of a job, as ' A sentence.'; '' for other options.

    `bound`: what to give instead.
    """
    if name.lstrip("-").replace("-", "_").lower() not in _COUNTS:
        return ""
    return f" swell decides how many GPUs a job has, and changes that while it runs; {bound} bounds it."


_SHELLS = (".sh", ".bash", ".zsh", ".ksh", ".csh", ".fish")
JOB_FILES = (".toml", ".yaml", ".yml", ".json")
"""Suffixes of files that describe a job."""


def not_python(script: str, beginning: bytes) -> str:
    """Why a file would not run as Python, and what to type instead; '' if it may be Python.

    `beginning`: the first bytes of the file.
    """
    path = Path(script)
    suffix, first_line = path.suffix.lower(), beginning.partition(b"\n")[0]
    if suffix in JOB_FILES:
        return f"'{path.name}' is a job file, not a script: 'swell submit {path.name}' hands it in"
    if suffix == ".ipynb":
        return (
            f"'{path.name}' is a notebook: make it a script with 'jupyter nbconvert --to script {path.name}'"
        )
    shebang = first_line.startswith(b"#!") and b"python" not in first_line and suffix != ".py"
    if suffix in _SHELLS or shebang or beginning.startswith(b"\x7fELF"):
        return (
            f"'{path.name}' is no Python script: hand any other program in with --command, such as "
            f"'--command -- ./{path.name}' (command=True in the SDK; see docs/guides/any-command.md)"
        )
    return ""


def name_from(path: str | os.PathLike[str]) -> str:
    """A job's name, made from the name of its script or job file."""
    stem = os.path.splitext(os.path.basename(path))[0]  # noqa: PTH119, PTH122 - any text, path or not
    return re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip(".-")[:100] or "job"


@dataclass(frozen=True, slots=True)
class _KindOfValue:
    """Conversions that all fields of one kind share."""

    holds: Callable[[Any], bool]
    words: str
    unit: str = ""


def _is_text(value: Any, least: int = 0) -> bool:
    return isinstance(value, str) and least <= len(value) <= MAX_TEXT and "\0" not in value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _are_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


def _are_variables(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_text(name)
        and len(name) <= MAX_VARIABLE
        and re.fullmatch(VARIABLE, name) is not None
        and _is_text(text)
        for name, text in value.items()
    )


_KINDS = {
    Kind.TEXT: _KindOfValue(_is_text, f"a text of at most {MAX_TEXT} characters"),
    Kind.PATH: _KindOfValue(lambda path: _is_text(path, 1), f"a path of 1 to {MAX_TEXT} characters"),
    Kind.SWITCH: _KindOfValue(lambda value: isinstance(value, bool), "true or false"),
    Kind.COUNT: _KindOfValue(_is_whole, "a whole number"),
    Kind.BYTES: _KindOfValue(_is_whole, "a whole number of bytes", "_bytes"),
    Kind.DURATION: _KindOfValue(_is_finite, "a number of seconds", "_s"),
    Kind.MOMENT: _KindOfValue(_is_finite, "a Unix time in seconds", "_s"),
    Kind.WORDS: _KindOfValue(_are_words, f"a list of texts of at most {MAX_TEXT} characters"),
    Kind.VARIABLES: _KindOfValue(_are_variables, "names of environment variables with a text for each"),
}


def _read_fields() -> dict[str, RequestField]:
    found = {}
    for declared in dataclasses.fields(JobRequest):
        make, default = declared.default_factory, declared.default
        required = make is dataclasses.MISSING and default is dataclasses.MISSING
        if make is not dataclasses.MISSING:
            default = make()
        found[declared.name] = RequestField(declared.name, declared.metadata["about"], required, default)
    return found


FIELDS = _read_fields()
"""The fields of a request by name, in the order in which people read them."""
