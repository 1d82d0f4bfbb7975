"""What the border lets in, the control plane accepts: both take their limits from the same declaration."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.api.conftest import Platform

from swell.api.schemas import JobSubmission
from swell.domain import InputError, JobRequest
from swell.domain.request import FIELDS

BASE: dict[str, Any] = {"name": "a", "script": "train.py"}
_TEXTS = st.one_of(
    st.sampled_from(["", "a", "a\n", "a\0b", ".a", "-a", "A=B", "x" * 100, "x" * 101, "x" * 256, "x" * 257]),
    st.sampled_from(["x" * 4096, "x" * 4097, "é", "_", "9"]),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
_LIMITS = sorted(
    {
        edge + step
        for field in FIELDS.values()
        for edge in (field.about.least, field.about.above, field.about.most)
        if edge is not None
        for step in (-1, 0, 1)
    }
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    _TEXTS,
    st.sampled_from([*map(int, _LIMITS), *map(float, _LIMITS), math.nan, math.inf, 10**30]),
    st.lists(st.one_of(_TEXTS, st.integers()), max_size=3),
    st.sampled_from([200, 201, 1000, 1001]).map(lambda count: ["x"] * count),
    st.dictionaries(_TEXTS, st.one_of(_TEXTS, st.none()), max_size=2),
    st.sampled_from([200, 201]).map(lambda count: {f"V{i}": "x" for i in range(count)}),
)


@settings(max_examples=500)
@given(field=st.sampled_from(list(FIELDS)), value=VALUES)
def test_border_and_control_plane_agree_on_every_value(field: str, value: Any) -> None:
    body = BASE | {field: value}
    try:
        request = JobRequest(**body)
    except InputError as refused:
        request = None
        assert refused.field == field
    try:
        submission = JobSubmission.model_validate(body)
    except ValidationError as refused:
        assert request is None, (field, value, refused)
    else:
        assert submission.to_request() == request, (field, value)


def test_a_word_that_is_none_of_those_allowed_is_refused_with_them(shared_platform: Platform) -> None:
    with shared_platform.http(shared_platform.token("ann")) as http:
        answer = http.post("/v1/jobs", json=shared_platform.job(priority="urgent"))
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "priority must be low, normal or high, got 'urgent'"
