"""Reservations over HTTP and by the SDK: who may make one, and who may say what a service wants."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tests.api.conftest import Platform
from tests.waiting import wait_until

from swell.api.refusals import Forbidden
from swell.cli.reserve import SourceFailed, command_source, metric_source, to_gpus
from swell.control.errors import Conflict, NotFound
from swell.domain import InputError


def test_a_service_says_what_it_wants_and_is_told_when_it_has_it(busy_platform: Platform) -> None:
    with (
        busy_platform.client("root", "admin") as admin,
        busy_platform.client("svc") as service,
        busy_platform.client("bob") as bob,
    ):
        job = bob.submit(busy_platform.home / "train.py")
        wait_until(lambda: bob.job(job).wanted, 30, "the job to run")
        made = admin.reserve("web", most=3, owner="svc")
        assert (made.gpus, made.most, made.slots, made.yielded) == (0, 3, [], False)
        with pytest.raises(Forbidden, match="its owner may"):
            bob.demand("web", 1)
        service.demand("web", 3)
        wait_until(lambda: bob.reservations()[0].yielded, 30, "the slots to be left")
        held = bob.reservations()[0]
        assert len(held.slots) == 3 and held.heard_s is not None
        assert not set(held.slots) & set(bob.job(job).wanted)
        assert sum(node.held for node in bob.nodes()) == 3
        with pytest.raises(InputError, match="from 0 to 3"):
            service.demand("web", 4)
        service.demand("web", 0)
        wait_until(lambda: not bob.reservations()[0].slots, 30, "the slots to be given back")
        kinds = [event.kind for event in bob.events(since=0, follow=False) if event.job_id is None]
        assert kinds[-4:] == ["reserved", "held", "yielded", "held"]
        for refused in (lambda: bob.reserve("mine", gpus=1), lambda: bob.unreserve("web")):
            with pytest.raises(Forbidden):
                refused()
        admin.reserve("night", nodes=["n1"], start_s=4e9, end_s=4e9 + 3600, every_s=86400.0)
        assert [one.name for one in bob.reservations()] == ["web", "night"]
        with pytest.raises(Conflict, match="follows no service"):
            admin.demand("night", 1)
        assert admin.unreserve("night").name == "night"
        with pytest.raises(NotFound, match="swell reserve list"):
            admin.unreserve("night")


def test_bad_reservations_are_refused_by_field(shared_platform: Platform) -> None:
    with shared_platform.http(shared_platform.token("root", "admin")) as http:
        for body, field in (
            ({}, "gpus"),
            ({"gpus": 5}, "gpus"),
            ({"nodes": ["n9"]}, "nodes"),
            ({"gpus": 1, "start_s": 10.0, "end_s": 5.0}, "end_s"),
            ({"gpus": 1, "many": 1}, "many"),
        ):
            answer = http.put("/v1/reservations/a", json=body)
            assert answer.status_code == 422 and field in answer.text, answer.text


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The address of a page of metrics."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'# TYPE busy gauge\nbusy{job="web",pod="a"} 40\nbusy{job="web",pod="b"} 61\n')

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()


def test_a_metric_is_the_sum_of_its_samples(page: str) -> None:
    assert metric_source(page, "busy")() == 101.0
    assert metric_source(page, 'busy{pod="b", job="web"}')() == 61.0
    with pytest.raises(SourceFailed, match="has no metric"):
        metric_source(page, 'busy{pod="c"}')()
    for bad in ("busy{", "", "busy{pod=b}"):
        with pytest.raises(InputError, match="metric must be"):
            metric_source(page, bad)
    with pytest.raises(InputError, match="http"):
        metric_source("file:///etc/passwd", "busy")


def test_a_command_prints_the_number() -> None:
    def said(text: str) -> float:
        return command_source([sys.executable, "-S", "-c", text])()

    assert said("print('wants', 2.5)") == 2.5
    for text, why in (("print('many')", "no number"), ("raise SystemExit(3)", "exit code 3")):
        with pytest.raises(SourceFailed, match=why):
            said(text)
    with pytest.raises(SourceFailed, match="cannot be run"):
        command_source(["/nowhere/at-all"])()


def test_slots_are_rounded_up_and_bounded() -> None:
    assert [to_gpus(v, per=50.0, most=4) for v in (-1, 0, 1, 50, 51, 1e9)] == [0, 0, 1, 1, 2, 4]
