"""The SDK against a real server, blocking and asynchronous."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from tests.api.conftest import Platform, start
from tests.control.virtual import known_exactly
from tests.waiting import wait_until

import swell
from swell.api.client import Calls
from swell.api.refusals import Conflict, Forbidden, NotAuthenticated, NotFound, Unreachable
from swell.control.model import Estimate, Phase
from swell.domain import InputError


def test_a_job_from_submission_to_its_end(platform: Platform) -> None:
    with platform.client("alice") as client:
        promise = client.quote("train.py", workdir=platform.home)
        assert promise.admitted
        assert client.jobs() == []
        job = client.submit("train.py", workdir=platform.home, args=["--epochs", "3"])
        assert (job.name, job.owner, job.over) == ("train", "alice", False)
        text = "".join(client.logs(job, follow=True))
        assert text == f"{job.job_id} pretends to train\n"
        done = client.wait(job, timeout_s=20)
        assert done.phase is Phase.FINISHED
        assert done.request.args == ("--epochs", "3")
        assert "".join(client.logs(job, offset=len(job.job_id) + 1)) == "pretends to train\n"
        kinds = [event.kind for event in client.events(job=job, follow=False)]
        assert kinds[0] == "submitted"
        assert kinds[-1] == "finished"
        assert client.explain(job)["phase"] == "finished"
        assert client.story(job) == [], "this engine only pretends"
        assert [one.job_id for one in client.jobs(phase="finished")] == [job.job_id]
        assert sum(node.gpus for node in client.nodes()) == 4
        assert client.policy() == "afs-l"


def test_the_same_with_asyncio(platform: Platform) -> None:
    async def tour() -> None:
        async with swell.AsyncClient(platform.server.url, platform.token("alice")) as client:
            jobs = await asyncio.gather(
                *(client.submit("train.py", workdir=platform.home, name=f"j{i}") for i in range(3))
            )
            done = await asyncio.gather(*(client.wait(job, timeout_s=30) for job in jobs))
            assert {job.phase for job in done} == {Phase.FINISHED}
            assert len(await client.jobs(limit=2)) == 2
            text = "".join([piece async for piece in client.logs(jobs[0], follow=True)])
            assert "pretends" in text
            async for event in client.events(jobs[0], since=0):
                if event.kind == "finished":
                    break

    asyncio.run(tour())


def test_both_clients_have_every_call() -> None:
    calls = [name for name, _ in inspect.getmembers(Calls, inspect.isfunction) if not name.startswith("_")]
    for name in calls:
        assert inspect.signature(getattr(swell.Client, name)) == inspect.signature(getattr(Calls, name))


def test_the_calls_of_the_guide_are_the_calls_there_are() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
    rows = re.findall(r"^\| (`\w+\(.*?\)`.*?) \|", guide, re.M)
    written = {name: given for row in rows for name, given in re.findall(r"`(\w+)\((.*?)\)`", row)}
    calls = [name for name, _ in inspect.getmembers(Calls, inspect.isfunction) if not name.startswith("_")]
    assert set(calls) - set(written) == {"health", "close"}
    for name, given in written.items():
        meant = inspect.signature(eval(f"lambda {given}: None"))
        real = list(inspect.signature(getattr(Calls, name)).parameters.values())[1:]
        assert [(p.name, p.kind) for p in meant.parameters.values()] == [(p.name, p.kind) for p in real], name


def test_every_answer_about_a_job_has_the_same_estimate_and_none_is_in_the_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swell.control.desks.ESTIMATED_EVERY_S", 600.0)
    platform = start(tmp_path, duration_s=600.0)
    rates = np.array([0.0, 1.0, 1.9, 2.7, 3.4])
    knowledge = known_exactly("kind", 5000.0, rates, startup_s=0.1, pause_s=0.1)
    try:
        with platform.client("alice") as client:
            job_id = client.submit("train.py", workdir=tmp_path).job_id
            book = platform.plane._conductor.book
            with platform.plane._lock:  # the estimate that was made when the job came has passed
                record = book.records[job_id]
                old = replace(record.promise, estimate=Estimate(finish_s=1.0, source="model"))
                book.records[job_id], book.known[job_id] = replace(record, promise=old), knowledge
            listed, one = client.jobs()[0].promise.estimate, client.job(job_id).promise.estimate
            explained = client.explain(job_id)["estimate"]
            assert listed == one and explained["finish_s"] == one.finish_s
            assert one.finish_s is not None and one.finish_s > time.time()
    finally:
        platform.stop()


def test_pausing_scaling_and_cancelling(busy_platform: Platform) -> None:
    with busy_platform.client("alice") as client:
        job = client.submit("train.py", workdir=busy_platform.home)
        assert client.scale(job, 1, 2).request.max_workers == 2
        assert client.pause(job).phase is Phase.PAUSED
        assert client.resume(job).phase is Phase.QUEUED
        with pytest.raises(TimeoutError):
            client.wait(job, timeout_s=0.3)
        assert client.cancel(job).phase is Phase.CANCELLED
        assert client.cancel(job).phase is Phase.CANCELLED, "saying it twice is no error"
        with pytest.raises(Conflict):
            client.pause(job)


def test_a_job_of_any_name_can_be_addressed(busy_platform: Platform) -> None:
    (busy_platform.home / "--odd.py").write_text("")
    names = [dict[str, str](), {"name": "_"}, {"name": "9.a-b_"}, {"name": "x" * 100}]
    with busy_platform.client("alice") as client:
        for name in names:
            job = client.submit("--odd.py", workdir=busy_platform.home, **name)  # type: ignore[arg-type]
            assert client.cancel(job.job_id).phase == "cancelled"
        assert len(client.jobs()) == len(names)


def test_refusals_come_back_as_the_errors_they_were(busy_platform: Platform) -> None:
    with busy_platform.client("alice") as client:
        with pytest.raises(NotFound, match="there is no job 'x'"):
            client.job("x")
        with pytest.raises(InputError) as refused:
            client.submit("train.py", workdir=busy_platform.home, min_workers=0)
        assert refused.value.field == "min_workers"
        with pytest.raises(InputError):
            client.submit("train.py", deadline_s=2e9, within_s=5)
        with pytest.raises(InputError):
            client.cancel("../../etc")
        with pytest.raises(Forbidden, match="administrator"):
            client.drain("n0")
    with pytest.raises(NotAuthenticated):
        swell.Client(busy_platform.server.url, "swell_wrong").nodes()


def test_an_admin_drains_and_switches_the_policy(busy_platform: Platform) -> None:
    with busy_platform.client("root", "admin") as admin:
        assert [node.draining for node in admin.drain("n0")] == [True, False]
        assert [node.draining for node in admin.undrain("n0")] == [False, False]
        assert admin.set_policy("elasticflow") == "elasticflow"


def test_the_server_of_a_home_is_found_with_its_tokens(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SWELL_URL", "SWELL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with swell.Client(home=platform.home) as client, swell.Client(home=platform.home, role="admin") as admin:
        job = client.submit("train.py", workdir=platform.home)
        assert admin.job(job).owner == job.owner
        assert admin.tokens()
    monkeypatch.setenv("SWELL_HOME", str(platform.home))
    assert swell.Client().health().status == "ok"
    monkeypatch.setenv("SWELL_URL", platform.server.url)
    monkeypatch.setenv("SWELL_TOKEN", "swell_wrong")
    with pytest.raises(NotAuthenticated):
        swell.Client().nodes()


def test_without_a_server_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="swell up"):
        swell.Client(home=tmp_path).jobs()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(Unreachable, match="is it running"):
            swell.Client(url, "swell_x").jobs()
        assert time.monotonic() - began_s < 10, "a server that never answered is not waited for"
    with pytest.raises(Unreachable, match="not the URL"):
        swell.Client("ftp://somewhere", "swell_x").jobs()


@contextmanager
def losing_answers(target_url: str, lose: int) -> Iterator[str]:
    """A proxy that hands requests on and drops the connection instead of the first so many answers."""
    where = urlsplit(target_url)
    lost = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        ending = threading.Event()

        def serve() -> None:
            nonlocal lost
            while not ending.is_set():
                try:
                    near, _ = listener.accept()
                except TimeoutError:
                    continue
                with near, socket.create_connection((where.hostname, where.port or 0)) as far:
                    near.settimeout(5)
                    request = near.recv(65536)
                    while b"\r\n\r\n" not in request or not request.endswith(b"}"):
                        request += near.recv(65536)
                    far.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                    answer = b""
                    while part := far.recv(65536):
                        answer += part
                    if lost < lose:
                        lost += 1  # the server has done it, the client never hears of it
                    else:
                        near.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ending.set()
        thread.join(10)


def test_a_lost_answer_does_not_make_a_second_job(busy_platform: Platform) -> None:
    token = busy_platform.token("alice")
    with (
        losing_answers(busy_platform.server.url, lose=2) as url,
        swell.Client(url, token) as client,
    ):
        job = client.submit("train.py", workdir=busy_platform.home)
    assert [one.job_id for one in busy_platform.plane.jobs.find("alice")] == [job.job_id]


def test_event_streams_and_waits_survive_a_restart_of_the_server(
    start_platform: Callable[..., Platform],
) -> None:
    first = start_platform()
    port = urlsplit(first.server.url).port
    url, token = first.server.url, first.token("alice")
    client = swell.Client(url, token)
    before = client.wait(client.submit("train.py", workdir=first.home), timeout_s=20)
    numbers: list[int] = []
    ended: set[str] = set()

    def listen() -> None:
        for event in swell.Client(url, token).events(since=0):
            numbers.append(event.seq)
            if event.kind == "finished":
                ended.add(str(event.job_id))
                if len(ended) == 2:
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    wait_until(lambda: before.job_id in ended, 30, "the first job's end to be heard")
    first.stop()
    second = start_platform(port=port)
    job = client.submit("train.py", workdir=second.home)
    assert client.wait(job, timeout_s=20).phase is Phase.FINISHED
    listener.join(20)
    assert not listener.is_alive()
    assert job.job_id in ended
    assert numbers == sorted(set(numbers)), "an event came twice"
    seen = [e.seq for e in client.events(follow=False) if e.seq <= numbers[-1]]
    assert numbers == seen, "an event was lost"
