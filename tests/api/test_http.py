"""Bad input is refused by name and never makes the server fail."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.api.conftest import Platform

from swell import __version__


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"gpus": 4}, "gpus"),
        ({"name": "../../etc/passwd"}, "name"),
        ({"name": ".hidden"}, "name"),
        ({"name": "-rf"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"name": "é"}, "name"),
        ({"script": "nowhere.py"}, "script"),
        ({"script": "train.py\0.txt"}, "script"),
        ({"script": "x" * 300}, "script"),
        ({"workdir": "/nowhere/at/all"}, "script"),
        ({"args": "not a list"}, "args"),
        ({"args": ["a\0b"]}, "args.0"),
        ({"env": {"A=B": "c"}}, "env.A=B.[key]"),
        ({"min_workers": 0}, "min_workers"),
        ({"min_workers": "1"}, "min_workers"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers"),
        ({"min_workers": 99}, "min_workers"),
        ({"max_workers": 10**30}, "max_workers"),
        ({"deadline_s": 1.0}, "deadline_s"),
        ({"deadline_s": 1e300}, "deadline_s"),
        ({"memory_bytes": 1}, "memory_bytes"),
        ({"checkpoint_s": 0}, "checkpoint_s"),
        ({"auto": "yes"}, "auto"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/quote"])
def test_a_refusal_names_the_field(
    shared_platform: Platform, path: str, change: dict[str, Any], field: str
) -> None:
    with shared_platform.http(shared_platform.token("alice")) as http:
        answer = http.post(path, json=shared_platform.job(**change))
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["field"] == field
        assert http.get("/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"name": NaN}',
        b'{"name": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"deadline_s": Infinity, "name": "a", "script": "b"}',
        b'{"min_workers": ' + b"9" * 5000 + b"}",
        b"[" * 20_000,
    ],
)
def test_bodies_that_are_no_submission_are_refused(shared_platform: Platform, body: bytes) -> None:
    with shared_platform.http(shared_platform.token("alice")) as http:
        answer = http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["message"]


def test_large_bodies_are_refused_whether_their_size_is_said_or_not(shared_platform: Platform) -> None:
    large = json.dumps(shared_platform.job(args=["x" * 4000] * 300)).encode()
    assert len(large) > 1 << 20

    def parts() -> Any:
        for at in range(0, len(large), 65536):
            yield large[at : at + 65536]

    for content in (large, parts()):
        with shared_platform.http(shared_platform.token("alice")) as http:
            answer = http.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "too_large"


def test_a_size_that_is_a_lie_does_not_help(shared_platform: Platform) -> None:
    where = urlsplit(shared_platform.server.url)
    with socket.create_connection((where.hostname, where.port or 0), timeout=30) as raw:
        raw.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}")
        assert raw.recv(4096).split(b" ")[1] in (b"413", b"400")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/..%2f..%2fetc%2fpasswd/logs",
        "/v1/jobs/../../etc/passwd",
        "/v1/jobs/%2e%2e/logs",
        "/v1/jobs/..%5c..%5cx/logs",
        "/v1/jobs/a%00b/logs",
        "/v1/jobs/" + "a" * 3000 + "/logs",
        "/docs/..%2f..%2fserver.py",
        "/docs/../server.py",
        "//etc/passwd",
    ],
)
def test_paths_lead_nowhere_else(shared_platform: Platform, path: str) -> None:
    where = urlsplit(shared_platform.server.url)
    token = shared_platform.token("root", "admin")
    with socket.create_connection((where.hostname, where.port or 0), timeout=30) as raw:
        request = (
            f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        )
        raw.sendall(request.encode())
        answer = b""
        while part := raw.recv(65536):
            answer += part
    assert answer.split(b" ")[1] in (b"404", b"422"), answer[:200]
    assert b"root:" not in answer


def test_every_answer_carries_the_guarding_headers(shared_platform: Platform) -> None:
    with shared_platform.http(None) as http:
        for path in ("/healthz", "/v1/jobs", "/nowhere", "/docs", "/openapi.json"):
            headers = http.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "server" not in headers


def test_the_docs_page_needs_nothing_from_outside(shared_platform: Platform) -> None:
    with shared_platform.http(None) as http:
        page = http.get("/docs").text
        for path in ("/docs/docs.js", "/docs/docs.css"):
            assert path in page
            assert http.get(path).status_code == 200
            assert "http://" not in http.get(path).text
            assert "https://" not in http.get(path).text
        assert "http://" not in page
        assert "https://" not in page
        document = http.get("/openapi.json").json()
    assert document["info"]["version"] == __version__
    assert {"/v1/jobs", "/v1/quote", "/v1/events/stream", "/v1/policy", "/metrics"} <= set(document["paths"])


def test_metrics_count_requests_and_jobs_and_name_nobody(platform: Platform) -> None:
    client = platform.client("alice")
    client.wait(client.submit(platform.home / "train.py", workdir=platform.home), timeout_s=20)
    with platform.http(platform.token("bob")) as http:
        text = http.get("/metrics").text
    assert 'swell_http_requests_total{method="POST",route="/v1/jobs",status="201"} 1.0' in text
    assert "swell_slots_used 0.0" in text
    assert "alice" not in text


def test_methods_and_paths_that_do_not_exist_are_told_in_the_one_form(platform: Platform) -> None:
    with platform.http(platform.token("alice")) as http:
        for method, path, status in (("DELETE", "/v1/jobs", 405), ("GET", "/v1/nothing", 404)):
            answer = http.request(method, path)
            assert answer.status_code == status
            assert set(answer.json()["error"]) >= {"code", "message"}
        assert http.post("/v1/replay", json={}).status_code == 404, "no replay was given to this server"


def test_a_key_used_for_another_job_is_a_conflict(busy_platform: Platform) -> None:
    key = {"Idempotency-Key": "once"}
    with busy_platform.http(busy_platform.token("alice")) as http:
        first = http.post("/v1/jobs", json=busy_platform.job(), headers=key)
        again = http.post("/v1/jobs", json=busy_platform.job(), headers=key)
        other = http.post("/v1/jobs", json=busy_platform.job(args=["x"]), headers=key)
        bad = http.post("/v1/jobs", json=busy_platform.job(), headers={"Idempotency-Key": "k" * 256})
    assert first.json()["job_id"] == again.json()["job_id"]
    assert other.status_code == 409
    assert bad.status_code == 422


def test_jobs_come_in_pages_and_by_phase(busy_platform: Platform) -> None:
    with busy_platform.http(busy_platform.token("alice")) as http:
        ids = [http.post("/v1/jobs", json=busy_platform.job(name=f"j{i}")).json()["job_id"] for i in range(7)]
        for job_id in ids[:3]:
            http.post(f"/v1/jobs/{job_id}/cancel")
        seen: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = http.get("/v1/jobs", params={"limit": 2} | after).json()
            seen += [job["job_id"] for job in page["jobs"]]
            if page["next"] is None:
                break
            after = {"after": page["next"]}
        assert seen == ids[::-1]
        cancelled = http.get("/v1/jobs", params={"phase": "cancelled"}).json()["jobs"]
        assert [job["job_id"] for job in cancelled] == ids[2::-1]
        assert http.get("/v1/jobs", params={"phase": "dreaming"}).status_code == 422
        assert http.post(f"/v1/jobs/{ids[0]}/pause").status_code == 409


def test_a_policy_that_does_not_exist_is_refused(platform: Platform) -> None:
    with platform.http(platform.token("root", "admin")) as http:
        answer = http.put("/v1/policy", json={"policy": "astrology"})
        assert answer.status_code == 422
        assert http.put("/v1/policy", json={"policy": "elasticflow"}).json() == {"policy": "elasticflow"}
        assert http.post("/v1/nodes/nowhere/drain").status_code == 404
