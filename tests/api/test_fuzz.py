"""Whatever is sent, as long as it fits the OpenAPI document or nearly does, the server does not fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from tests.api.conftest import Platform, start

from swell.api.server import create_app

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# A fixture with a parameter, even with one alone, because only then does pytest put the operation's name into
# the node id; without it all operations share one id, and a parallel run executes one of them.
@pytest.fixture(scope="module", params=["elasticflow"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with a policy that promises, and a replay that answers."""
    platform = start(tmp_path_factory.mktemp("fuzz"), duration_s=3600.0, replay=lambda request: {})
    platform.plane.set_policy(request.param)
    yield platform
    platform.stop()


# The document needs no running server: nothing is asked of the plane before the first request.
_NOBODY: Any = object()
_app = create_app(_NOBODY, _NOBODY, book=_NOBODY, replay=lambda request: {})
# Streams do not end, so they are left out.
schema = schemathesis.openapi.from_dict(_app.openapi()).exclude(path="/v1/events/stream")


@schema.parametrize()
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_nothing_that_is_sent_makes_the_server_fail(case: schemathesis.Case, target: Platform) -> None:
    # The key to everything must not be revoked or drowned in noise, so it is made anew for each.
    headers = {"Authorization": f"Bearer {target.token('fuzz', 'admin')}"}
    answer = case.call(target.server.url, headers=headers, timeout=60)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) >= {"code", "message"}
    # The same against things that are there, so that more than the border is tried.
    if isinstance(case.body, dict) and "script" in case.body:
        case.body |= {"script": "train.py", "workdir": str(target.home)}
    if "job_id" in (case.path_parameters or {}):
        case.path_parameters["job_id"] = _some_job(target)
    if "node" in (case.path_parameters or {}):
        case.path_parameters["node"] = "n1"
    for waits in ("follow", "wait_s"):
        (case.query or {}).pop(waits, None)
    again = case.call(target.server.url, headers=headers, timeout=60)
    assert again.status_code < 500, again.text


def test_every_operation_has_a_test_of_its_own(request: pytest.FixtureRequest) -> None:
    collected = {item.nodeid for item in request.session.items if item.path == Path(__file__)}
    for operation in schema.get_all_operations():
        assert any(f"[{operation.ok().label}]" in nodeid for nodeid in collected), operation.ok().label
    assert len(collected) >= len(list(schema.get_all_operations())) + 1


def _some_job(target: Platform) -> str:
    with target.http(target.token("fuzz", "admin")) as http:
        return str(http.post("/v1/jobs", json=target.job()).json()["job_id"])
