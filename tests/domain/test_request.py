"""A request is checked at the border, naming the field, what was given and what is allowed."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from swell.domain import InputError, JobOptions, JobRequest
from swell.domain.request import FIELDS, name_from

GOOD: dict[str, Any] = {"name": "a", "script": "train.py"}


def test_the_least_a_request_needs() -> None:
    request = JobRequest(**GOOD)
    assert (request.args, request.workdir, request.env, request.auto) == ((), ".", {}, False)
    assert (request.min_workers, request.max_workers, request.deadline_s) == (1, None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", ".hidden"),
        ("name", "-flag"),
        ("name", "a b"),
        ("name", "a\n"),
        ("name", "é"),
        ("name", "x" * 101),
        ("script", ""),
        ("script", "a\0b"),
        ("args", "--epochs"),
        ("args", (1,)),
        ("args", ("a\0b",)),
        ("args", ("x",) * 1001),
        ("workdir", "x" * 5000),
        ("env", {"A B": "1"}),
        ("env", {"A": 1}),
        ("auto", 1),
        ("track", ("comet:project",)),
        ("track", ("mlflow:",)),
        ("deadline_s", 0.0),
        ("deadline_s", float("nan")),
        ("min_workers", 0),
        ("min_workers", True),
        ("min_workers", 1.0),
        ("min_workers", None),
        ("max_workers", 100_001),
        ("workers", 0),
        ("memory_bytes", 1000),
        ("checkpoint_s", 0.0),
        ("checkpoint_s", float("inf")),
        ("checkpoint_s", None),
        ("max_restarts", -1),
        ("pip", ["x"] * 201),
    ],
)
def test_each_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        JobRequest(**GOOD | {field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} must be ")


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InputError, match=r"max_workers must be at least min_workers \(3\), got 2"):
        JobRequest(**GOOD, min_workers=3, max_workers=2)


def test_every_default_and_every_example_of_plain_kind_is_allowed() -> None:
    for name, field in FIELDS.items():
        assert field.about.help.endswith("."), name
        if not field.required and not field.optional:
            JobRequest(**GOOD | {name: field.default})
        if not isinstance(field.about.example, str) or field.about.kind in ("text", "path"):
            assert getattr(JobRequest(**GOOD | {name: field.about.example}), name) is not None


def test_a_request_comes_back_from_json_as_it_was() -> None:
    request = JobRequest(**GOOD, args=["--lr", "1"], env={"A": "b"}, max_workers=2, pip=("x",))
    assert request.args == ("--lr", "1")
    assert JobRequest.from_json(request.to_json()) == request


def test_a_stored_request_of_an_older_or_newer_version_is_read() -> None:
    stored = {"name": "-accepted once-", "script": "t.py", "args": ["1"], "invented_later": 3}
    request = JobRequest.from_json(stored)
    assert (request.name, request.args, request.max_restarts) == ("-accepted once-", ("1",), 3)
    request.env["A"] = "1"
    assert JobRequest.from_json(stored).env == {}


def test_the_sdk_takes_every_field() -> None:
    """`JobOptions` is written out because type checkers cannot follow a generated one."""
    offered, declared = get_type_hints(JobOptions), get_type_hints(JobRequest)
    assert set(offered) - {"within_s"} == set(declared) - {"script"}
    for name in ("min_workers", "max_workers", "memory_bytes", "checkpoint_s", "auto", "env", "deadline_s"):
        assert offered[name] == declared[name], name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/train.py", "train"),
        ("my job.toml", "my-job"),
        (".py", "py"),
        ("--x.py", "x"),
        ("...", "job"),
        ("é.py", "job"),
        ("x" * 200, "x" * 100),
    ],
)
def test_names_are_made_from_paths(path: str, name: str) -> None:
    assert name_from(path) == name


def test_a_job_is_any_program_or_plain_pytorch_but_not_both() -> None:
    with pytest.raises(InputError, match="one is for any program") as refused:
        JobRequest(**GOOD, command=True, auto=True)
    assert refused.value.field == "command"
    assert JobRequest(**GOOD, command=True).for_runtime()["command"] is True
