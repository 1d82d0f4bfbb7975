"""What strangers, users and disks do to the server: each hurts only its own request."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from swell.api import hub, listener
from swell.control.limits import OwnerLimits
from swell.control.plane import ControlPlane
from swell.domain import Event, EventKind
from swell.engines import parts

from .conftest import Platform, start


def address(platform: Platform) -> tuple[str, int]:
    host, _, port = platform.server.url.removeprefix("http://").partition(":")
    return host, int(port)


def test_headers_that_never_end_are_hung_up_on(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "REQUEST_S", 0.3)
    for sent in (
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /h",
    ):
        with socket.create_connection(address(platform), timeout=30) as sock:
            sock.sendall(sent)
            while sock.recv(4096):
                pass  # answers to whole requests, then the end
    with platform.http(None) as http:
        assert http.get("/healthz").status_code == 200


def test_a_request_that_takes_long_to_answer_is_not_hung_up_on(
    busy_platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "REQUEST_S", 0.2)
    with busy_platform.http(busy_platform.token("ann")) as http:
        job = http.post("/v1/jobs", json=busy_platform.job()).json()["job_id"]
        assert http.get(f"/v1/jobs/{job}", params={"wait_s": 0.8}).status_code == 200


def test_health_shows_a_dead_part_and_its_return(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SHOWN_S", 60.0)  # shown until this test has seen it
    real, died = platform.plane._conductor.turn, threading.Event()

    def die(now_s: float) -> None:
        if not died.is_set():
            died.set()
            raise SystemExit("the control thread is gone")
        real(now_s)

    platform.plane._conductor.turn = die  # type: ignore[method-assign]
    platform.plane.wake()
    control = platform.plane._loop.part
    wait_until(lambda: control.failures, 30, "the control thread to end", poll_s=0.001)
    assert parts.SILENT_S < 5, "one that ends silently, or hangs, is seen after this long"
    with platform.http(platform.token("ann")) as http:
        answer = http.get("/healthz")
        assert answer.status_code == 503, "the first answer after it ended"
        assert "control" in answer.json()["error"]["message"]
        assert "swell_trouble 1.0" in http.get("/metrics").text
        monkeypatch.setattr(parts, "SHOWN_S", -parts.MOST_AGAIN_S)
        wait_until(lambda: http.get("/healthz").status_code == 200, 30, "all to be well again")
        assert 'swell_part_up{name="control"} 1.0' in http.get("/metrics").text
        job = http.post("/v1/jobs", json=platform.job()).json()["job_id"]
        assert http.get(f"/v1/jobs/{job}", params={"wait_s": 20}).json()["phase"] == "finished"


def test_events_flow_again_after_an_error_and_health_shows_it(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    events_hub, read = platform.server.app.state.context.hub, platform.plane.events
    broken = threading.Event()
    broken.set()

    def events(*args: Any) -> list[tuple[int, Event]]:
        if broken.is_set():
            raise RuntimeError("an error that nobody thought of")
        return read(*args)

    with platform.http(platform.token("ann")) as http, platform.client("ann") as client:
        stream = client.events(since=0)
        monkeypatch.setattr(platform.plane, "events", events)
        job = http.post("/v1/jobs", json=platform.job()).json()["job_id"]
        wait_until(lambda: events_hub.trouble, 30, "the error to be noticed")
        answer = http.get("/healthz")
        assert answer.status_code == 503 and "events" in answer.json()["error"]["message"]
        assert 'swell_part_up{name="events"} 0.0' in http.get("/metrics").text
        broken.clear()
        assert next(event for event in stream if event.job_id == job).kind == "submitted"
        wait_until(lambda: http.get("/healthz").status_code == 200, 30, "all to be well again")
        assert 'swell_part_up{name="events"} 1.0' in http.get("/metrics").text
        # The task itself is gone: whoever looks at the health begins it again.
        before = events_hub._task
        events_hub._loop.call_soon_threadsafe(before.cancel)
        wait_until(before.done, 30, "the task to end")
        assert http.get("/healthz").status_code == 503
        job = http.post("/v1/jobs", json=platform.job()).json()["job_id"]
        assert next(event for event in stream if event.job_id == job).kind == "submitted"
        wait_until(lambda: http.get("/healthz").status_code == 200, 30, "all to be well again")


def test_an_event_that_cannot_be_sent_stops_no_stream(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hub.frame

    def frame(seq: int, event: Event) -> bytes:
        if event.kind is EventKind.ADMITTED:
            raise ValueError("this cannot be sent")
        return real(seq, event)

    monkeypatch.setattr(hub, "frame", frame)
    with platform.http(platform.token("ann")) as http, platform.client("ann") as client:
        job = http.post("/v1/jobs", json=platform.job()).json()["job_id"]
        kinds = [event.kind for event in _until_over(client.events(since=0), job)]
    assert "admitted" not in kinds and kinds[0] == "submitted" and kinds[-1] == "finished"


def _until_over(stream: Iterator[Any], job: str) -> Iterator[Any]:
    for event in stream:
        if event.job_id == job:
            yield event
            if event.kind == "finished":
                return


def test_health_does_not_wait_behind_slow_requests(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(ControlPlane, "policy", lambda _: release.wait(20) and "afs-l")
    token = platform.token("ann")

    def ask() -> None:
        with platform.http(token) as http:
            http.get("/v1/policy")

    slow = [threading.Thread(target=ask, daemon=True) for _ in range(70)]
    for thread in slow:
        thread.start()
    context = platform.server.app.state.context
    wait_until(lambda: context.pool._work_queue.qsize() > 0, 15, "the pool to be full")
    with platform.http(None) as http:
        assert http.get("/healthz", timeout=30).status_code == 200
    release.set()
    for thread in slow:
        thread.join(20)


def test_a_revoked_token_ends_its_streams(busy_platform: Platform) -> None:
    token = busy_platform.token("ann")
    with busy_platform.http(token) as http:
        job = http.post("/v1/jobs", json=busy_platform.job()).json()["job_id"]
        for path in ("/v1/events/stream", f"/v1/jobs/{job}/logs?follow=true"):
            with busy_platform.http(fresh := busy_platform.token("ann")) as own:
                (mine,) = [t for t in busy_platform.server.book.list() if _is(t.digest, fresh)]
                with own.stream("GET", path) as answer:
                    busy_platform.server.book.revoke(mine.token_id)
                    began_s = time.monotonic()
                    for _ in answer.iter_bytes():
                        pass  # ends by itself
                    assert time.monotonic() - began_s < 5
    assert busy_platform.server.app.state.context.streams == 0


def _is(digest: str, secret: str) -> bool:
    import hashlib

    return digest == hashlib.sha256(secret.encode()).hexdigest()


def test_streams_that_begin_at_different_numbers_share_bounded_memory(busy_platform: Platform) -> None:
    hub = busy_platform.server.app.state.context.hub
    from swell.api.hub import _SHARED_BYTES, Entry

    hub._add([Entry(hub.last + i + 1, None, None, b"x" * 2000) for i in range(3000)])
    for cursor in range(hub._floor, hub.last, 5):
        piece, after = hub._frames(cursor, None, None)
        assert cursor < after <= hub.last and len(piece) <= 256 * 2000
    assert hub._shared_bytes <= _SHARED_BYTES


def test_logs_from_far_behind_the_end_are_empty(busy_platform: Platform) -> None:
    with busy_platform.http(busy_platform.token("ann")) as http:
        job = http.post("/v1/jobs", json=busy_platform.job()).json()["job_id"]
        answer = http.get(f"/v1/jobs/{job}/logs", params={"offset": 2**62})
        assert answer.status_code == 200 and answer.content == b""


def test_explain_names_no_job_of_another_user(busy_platform: Platform) -> None:
    with (
        busy_platform.http(busy_platform.token("ann")) as ann,
        busy_platform.http(busy_platform.token("ben")) as ben,
    ):
        for _ in range(8):
            ann.post("/v1/jobs", json=busy_platform.job(name="secret-plan"))
        for _ in range(8):
            ben.post("/v1/jobs", json=busy_platform.job(name="mine"))
        busy_platform.plane.turn()
        waits = ben.get("/v1/jobs", params={"phase": "queued"}).json()["jobs"][0]["job_id"]
        explained = ben.get(f"/v1/jobs/{waits}/explain").json()
        assert "secret-plan" not in json.dumps(explained)
        assert "jobs of other users" in explained["why"]


def test_limits_refuse_one_user_and_not_the_others(tmp_path: Path) -> None:
    platform = start(tmp_path, duration_s=1000.0)
    platform.plane.jobs._gate.limits = OwnerLimits(jobs=3, submissions_per_minute=5)
    with platform.http(platform.token("ann")) as ann, platform.http(platform.token("ben")) as ben:
        made = [ann.post("/v1/jobs", json=platform.job()) for _ in range(4)]
        assert [answer.status_code for answer in made] == [201, 201, 201, 429]
        assert "may have 3" in made[-1].json()["error"]["message"]
        ann.post(f"/v1/jobs/{made[0].json()['job_id']}/cancel")
        assert ann.post("/v1/jobs", json=platform.job()).status_code == 201
        for answer in made[1:3]:
            ann.post(f"/v1/jobs/{answer.json()['job_id']}/cancel")
        late = [ann.post("/v1/jobs", json=platform.job()) for _ in range(2)]
        assert [answer.status_code for answer in late] == [201, 429]
        assert "5 jobs a minute" in late[-1].json()["error"]["message"]
        assert ben.post("/v1/jobs", json=platform.job()).status_code == 201
    platform.stop()


def test_a_job_ends_at_its_time_limit(busy_platform: Platform) -> None:
    with busy_platform.http(busy_platform.token("ann")) as http:
        job = http.post("/v1/jobs", json=busy_platform.job(time_limit_s=0.3)).json()["job_id"]
        busy_platform.plane._interval_s = 0.1
        busy_platform.plane.wake()
        seen = http.get(f"/v1/jobs/{job}", params={"wait_s": 20}).json()
        assert seen["phase"] == "cancelled" and "time limit" in seen["reason"]


def test_a_script_of_gigabytes_or_a_pipe_is_refused_at_once(platform: Platform) -> None:
    (platform.home / "large.py").touch()
    os.truncate(platform.home / "large.py", 2 << 30)
    os.mkfifo(platform.home / "pipe.py")
    with platform.http(platform.token("ann")) as http:
        for script in ("large.py", "pipe.py"):
            answer = http.post("/v1/jobs", json=platform.job(script=script), timeout=30)
            assert answer.status_code == 422 and answer.json()["error"]["field"] == "script"


def test_one_unreadable_record_breaks_neither_the_list_nor_the_start(tmp_path: Path) -> None:
    platform = start(tmp_path, duration_s=1000.0)
    with platform.http(platform.token("ann")) as http:
        keys = ({"Idempotency-Key": "once"}, {}, {})
        jobs = [http.post("/v1/jobs", json=platform.job(), headers=k).json()["job_id"] for k in keys]
    platform.stop()
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute("UPDATE jobs SET record = '{\"damaged\"' WHERE job_id = ?", (jobs[0],))
        nan = "UPDATE jobs SET record = replace(record, '\"done\":0.0', '\"done\":NaN') WHERE job_id = ?"
        database.execute(nan, (jobs[1],))
        database.execute("UPDATE events SET line = 'no event' WHERE seq = 1")
        ((line,),) = database.execute("SELECT line FROM events WHERE kind = 'submitted' AND seq > 1 LIMIT 1")
        row = (json.loads(line)["fingerprint"], 0.0, '{"params": "x", "batch_size": "y"}')
        database.execute("INSERT OR REPLACE INTO history VALUES (?, ?, ?)", row)
    platform = start(tmp_path, duration_s=1000.0)
    with platform.http(platform.token("ann")) as http:
        listed = {job["job_id"]: job["done"] for job in http.get("/v1/jobs").json()["jobs"]}
        assert listed == {jobs[1]: 0.0, jobs[2]: 0.0}
        assert jobs[0] in platform.store.unreadable
        assert http.post("/v1/jobs", json=platform.job()).status_code == 201, "with an unusable history, too"
        for answer in (http.get(f"/v1/jobs/{jobs[0]}"), http.post(f"/v1/jobs/{jobs[0]}/cancel")):
            assert answer.status_code == 409 and "cannot be read" in answer.json()["error"]["message"]
        again = http.post("/v1/jobs", json=platform.job(), headers={"Idempotency-Key": "once"})
        assert again.status_code == 409, "it was accepted, so it must not be accepted twice"
        with platform.http(platform.token("eve")) as other:
            assert other.get(f"/v1/jobs/{jobs[0]}").status_code == 404
        assert http.get("/v1/events", params={"limit": 1}).json()["events"][0]["seq"] == 2
    platform.stop()
