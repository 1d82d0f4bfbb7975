"""The coordinator's port: who connects, and who has proved that they know the job's secret.

A stranger costs little and learns nothing: there are `MOST_STRANGERS` connections at a time that have proved
nothing yet, each for `HANDSHAKE_S` at most, and what they send is bounded (`wire`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import Callable

from msgspec import Struct

from swell.train.agent.keepalive import keep_alive
from swell.train.agent.protocol import Error
from swell.train.agent.sealed import Seal, crosses_hosts
from swell.train.agent.wire import HANDSHAKE_S, MOST_STRANGERS, Channel, Message, WireError


class Client:
    """One connection: a worker, the launcher ("agent"), or a tool."""

    def __init__(self, secret: str, writer: asyncio.StreamWriter, *, encrypt: bool) -> None:
        self.channel = Channel(secret, server=True)
        self.writer = writer
        own, other = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
        self._seal = Seal(secret, server=True) if encrypt and crosses_hosts(own, other) else None
        if self._seal is None:
            writer.write(self.channel.opening())
        self.role = ""
        self.name = ""
        self.fencing: int | None = None
        """Of a control plane that is one of several: its fencing number."""

    def send(self, message: Struct | Message) -> None:
        """Queue a message; a broken connection is noticed by its reader."""
        if self.writer.is_closing():
            return
        try:
            frame = self.channel.encode(message)
        except WireError as error:  # it is too long; the other messages of this connection are not
            frame = self.channel.encode(Error(str(error)))
        self._write(frame)

    def feed(self, data: bytes) -> list[Message]:
        """Take received bytes, answer a handshake, and return the messages that are complete."""
        if self._seal is not None:
            strange = not self._seal.established
            self.writer.write(self._seal.feed(data))
            if not self._seal.established:
                return []
            if strange:
                self._write(self.channel.opening())
            data = self._seal.read()
        messages, reply = self.channel.feed(data)
        self._write(reply)
        return messages

    def _write(self, data: bytes) -> None:
        if data:
            self.writer.write(data if self._seal is None else self._seal.seal(data))


class Door:
    """Accepts connections, and passes on what those say that have proved to know the secret."""

    def __init__(
        self,
        secret: str,
        receive: Callable[[Client, Message], None],
        closed: Callable[[Client], None],
        *,
        encrypt: bool = True,
    ) -> None:
        self._secret = secret
        self._encrypt = encrypt
        self._receive = receive
        self._closed = closed
        self.strangers: set[Client] = set()
        """Connections that have not proved yet that they know the job's secret."""
        self._grumbled = 0

    async def open(self, host: str, port: int) -> asyncio.Server:
        """Listen at `port`, or at another one if that is taken: workers read it from the directory."""
        try:
            return await asyncio.start_server(self._serve, host, port, reuse_address=True)
        except OSError:
            return await asyncio.start_server(self._serve, host, 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.strangers) >= MOST_STRANGERS:
            self.grumble("too many connections that prove nothing: closed one")
            writer.close()
            return
        client = Client(self._secret, writer, encrypt=self._encrypt)
        self.strangers.add(client)
        keep_alive(writer.get_extra_info("socket"), every_s=1, probes=2)
        late = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._give_up, client)
        try:
            while data := await reader.read(1 << 16):
                messages = client.feed(data)
                if client.channel.established:
                    self.strangers.discard(client)
                for message in messages:
                    self._receive(client, message)
        except (WireError, ssl.SSLError) as error:
            self.grumble(f"refused a connection: {error}")
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            late.cancel()
            self.strangers.discard(client)
            self._closed(client)
            writer.close()

    def _give_up(self, client: Client) -> None:
        """Hang up on a connection that has not proved in time that it knows the secret."""
        if not client.channel.established:
            client.writer.transport.abort()

    def grumble(self, text: str) -> None:
        """Write a line to the log; only some of many, because a stranger may cause as many as it likes."""
        self._grumbled += 1
        if self._grumbled <= 20 or self._grumbled % 1000 == 0:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"coordinator ({self._grumbled}): {text!s:.300}\n")
                sys.stderr.flush()
