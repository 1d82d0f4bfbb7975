"""A job is checked at the border, naming the field, what was given and what is allowed."""

from typing import Any

import pytest

from swell.domain import InputError, JobSpec

GOOD: dict[str, Any] = {"job_id": "a", "submit_s": 10.0, "model": "m", "batch_size": 32}


def test_the_least_a_job_needs() -> None:
    job = JobSpec(**GOOD)
    assert (job.gpus, job.min_gpus, job.max_gpus, job.deadline_s, job.work) == (1, 1, None, None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job_id", ""),
        ("submit_s", -1.0),
        ("submit_s", float("nan")),
        ("batch_size", 0),
        ("gpus", 0),
        ("min_gpus", 0),
        ("max_gpus", 0),
        ("work", 0.0),
        ("work", float("inf")),
        ("deadline_s", 10.0),
        ("deadline_s", 3.0),
    ],
)
def test_each_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        JobSpec(**(GOOD | {field: value}))
    assert caught.value.field == field
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)
