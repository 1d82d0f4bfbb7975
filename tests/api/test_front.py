"""The door of a standby: whoever has its address gets the leader's answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx2
import pytest
from tests.api.conftest import Platform, start
from tests.waiting import wait_until

import swell
from swell.api.auth import TokenBook
from swell.api.front import FORWARDED, Front
from swell.api.home import ServerFile
from swell.api.listener import Listener
from swell.api.refusals import NotAuthenticated
from swell.api.server import create_app
from swell.control.errors import NotLeading
from swell.control.lease import Leader, LeaseCandidate, LeaseHolder, Tenure
from swell.domain import SwellError
from swell.engines.parts import elapsed_s


class NoTable:
    """A lease that this standby never looks at."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(name)


@dataclass
class Pair:
    """A leader, and a standby that knows of it."""

    leader: Platform
    candidate: LeaseCandidate
    front: Front
    standby: Listener

    def see(self, url: str | None) -> None:
        """Have the standby see another leader, or none."""
        self.candidate.leader = None if url is None else Leader(1, LeaseHolder("a", url, "here"))
        self.front.turned()

    def client(self, **options: float) -> swell.Client:
        return swell.Client(self.standby.url, self.leader.token("ann"), **options)


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("pair")
    leader = start(home)
    candidate = LeaseCandidate(NoTable(), LeaseHolder("b", "", "here"))
    front = Front(candidate, lambda: TokenBook(leader.store))
    standby = Listener(front, home=home / "planes" / "b", port=0, closing=front.closing)
    standby.start()
    yield Pair(leader, candidate, front, standby)
    standby.stop()
    leader.stop()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """One for all tests, as if it were new."""
    shared_pair.candidate.trouble = ""
    shared_pair.see(shared_pair.leader.server.url)
    return shared_pair


def test_a_client_with_the_standbys_address_just_works(pair: Pair) -> None:
    with pair.client() as client:
        job = client.submit("train.py", name="one", workdir=str(pair.leader.home))
        assert client.wait(job, timeout_s=60).phase == "finished"
        assert [seen.job_id for seen in client.jobs()] == [job.job_id]
        kinds = [event.kind for event in client.events(job=job, since=0, follow=False)]
        assert kinds[-1] == "finished"
        assert "".join(client.logs(job, follow=True)) == f"{job.job_id} pretends to train\n"
        followed = client.events(job=job, since=0)
        assert [next(followed).kind for _ in kinds] == kinds
        with pytest.raises(NotAuthenticated):
            swell.Client(pair.standby.url, "swell_" + "x" * 40).jobs()
    with httpx2.Client(base_url=pair.standby.url, trust_env=False) as http:
        assert http.get("/openapi.json").json()["info"]["title"] == "swell"
        assert http.get("/v1/jobs?limit=0", headers={"Authorization": "Bearer x"}).status_code == 401


def test_health_and_metrics_say_which_role(pair: Pair) -> None:
    token = {"Authorization": f"Bearer {pair.leader.token('ann')}"}
    with httpx2.Client(trust_env=False, headers=token) as http:
        mine, its = pair.standby.url, pair.leader.server.url
        assert http.get(f"{mine}/healthz").json() | {"version": ""} == {
            "status": "ok",
            "version": "",
            "role": "standby",
            "notes": [],
            "leader": its,
        }
        assert http.get(f"{its}/healthz").json()["role"] == "leader"
        assert "swell_leader 0.0" in http.get(f"{mine}/metrics").text
        assert "swell_leader 1.0" in http.get(f"{its}/metrics").text
        assert http.get(f"{mine}/metrics", headers={"Authorization": ""}).status_code == 401
        pair.candidate.trouble = "the store cannot be reached at postgresql://secret"
        ill = http.get(f"{mine}/healthz")
        assert ill.status_code == 503 and "secret" not in ill.text


def test_without_a_leader_nothing_is_changed_and_clients_wait_for_one(pair: Pair) -> None:
    pair.see(None)
    with pair.client(retry_s=0.0) as client, pytest.raises(NotLeading):
        client.jobs()
    timer = threading.Timer(0.5, pair.see, (pair.leader.server.url,))
    timer.start()
    with pair.client(retry_s=60.0) as client:
        job = client.submit("train.py", name="one", workdir=str(pair.leader.home))
        assert client.jobs(limit=1)[0].job_id == job.job_id
    with httpx2.Client(base_url=pair.standby.url, trust_env=False) as http:
        again = http.get("/v1/jobs", headers={FORWARDED: "1"})
        assert again.status_code == 503, "two standbys must not send a request back and forth"


def test_what_is_being_forwarded_is_broken_off_when_the_lead_changes(pair: Pair) -> None:
    with pair.client() as client:
        job = client.submit("train.py", name="one", workdir=str(pair.leader.home))
        followed = client.events(job=job, since=0)
        assert next(followed).kind == "submitted"
        # A leader that takes connections and never answers, as a frozen one.
        with socket.create_server(("127.0.0.1", 0)) as frozen:
            pair.see(f"http://127.0.0.1:{frozen.getsockname()[1]}")
            asked: list[str] = []
            thread = threading.Thread(target=lambda: asked.append(pair.client().job(job).job_id))
            thread.start()
            wait_until(lambda: pair.front._forwarded > 0, 30, "a request to be forwarded")
            pair.see(pair.leader.server.url)
            thread.join(60)
            assert asked == [job.job_id]
        assert client.wait(job, timeout_s=60).over
        assert "finished" in (event.kind for event in followed), "the stream goes on"
    wait_until(lambda: pair.front._forwarded == 0, 30, "nothing to be forwarded any more")


def test_an_unreachable_leader_is_said_and_a_call_that_may_have_arrived_is_not_repeated(pair: Pair) -> None:
    pair.see("http://127.0.0.1:9")
    with pair.client(retry_s=0.2) as client, pytest.raises(SwellError, match="cannot be reached"):
        client.create_token("bob")
    with httpx2.Client(base_url=pair.standby.url, trust_env=False) as http:
        assert http.get("/v1/jobs").status_code == 502


def test_a_front_leads_only_while_its_tenure_is_valid(pair: Pair) -> None:
    tenure = Tenure(1, elapsed_s())
    app = create_app(pair.leader.plane, pair.leader.store)
    with httpx2.Client(base_url=pair.standby.url, trust_env=False) as http:
        pair.front.lead(app, tenure)
        pair.see(None)
        assert http.get("/healthz").json()["role"] == "leader"
        tenure.over = True
        assert http.get("/healthz").json()["role"] == "standby"
        assert http.get("/v1/jobs").status_code == 503
        pair.front.leave()


def test_a_client_with_several_addresses_finds_the_one_that_answers(pair: Pair) -> None:
    token = pair.leader.token("ann")
    with swell.Client(f"http://127.0.0.1:9, {pair.standby.url}", token, retry_s=60.0) as client:
        assert client.jobs(limit=1) is not None
        assert client.health().role == "standby"
    ServerFile("http://127.0.0.1:9", 1).write(pair.leader.home)  # as after a kill -9 of the leader
    with swell.Client(home=pair.leader.home) as client:
        assert client.health().role == "standby"


@pytest.mark.parametrize("target", ["@127.0.0.2:9/v1/jobs", ".example.org/", "*"])
def test_a_strange_target_is_never_part_of_the_leaders_name(pair: Pair, target: str) -> None:
    host, port = pair.standby.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert sock.makefile("rb").readline().split()[1] in (b"400", b"404")
