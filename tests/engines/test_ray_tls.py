"""Ray's connections between hosts: certificates of the home, and what goes over the wire with them."""

from __future__ import annotations

import secrets
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.ray.cluster import RayNode
from benchmarks.runtime import netns
from tests.waiting import wait_until

from swell.domain import JobRequest
from swell.engines import Launch, RunState
from swell.engines.nursery import Nursery
from swell.engines.ray import tls
from swell.engines.ray.site import RayOptions, RaySite
from swell.engines.supervised import SupervisedEngine

TOY = Path(__file__).with_name("toy.py")
SECRET = "cucumber-in-the-environment"


def _talk(server: dict[str, str], client: dict[str, str], name: str) -> bool:
    """Whether a client that knows the server by this name gets through to it, both with certificates."""

    def context(purpose: ssl.Purpose, own: dict[str, str]) -> ssl.SSLContext:
        made = ssl.create_default_context(purpose, cafile=own["RAY_TLS_CA_CERT"])
        made.load_cert_chain(own["RAY_TLS_SERVER_CERT"], own["RAY_TLS_SERVER_KEY"])
        made.verify_mode = ssl.CERT_REQUIRED
        return made

    here, there = socket.socketpair()
    verdicts: list[bool] = []

    def serve() -> None:
        try:
            with context(ssl.Purpose.CLIENT_AUTH, server).wrap_socket(here, server_side=True) as line:
                verdicts.append(line.recv(5) == b"hello")
        except OSError:
            verdicts.append(False)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with context(ssl.Purpose.SERVER_AUTH, client).wrap_socket(there, server_hostname=name) as line:
            line.sendall(b"hello")
    except OSError:
        there.close()
    thread.join(10)
    return verdicts == [True]


def test_nodes_of_one_home_know_each_other_by_their_addresses_and_nobody_else(tmp_path: Path) -> None:
    one = tls.ensure(tmp_path / "home", ["10.0.0.5"], tmp_path / "one")
    two = tls.ensure(tmp_path / "home", ["10.0.0.6", "gpu-2.example"], tmp_path / "two")
    stranger = tls.ensure(tmp_path / "elsewhere", ["10.0.0.6"], tmp_path / "stranger")
    assert one["RAY_TLS_CA_CERT"] == two["RAY_TLS_CA_CERT"] and one["RAY_USE_TLS"] == "1"
    assert _talk(one, two, "10.0.0.5") and _talk(two, one, "gpu-2.example") and _talk(two, one, "localhost")
    assert not _talk(one, two, "10.0.0.6"), "a node cannot pass itself off as another"
    assert not _talk(one, stranger, "10.0.0.5") and not _talk(stranger, one, "10.0.0.6")
    before = (tmp_path / "one" / "node.crt").read_bytes()
    tls.ensure(tmp_path / "home", ["10.0.0.5"], tmp_path / "one")
    assert (tmp_path / "one" / "node.crt").read_bytes() == before, "processes of the node may be reading it"
    moved = tls.ensure(tmp_path / "home", ["10.0.0.7"], tmp_path / "one")
    assert _talk(moved, two, "10.0.0.7"), "a node that has another address gets another certificate"
    made = [path for folder in ("home", "one", "two") for path in (tmp_path / folder).rglob("*")]
    assert {stat.S_IMODE(p.stat().st_mode) for p in made if p.is_file()} == {0o600}
    assert {stat.S_IMODE(p.stat().st_mode) for p in made if p.is_dir()} == {0o700}


def test_nodes_that_start_together_make_one_authority_and_print_what_a_shell_takes(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    words = [sys.executable, "-m", "swell.engines.ray.tls", str(home), "10.0.0.5", "--out"]
    started = [
        subprocess.Popen([*words, str(tmp_path / name)], stdout=subprocess.PIPE, text=True) for name in "ab"
    ]
    said = [process.communicate(timeout=60)[0] for process in started]
    shown = subprocess.run(
        ["sh", "-c", f"{said[0]}\nprintf '%s' \"$RAY_TLS_CA_CERT\""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == str(home / tls.FOLDER / "ca.crt")
    one, two = (
        {line.split("=")[0].split()[1]: line.split("=", 1)[1].strip("'") for line in text.splitlines()}
        for text in said
    )
    assert _talk(one, two, "10.0.0.5") and _talk(two, one, "10.0.0.5")


@pytest.mark.parametrize(
    ("addresses", "env", "clear"),
    [
        (["10.0.0.5", "10.0.0.6"], {}, True),
        (["10.0.0.5", "10.0.0.6"], {"RAY_USE_TLS": "0"}, True),
        (["10.0.0.5", "10.0.0.6"], {"RAY_USE_TLS": "1"}, False),
        (["10.0.0.5", "10.0.0.5"], {}, False),
        (["127.0.0.1", "127.0.0.1"], {}, False),
    ],
)
def test_several_hosts_without_tls_are_noticed(
    addresses: list[str], env: dict[str, str], clear: bool
) -> None:
    assert tls.in_clear(addresses, env) is clear


@contextmanager
def _heard(interface: str) -> Iterator[list[bytes]]:
    """Every packet that goes over an interface of the present network namespace."""
    packets: list[bytes] = []
    line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
    line.bind((interface, 0))
    line.settimeout(0.2)
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            try:
                packets.append(line.recv(1 << 17))
            except TimeoutError:
                continue

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield packets
    finally:
        over.set()
        thread.join()
        line.close()


@pytest.mark.slow
@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
def test_between_hosts_neither_rays_token_nor_what_jobs_are_given_can_be_read_on_the_wire(
    tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    token, made = secrets.token_hex(16), list[RayNode]()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    scratch = tempfile.mkdtemp(prefix="swell-rc-")
    with netns.Hosts(2) as hosts:
        try:
            for name, value in tls.ensure(tmp_path, [hosts.address(0)], tmp_path / "node-0").items():
                monkeypatch.setenv(name, value)
            made.append(RayNode("head", 0, scratch, None, host=(hosts.namespace(0), hosts.address(0))))
            address = str(made[0].wait_up()["address"])
            with monkeypatch.context() as there:
                for name, value in tls.ensure(tmp_path, [hosts.address(1)], tmp_path / "node-1").items():
                    there.setenv(name, value)
                made.append(RayNode("n1", 1, scratch, address, host=(hosts.namespace(1), hosts.address(1))))
            with hosts.inside(0), _heard("v1") as packets:
                made[1].wait_up()
                engine = SupervisedEngine(RaySite(tmp_path, RayOptions(address=address, spares=False)))
                engine.start(lambda: None)
                try:
                    wait_until(lambda: engine.cluster().capacity == 1, 60, "the node")
                    request = JobRequest(
                        name="a", script=str(TOY), args=("--epochs", "2"), workdir=str(TOY.parent),
                        env={"PASSWORD": SECRET},
                    )  # fmt: skip
                    folder = tmp_path / "jobs" / "a"
                    engine.apply(Launch(job_id="a", request=request, job_dir=folder, max_workers=1), (0,))
                    wait_until(
                        lambda: "a" in engine.observe() and engine.observe()["a"].state is RunState.FINISHED,
                        120,
                        "the job",
                    )
                finally:
                    engine.end("a")
                    wait_until(lambda: not engine.observe(), 30, "the job's end")
                    engine.close()
        finally:
            for node in reversed(made):
                node.stop()
            shutil.rmtree(scratch, ignore_errors=True)
    everything = b"".join(packets)
    assert len(everything) > 100_000 and b"\x16\x03\x03" in everything, "the node was spoken to, by TLS"
    for hidden in (token, SECRET, "A small elastic training script for tests"):
        assert hidden.encode() not in everything
