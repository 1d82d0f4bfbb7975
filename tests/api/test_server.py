"""Starting, listening and ending; live events."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.api.conftest import Platform, start
from tests.waiting import wait_until

import swell
from swell.api.home import ServerFile
from swell.api.refusals import Unreachable
from swell.api.schemas import ReplayRequest
from swell.api.server import Server, check_binding
from swell.cli._platform import healthy
from swell.domain import InputError


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "gpu-box.lab"])
def test_beyond_loopback_needs_tls_or_a_clear_word(host: str) -> None:
    with pytest.raises(InputError) as refused:
        check_binding(host, None, None, False)
    assert refused.value.field == "host"
    assert check_binding(host, None, None, True) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert check_binding(host, None, None, False) is None


def test_half_a_tls_setup_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="key is missing"):
        check_binding("127.0.0.1", tmp_path / "cert", None, False)
    with pytest.raises(InputError, match="cannot use"):
        check_binding("127.0.0.1", tmp_path / "cert", tmp_path / "key", False)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_server_on_all_addresses_is_found_although_the_machines_name_does_not_resolve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=nowhere.invalid"
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True, timeout=60)
    monkeypatch.setattr("socket.gethostname", lambda: "nowhere.invalid")
    platform = start(tmp_path, host="0.0.0.0", cert=cert, key=key)
    try:
        found = ServerFile.read(tmp_path)
        assert found is not None and "nowhere" not in found.url
        assert found.nearest.startswith("https://127.0.0.1:")
        assert healthy(found.nearest, found.ca)
    finally:
        platform.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    extension = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *extension, *files], check=True, capture_output=True, timeout=60)
    platform = start(tmp_path, cert=cert, key=key)
    try:
        assert platform.server.url.startswith("https://")
        with swell.Client(home=tmp_path) as client:
            assert client.nodes()
        token = platform.token("alice")
        with swell.Client(platform.server.url, token, ca=str(cert)) as client:
            assert client.nodes()
        with pytest.raises(Unreachable, match="not trusted"):
            swell.Client(platform.server.url, token).nodes()
        with pytest.raises(Unreachable):
            swell.Client(platform.server.url.replace("https", "http"), token, retry_s=0).nodes()
    finally:
        platform.stop()


def test_a_port_in_use_is_refused_with_a_way_out(platform: Platform) -> None:
    port = urlsplit(platform.server.url).port or 0
    with pytest.raises(InputError, match="--port"):
        Server(platform.plane, platform.store, home=platform.home, port=port)


def test_the_server_file_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    platform = start(tmp_path)
    path = tmp_path / "server.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ServerFile.read(tmp_path) == ServerFile(platform.server.url, os.getpid())
    platform.stop()
    assert not path.exists()
    path.write_text("[]")
    assert ServerFile.read(tmp_path) is None


def test_ending_lets_streams_and_waits_go_at_once(tmp_path: Path) -> None:
    platform = start(tmp_path, duration_s=3600.0)
    client = platform.client("alice")
    job = client.submit("train.py", workdir=tmp_path)
    token = platform.token("alice")
    ends: list[float] = []

    def stream(path: str) -> None:
        with platform.http(token) as http, http.stream("GET", path) as answer:
            for _ in answer.iter_bytes():
                pass
        ends.append(time.monotonic())

    own = f"/v1/jobs/{job.job_id}"
    paths = ["/v1/events/stream", f"{own}/logs?follow=true", f"{own}?wait_s=60"]
    threads = [threading.Thread(target=stream, args=(path,), daemon=True) for path in paths]
    for thread in threads:
        thread.start()
    underway = platform.server._uvicorn.server_state.tasks
    wait_until(lambda: platform.server.app.state.context.streams == 2, 30, "both streams")
    wait_until(lambda: len(underway) == 3, 30, "the wait too")
    began_s = time.monotonic()
    platform.stop()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 3, "a stream did not end in good order"
    assert max(ends) - began_s < 30, "one of them would have lasted a minute, the others for ever"


_SERVE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.api.conftest import start
import swell.api.server as server
home = Path(sys.argv[1])
server.Server.start = lambda self: None
platform = start(home)
platform.server.run()
platform.plane.stop()
print("ended in good order")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_lets_the_caller_clean_up(tmp_path: Path, number: int) -> None:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(tmp_path), root], stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until((tmp_path / "server.json").exists, 60, "the server")
        assert swell.Client(home=tmp_path).health().status == "ok"
        process.send_signal(number)
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "ended in good order" in output
    assert not (tmp_path / "server.json").exists()


# -- events ----------------------------------------------------------------------------------------------


def _frames(platform: Platform, token: str, query: str, headers: dict[str, str], stop: str) -> list[dict]:
    found = []
    with (
        platform.http(token) as http,
        http.stream("GET", f"/v1/events/stream{query}", headers=headers) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if found[-1]["kind"] == stop:
                    return found
    raise AssertionError("the stream ended too early")


def test_live_events_show_each_listener_only_what_is_theirs(platform: Platform) -> None:
    alice, bob = platform.token("alice"), platform.token("bob")
    seen: dict[str, list[dict]] = {}

    def listen(user: str, token: str) -> None:
        seen[user] = _frames(platform, token, "?since=0", {}, "finished")

    threads = [
        threading.Thread(target=listen, args=pair, daemon=True) for pair in (("alice", alice), ("bob", bob))
    ]
    for thread in threads:
        thread.start()
    ids = {}
    for user, token in (("alice", alice), ("bob", bob)):
        with platform.http(token) as http:
            ids[user] = http.post("/v1/jobs", json=platform.job()).json()["job_id"]
    for thread in threads:
        thread.join(30)
    for user in ("alice", "bob"):
        of_jobs = [event for event in seen[user] if event["node"] is None]
        assert {event["job_id"] for event in of_jobs} == {ids[user]}
        assert of_jobs[0]["kind"] == "submitted"


def test_a_stream_goes_on_from_the_number_a_browser_comes_back_with(platform: Platform) -> None:
    token = platform.token("alice")
    with platform.http(token) as http:
        first = http.post("/v1/jobs", json=platform.job()).json()["job_id"]
        http.get(f"/v1/jobs/{first}?wait_s=20")
        second = http.post("/v1/jobs", json=platform.job()).json()["job_id"]
        http.get(f"/v1/jobs/{second}?wait_s=20")
    everything = _frames(platform, token, f"?since=0&job={second}", {}, "finished")
    assert {event["job_id"] for event in everything} == {second}
    middle = everything[1]["seq"]
    # The header of a reconnecting browser counts more than the address it first asked for.
    rest = _frames(platform, token, "?since=0", {"Last-Event-ID": str(middle)}, "finished")
    assert [event["seq"] for event in rest] == [e["seq"] for e in everything if e["seq"] > middle]


def test_a_listener_far_behind_the_window_gets_everything(tmp_path: Path) -> None:
    platform = start(tmp_path, duration_s=0.01, slots="2x8")
    try:
        hub = platform.server.app.state.context.hub
        hub._window = 8  # far less than will happen
        client = platform.client("alice")
        jobs = [client.submit("train.py", workdir=tmp_path) for _ in range(20)]
        for job in jobs:
            client.wait(job, timeout_s=30)
        last = platform.store.last_seq()
        wait_until(lambda: hub.last >= last, 30, "the hub, which reads events a little later")
        assert hub._floor > 0, "the window was never cut, so this shows nothing"
        numbers = []
        for event in client.events(since=0):
            numbers.append(event.seq)
            if event.seq >= hub.last:
                break
        assert numbers == [seq for seq, _ in platform.plane.events(0, None, 10_000)][: len(numbers)]
        assert len(numbers) >= 60
    finally:
        platform.stop()


def test_too_many_streams_are_told_to_come_later(platform: Platform) -> None:
    platform.server.app.state.context.max_streams = 0
    with platform.http(platform.token("alice")) as http:
        assert http.get("/v1/events/stream").status_code == 429


def test_replay_is_served_where_it_is_given_and_to_admins(tmp_path: Path) -> None:
    asked: list[ReplayRequest] = []

    def replay(request: ReplayRequest) -> dict[str, object]:
        asked.append(request)
        return {"policies": request.policies}

    platform = start(tmp_path, replay=replay)
    try:
        with platform.client("root", "admin") as admin:
            assert admin.replay(["afs-l"], cluster="8x8") == {"policies": ["afs-l"]}
        assert asked[0].cluster == "8x8"
        with platform.http(platform.token("alice")) as http:
            assert http.post("/v1/replay", json={}).status_code == 403
    finally:
        platform.stop()


def test_a_store_that_fails_is_a_503_and_nothing_was_changed(busy_platform: Platform) -> None:
    with busy_platform.http(busy_platform.token("alice")) as http:
        busy_platform.store._database.execute("PRAGMA query_only=ON")
        answer = http.post("/v1/jobs", json=busy_platform.job())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "store_unavailable"
        busy_platform.store._database.execute("PRAGMA query_only=OFF")
        assert http.get("/v1/jobs").json()["jobs"] == []
        assert http.post("/v1/jobs", json=busy_platform.job()).status_code == 201


def test_sockets_are_not_left_to_children(platform: Platform) -> None:
    assert not platform.server._socket.get_inheritable()
    assert isinstance(platform.server._socket, socket.socket)
