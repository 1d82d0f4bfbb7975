"""Who may do what, tried over HTTP: role, verb, whose job."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
from tests.api.conftest import Platform

from swell.api.auth import TokenBook, ensure_tokens
from swell.control.errors import NotFound
from swell.control.store import Store, connect
from swell.domain import InputError

# verb -> (method, path, body). {job} is a job of alice.
JOB_VERBS: dict[str, tuple[str, str, dict[str, object] | None]] = {
    "see": ("GET", "/v1/jobs/{job}", None),
    "explain": ("GET", "/v1/jobs/{job}/explain", None),
    "story": ("GET", "/v1/jobs/{job}/story", None),
    "series": ("GET", "/v1/jobs/{job}/series", None),
    "logs": ("GET", "/v1/jobs/{job}/logs", None),
    "events": ("GET", "/v1/events?job={job}", None),
    "scale": ("POST", "/v1/jobs/{job}/scale", {"min_workers": 1, "max_workers": 2}),
    "pause": ("POST", "/v1/jobs/{job}/pause", None),
    "resume": ("POST", "/v1/jobs/{job}/resume", None),
    "cancel": ("POST", "/v1/jobs/{job}/cancel", None),
}
CLUSTER_VERBS: dict[str, tuple[str, str, dict[str, object] | None, int]] = {
    # verb -> method, path, body, what a user is answered
    "nodes": ("GET", "/v1/nodes", None, 200),
    "policy": ("GET", "/v1/policy", None, 200),
    "metrics": ("GET", "/metrics", None, 200),
    "list jobs": ("GET", "/v1/jobs", None, 200),
    "list events": ("GET", "/v1/events", None, 200),
    "set policy": ("PUT", "/v1/policy", {"policy": "afs-l"}, 403),
    "drain": ("POST", "/v1/nodes/n0/drain", None, 403),
    "undrain": ("POST", "/v1/nodes/n0/undrain", None, 403),
    "reservations": ("GET", "/v1/reservations", None, 200),
    "reserve": ("PUT", "/v1/reservations/web", {"most": 1}, 403),
    "teams": ("GET", "/v1/teams", None, 200),
    "set team": ("PUT", "/v1/teams/red", {"slots": 1}, 403),
    "remove team": ("DELETE", "/v1/teams/none", None, 403),
    "list tokens": ("GET", "/v1/tokens", None, 403),
    "make token": ("POST", "/v1/tokens", {"user": "carol"}, 403),
    "revoke token": ("DELETE", "/v1/tokens/000000000000", None, 403),
}


@pytest.mark.parametrize("verb", JOB_VERBS)
def test_the_owner_and_an_admin_may_and_to_others_the_job_is_not_there(
    shared_platform: Platform, verb: str
) -> None:
    method, path, body = JOB_VERBS[verb]
    alice, bob = shared_platform.token("alice"), shared_platform.token("bob")
    admin = shared_platform.token("root", "admin")
    with shared_platform.http(alice) as http:
        job = http.post("/v1/jobs", json=shared_platform.job()).json()["job_id"]

    def status(token: str | None, job_id: str) -> tuple[int, str]:
        with shared_platform.http(token) as http:
            answer = http.request(method, path.format(job=job_id), json=body)
            return answer.status_code, answer.text

    strange, text = status(bob, job)
    nowhere, other_text = status(bob, "job-0000000000")
    assert (strange, nowhere) == (404, 404)
    assert text.replace(job, "X") == other_text.replace("job-0000000000", "X"), "ids can be probed"
    assert status(None, job)[0] == 401
    assert status(alice, job)[0] == 200
    assert status(admin, job)[0] == 200


@pytest.mark.parametrize("verb", CLUSTER_VERBS)
def test_what_concerns_the_cluster_is_for_admins_to_change(shared_platform: Platform, verb: str) -> None:
    method, path, body, for_user = CLUSTER_VERBS[verb]
    statuses = []
    for token in (None, shared_platform.token("alice"), shared_platform.token("root", "admin")):
        with shared_platform.http(token) as http:
            statuses.append(http.request(method, path, json=body).status_code)
    assert statuses[:2] == [401, for_user]
    not_there = verb in ("revoke token", "remove team")
    assert statuses[2] in ((404,) if not_there else (200, 201))


def test_lists_and_events_show_a_user_only_what_is_theirs(busy_platform: Platform) -> None:
    tokens = {user: busy_platform.token(user) for user in ("alice", "bob")}
    ids = {}
    for user, token in tokens.items():
        with busy_platform.http(token) as http:
            ids[user] = http.post("/v1/jobs", json=busy_platform.job(name=user)).json()["job_id"]
    for user, token in tokens.items():
        with busy_platform.http(token) as http:
            assert [job["job_id"] for job in http.get("/v1/jobs").json()["jobs"]] == [ids[user]]
            events = http.get("/v1/events").json()["events"]
            assert {event["job_id"] for event in events if event["node"] is None} == {ids[user]}
    with busy_platform.http(busy_platform.token("root", "admin")) as http:
        assert {job["job_id"] for job in http.get("/v1/jobs").json()["jobs"]} == set(ids.values())
        events = http.get("/v1/events").json()["events"]
        assert {event["job_id"] for event in events if event["node"] is None} == set(ids.values())


def test_paging_cannot_start_from_the_job_of_another(busy_platform: Platform) -> None:
    with busy_platform.http(busy_platform.token("alice")) as http:
        job = http.post("/v1/jobs", json=busy_platform.job()).json()["job_id"]
    with busy_platform.http(busy_platform.token("bob")) as http:
        assert http.get("/v1/jobs", params={"after": job}).status_code == 404


def test_the_same_idempotency_key_of_two_users_makes_two_jobs(busy_platform: Platform) -> None:
    ids = set()
    for user in ("alice", "bob"):
        with busy_platform.http(busy_platform.token(user)) as http:
            key = {"Idempotency-Key": "same"}
            ids.add(http.post("/v1/jobs", json=busy_platform.job(), headers=key).json()["job_id"])
    assert len(ids) == 2


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer swell_",
        "Bearer swell_wrong",
        "Basic c3dlbGw6c3dlbGw=",
        "swell_wrong",
        "Bearer nothing_of_ours",
        "Bearer swell_\xff\xfe",
    ],
)
def test_wrong_and_missing_tokens_are_refused(shared_platform: Platform, header: str) -> None:
    with shared_platform.http(None) as http:
        answer = http.get("/v1/jobs", headers={"Authorization": header.encode("latin-1")})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["error"]["code"] == "unauthenticated"


def test_expired_and_revoked_tokens_are_refused_at_once(platform: Platform) -> None:
    secret, token = platform.server.book.create("alice", ttl_s=3600.0)
    with platform.http(secret) as http:
        assert http.get("/v1/jobs").status_code == 200
        platform.server.book._clock = lambda: 1e12  # long after
        answer = http.get("/v1/jobs")
        assert answer.status_code == 401
        assert "expired" in answer.json()["error"]["message"]
    admin = platform.client("root", "admin")
    made = admin.create_token("bob")
    with platform.http(made.token) as http:
        assert http.get("/v1/jobs").status_code == 200
        admin.revoke_token(made.token_id)
        assert http.get("/v1/jobs").status_code == 401
    assert made.token_id not in [one.token_id for one in admin.tokens()]
    assert token.token_id in [one.token_id for one in admin.tokens()]


def test_the_store_holds_digests_only(platform: Platform) -> None:
    secret = platform.token("alice")
    digests = {digest for digest, _, _, _ in platform.store.tokens()}
    assert hashlib.sha256(secret.encode()).hexdigest() in digests
    for part in platform.home.glob("store.db*"):
        assert secret.encode() not in part.read_bytes()


def test_tokens_of_the_first_start_are_private_and_made_once(tmp_path: Path) -> None:
    store = Store(connect(str(tmp_path / "store.db")))
    written = ensure_tokens(TokenBook(store), tmp_path)
    assert {path.name for path in written} == {"admin", "user"}
    for path in written:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    # A token that was removed on purpose must not come back with the next start.
    (tmp_path / "tokens" / "admin").unlink()
    assert ensure_tokens(TokenBook(store), tmp_path) == []
    book = TokenBook(store)
    secret = (tmp_path / "tokens" / "user").read_text().strip()
    assert book.authenticate(f"Bearer {secret}").role == "user"
    store.close()


@pytest.mark.parametrize(
    ("user", "role", "ttl_s", "field"),
    [
        ("", "user", None, "user"),
        ("../etc", "user", None, "user"),
        ("a b", "user", None, "user"),
        ("a", "root", None, "role"),
        ("a", "user", 0.0, "ttl_s"),
        ("a", "user", float("inf"), "ttl_s"),
    ],
)
def test_tokens_that_make_no_sense_are_refused_by_field(
    tmp_path: Path, user: str, role: str, ttl_s: float | None, field: str
) -> None:
    store = Store(connect(str(tmp_path / "store.db")))
    with pytest.raises(InputError) as refused:
        TokenBook(store).create(user, role, ttl_s=ttl_s)
    assert refused.value.field == field
    with pytest.raises(NotFound):
        TokenBook(store).revoke("000000000000")
    store.close()
