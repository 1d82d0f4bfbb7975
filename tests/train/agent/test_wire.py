"""The wire protocol: mutual proof of the secret, frames that cannot be forged or replayed, clear refusals."""

from __future__ import annotations

import json
import socket
import struct
import threading

import pytest

from swell.train.agent.wire import VERSION, Channel, Connection, WireError, new_secret


def established(secret_a: str = "s", secret_b: str = "s") -> tuple[Channel, Channel]:
    server, client = Channel(secret_a, server=True), Channel(secret_b, server=False)
    _, reply = client.feed(server.opening())
    _, reply = server.feed(reply)
    client.feed(reply)
    return server, client


def test_both_ends_establish_and_exchange_messages_in_order() -> None:
    server, client = established()
    assert server.established and client.established
    data = b"".join(client.encode({"n": n, "text": "é"}) for n in range(5))
    got = []
    for at in range(0, len(data), 7):  # however the bytes are cut
        got += server.feed(data[at : at + 7])[0]
    assert [m["n"] for m in got] == list(range(5))
    assert client.feed(server.encode({"back": True}))[0] == [{"back": True}]


def test_a_client_with_another_secret_is_refused() -> None:
    with pytest.raises(WireError, match="does not know the job's secret"):
        established("right", "wrong")


def test_a_server_with_another_secret_is_refused() -> None:
    client = Channel("right", server=False)
    client.feed(Channel("right", server=True).opening())
    body = json.dumps({"swell": VERSION, "nonce": "00", "proof": "11"}).encode()
    with pytest.raises(WireError, match="server does not know"):
        client.feed(struct.pack("!I", len(body)) + body)


@pytest.mark.parametrize("flip", [4, 25])
def test_a_changed_frame_is_refused(flip: int) -> None:
    server, client = established()
    frame = bytearray(client.encode({"resize": 3}))
    frame[flip] ^= 1
    with pytest.raises(WireError, match="failed its check"):
        server.feed(bytes(frame))


def test_a_replayed_frame_is_refused() -> None:
    server, client = established()
    frame = client.encode({"resize": 3})
    server.feed(frame)
    with pytest.raises(WireError, match="failed its check"):
        server.feed(frame)


def test_a_frame_sent_back_to_its_sender_is_refused() -> None:
    _, client = established()
    with pytest.raises(WireError, match="failed its check"):
        client.feed(client.encode({"a": 1}))


def test_another_version_is_named_in_the_refusal() -> None:
    body = json.dumps({"swell": VERSION + 1, "nonce": "00"}).encode()
    with pytest.raises(WireError, match=f"version {VERSION + 1} .* this one {VERSION}"):
        Channel("s", server=False).feed(struct.pack("!I", len(body)) + body)


def test_a_stranger_speaking_http_is_refused_without_reading_on() -> None:
    with pytest.raises(WireError, match="not a swell connection"):
        Channel("s", server=True).feed(b"GET / HTTP/1.1\r\n\r\n")


def test_nothing_can_be_sent_before_the_handshake() -> None:
    with pytest.raises(WireError, match="before the handshake"):
        Channel("s", server=False).encode({})


def test_connections_leave_bytes_after_a_message_on_the_socket() -> None:
    secret = new_secret()
    a, b = socket.socketpair()
    ends: dict[str, Connection] = {}
    thread = threading.Thread(target=lambda: ends.update(server=Connection(a, secret, server=True)))
    thread.start()
    client = Connection(b, secret)
    thread.join(5)
    ends["server"].send({"hello": 1})
    a.sendall(b"raw")
    assert client.receive(5) == {"hello": 1}
    assert b.recv(3) == b"raw"
    client.close()
    with pytest.raises(ConnectionError):
        ends["server"].receive(5)
    a.close()
