"""A worker's control thread: it talks to the coordinator and carries out what `standing` says.

The thread sends heartbeats with the latest report. Meshes of candidates are connected in further threads,
while the main thread trains.

A lost connection is made again. A malformed message is logged, and ends the connection too; the next ones
come after growing pauses. Any other exception is an error of ours that leaves `standing` half changed: it is
logged, and the process ends to be started again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from swell.train.agent import protocol
from swell.train.agent.errors import RESPAWN, Refused
from swell.train.agent.jobdir import JobDirectory, own_host
from swell.train.agent.keepalive import keep_alive
from swell.train.agent.polling import readable, writable
from swell.train.agent.wire import Connection, Message, WireError
from swell.train.sync import peers
from swell.train.sync.mesh import Mesh
from swell.train.sync.peers import Peers
from swell.train.sync.standing import (
    Abandon,
    Complain,
    Connect,
    End,
    Instruction,
    Send,
    Standing,
    Try,
)

_CONNECT_S = 2.0
_LONGEST_PAUSE_S = 5.0
"""Longest pause before a new connection to a coordinator that sent a malformed message."""
_LEASE = 0.75
"""Members train on while the coordinator is cut off from them, for this part of `away_s`."""


class Line:
    """The connection of one worker to its coordinator, whatever happens to either."""

    def __init__(
        self,
        directory: JobDirectory,
        config: Message,
        name: str,
        progress: Callable[[], tuple[int, Message]],
    ) -> None:
        self._directory, self._config = directory, config
        self._progress = progress
        """The worker's step and its latest report."""
        self._host = own_host(config)
        self._far = self._host != config.get("host", "127.0.0.1")
        self._beat_s = min(0.5, float(config.get("silent_after_s", 5.0)) / 6)
        self.standing = Standing(
            name, lease_s=_LEASE * float(config.get("away_s", 60.0)) if self._far else None
        )
        self.changed = threading.Condition()
        """Guards `standing` and the outbox, and is notified when either changes."""
        self.peers = Peers(name, self._host, config, self.changed, self._suspect)
        self._outbox: list[protocol.FromWorker] = []
        self._open: Connection | None = None
        """The connection, while `_talk` has it."""
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._closed = False
        threading.Thread(target=self._run, name="swell-link", daemon=True).start()

    # ------------------------------------------------------------------ for all threads

    def do(self, instructions: list[Instruction]) -> None:
        """Carry out instructions; with the lock held."""
        for instruction in instructions:
            match instruction:
                case Send(message):
                    self.send(message)
                case Connect(offer):
                    self._start(self._connect, offer)
                case Abandon(mesh):
                    mesh.abandon()
                case Try(number, addresses):
                    self._start(self._try, number, addresses)
                case Complain(reason):
                    self._complain(f"the coordinator refused a message: {reason}")
                case End(code):
                    os._exit(code)
        self.changed.notify_all()

    def send(self, message: protocol.FromWorker) -> None:
        """Queue a message to the coordinator."""
        with self.changed:
            self._outbox.append(message)
        self._poke()

    def send_now(self, message: protocol.FromWorker) -> None:
        """Send a short message from the caller's thread if that takes no waiting, and queue it otherwise.

        To wake the control thread takes five times as long, which shows where an epoch is some milliseconds.
        """
        with self.changed:
            if self._open is None or self._outbox or self._far or not writable(self._open):
                self.send(message)
                return
            with contextlib.suppress(OSError):  # the control thread finds out, and its greeting says the same
                self._open.send(message)

    def flush(self, timeout_s: float) -> None:
        """Wait until all messages have been sent."""
        with self.changed:
            self.changed.wait_for(lambda: not self._outbox, timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        self._poke()
        self.peers.close()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")

    # ------------------------------------------------------------------ the control thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            traceback.print_exc()
            self._complain("the error above is swell's own; this worker ends, to be started again")
            os._exit(RESPAWN)

    def _complain(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the script may have closed it
            sys.stderr.write(f"worker {self.standing.name}: {text:.300}\n")
            sys.stderr.flush()

    def _serve(self) -> None:
        connection: Connection | None = None
        pause_s = peers.RETRY_S
        while not self._closed:
            try:
                connection = Connection.to_job(self._directory.address(), self._config, connect_s=_CONNECT_S)
                if self._far:
                    keep_alive(connection.sock, every_s=1, probes=2, unacknowledged_s=3.0)
                with self.changed:
                    # Messages of other types may be lost: the greeting repeats what they say.
                    keep = (protocol.Event, protocol.Done)
                    self._outbox = [message for message in self._outbox if isinstance(message, keep)]
                    hello = self.standing.hello(os.getpid(), self.peers.address)
                connection.send(hello)
                self._open = connection
                self._talk(connection)
            except (OSError, WireError):
                pause_s = peers.RETRY_S
            except Refused as error:
                self._complain(f"the coordinator sent a malformed message: {error}")
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            with self.changed:
                self._open = None
                if connection is not None:
                    connection.close()
                self.do(self.standing.away(time.monotonic()))
            if not self._closed:
                time.sleep(pause_s)

    def _talk(self, connection: Connection) -> None:
        next_beat = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if now >= next_beat:
                step, report = self._progress()
                connection.send(protocol.Beat(step, report))
                next_beat = now + self._beat_s
                self._look_for_standstill(step, float(report.get("step_s", 0.0)))
            self._empty_outbox(connection)
            pulses = self.peers.pulses()
            watch: list[Any] = [connection, self._wake_r, *pulses]
            ready = readable(watch, next_beat - time.monotonic())
            if ended := [sock for sock in pulses if sock in ready]:
                self.peers.ended(ended)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            if connection in ready:
                for raw in connection.pending():
                    if (message := protocol.received(protocol.TO_WORKER, raw)) is not None:
                        with self.changed:
                            self.do(self.standing.hear(message))

    def _empty_outbox(self, connection: Connection) -> None:
        with self.changed:
            count = len(self._outbox)
            messages = self._outbox[:count]
        for message in messages:
            connection.send(message)
        if count:
            with self.changed:
                del self._outbox[:count]
                self.changed.notify_all()

    def _look_for_standstill(self, step: int, step_s: float) -> None:
        current = self.standing.current
        waits = current.waits() if current is not None else None
        with self.changed:
            self.do(self.standing.standstill(waits, step, step_s))

    # ------------------------------------------------------------------ threads for what takes a while

    def _start(self, target: Any, *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name="swell-connect", daemon=True).start()

    def _try(self, number: int, addresses: dict[str, protocol.Address]) -> None:
        missing = peers.unreachable(addresses, self._host)
        self.send(protocol.Checked(number, tuple(missing)))

    def _suspect(self, other: str) -> None:
        with self.changed:
            self.do(self.standing.suspect(other, time.monotonic()))

    def _connect(self, offer: protocol.Offer) -> None:
        found = self.peers.connect(offer, lambda: self.standing.is_offered(offer.number))
        if found is None:
            return
        mesh = Mesh(offer.number, offer.members, self.standing.name, found)
        mesh.recovery = offer.recovery
        with self.changed:
            if self.standing.connected(mesh):
                self.changed.notify_all()
                return
        mesh.close()
