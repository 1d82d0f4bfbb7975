"""The dashboard's page and the answers that only it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.waiting import wait_until

import swell

from .conftest import Platform

WEB = Path(swell.__file__).parent / "web"


def test_the_page_may_talk_to_its_own_server_only(shared_platform: Platform) -> None:
    with shared_platform.http(None) as http:
        answer = http.get("/")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        named = re.findall(r'(?:src|href)="(/[^"]+)"', answer.text)
        assert set(named) == {"/dashboard/app.js", "/dashboard/app.css", "/dashboard/icon.svg"}
        for path in named:
            assert http.get(path).status_code == 200
        for path in ("/dashboard/..%2f__init__.py", "/dashboard/LICENSE.uPlot", "/dashboard/nothing"):
            assert http.get(path).status_code == 404


def test_the_built_page_loads_nothing_from_elsewhere_and_is_small() -> None:
    text = (WEB / "app.js").read_text() + (WEB / "app.css").read_text() + (WEB / "index.html").read_text()
    assert re.findall(r"https?://(?!www\.w3\.org)[\w./-]+", text) == []
    assert "innerHTML" not in text.replace("uPlot", "")
    assert sum(path.stat().st_size for path in WEB.iterdir()) < 300_000


def test_everybody_learns_who_they_are(shared_platform: Platform) -> None:
    for role in ("user", "viewer", "admin"):
        with shared_platform.http(shared_platform.token("eve", role)) as http:
            assert http.get("/v1/me").json() == {"user": "eve", "role": role}
            names = [one["name"] for one in http.get("/v1/policies").json()["policies"]]
            assert "elasticflow" in names and "pollux" in names
    with shared_platform.http(None) as http:
        assert http.get("/v1/me").status_code == 401
        assert http.get("/v1/lanes").status_code == 401


def test_lanes_show_own_jobs_and_all_nodes(busy_platform: Platform) -> None:
    job = busy_platform.client("ann").submit("train.py", name="mine", workdir=str(busy_platform.home))
    wait_until(lambda: busy_platform.plane.jobs.get(job.job_id).held, 30, "the job to start")

    def lanes(user: str, role: str = "user", query: str = "") -> dict[str, object]:
        with busy_platform.http(busy_platform.token(user, role)) as http:
            answer = http.get(f"/v1/lanes{query}")
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

    own = lanes("ann")
    assert isinstance(own["jobs"], dict)
    assert own["jobs"][job.job_id]["name"] == "mine"
    assert [gpus for _, gpus in own["jobs"][job.job_id]["changes"]][-1] >= 1
    assert own["capacity"][-1][1] == 4  # type: ignore[index]
    assert lanes("bob")["jobs"] == {} and lanes("bob")["capacity"] == own["capacity"]
    assert lanes("wall", "viewer")["jobs"] == own["jobs"]
    assert lanes("ann", query="?since_s=99999999999")["jobs"] == {}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/jobs"),
        ("POST", "/v1/jobs/{job}/cancel"),
        ("POST", "/v1/jobs/{job}/scale"),
        ("POST", "/v1/nodes/n0/drain"),
        ("PUT", "/v1/policy"),
        ("POST", "/v1/tokens"),
    ],
)
def test_a_viewer_changes_nothing(shared_platform: Platform, method: str, path: str) -> None:
    job = shared_platform.client("ann").submit("train.py", workdir=str(shared_platform.home))
    with shared_platform.http(shared_platform.token("wall", "viewer")) as http:
        assert http.get(f"/v1/jobs/{job.job_id}").status_code == 200
        bodies = {"/v1/jobs": shared_platform.job(), "/v1/policy": {"policy": "fifo"}}
        body = bodies.get(path, {"user": "x"} if path == "/v1/tokens" else {})
        answer = http.request(method, path.format(job=job.job_id), json=body)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"
    assert shared_platform.plane.policy() == "afs-l"
