"""A worker's side of the control plane: one background thread that talks to the coordinator.

The thread sends heartbeats with the latest report, receives candidates, and connects their meshes while the
main thread trains. At a step boundary the main thread only asks cheap questions (`offer`, `take`). It waits
for the control thread only when it has no generation to train in (`wait_join`, `wait_recovery`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from swell.train.agent.errors import FENCED, RESPAWN, PeerLost
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.keepalive import keep_alive
from swell.train.agent.polling import readable
from swell.train.agent.wire import Connection, Message, WireError
from swell.train.sync import peers
from swell.train.sync.mesh import Mesh
from swell.train.sync.peers import Offer, Peers

_CONNECT_S = 2.0
_STANDSTILL_S = 1.0
"""A step that waits for others for this long, and for three steps, is reported."""
_SUSPECT_EVERY_S = 0.5
STOP = -1
"""Stands in place of a candidate's number: save the job's state and end this run."""
PATIENCE_S = 120.0
"""How long a worker that cannot train waits for the coordinator, before it ends to be started again."""
_LEASE = 0.75
"""Members train on while the coordinator is cut off from them, for this part of `away_s`."""


class Link:
    """The control thread of one worker and what the main thread shares with it."""

    def __init__(self, directory: JobDirectory, name: str) -> None:
        config = directory.config()
        if os.environ.get("SWELL_LAUNCH", config.get("launch")) != config.get("launch"):
            os._exit(FENCED)  # started for an earlier run of this job
        self.name = name
        self.directory = directory
        self.config = config
        self._beat_s = min(0.5, float(config.get("silent_after_s", 5.0)) / 6)
        # This worker may be on another host than the coordinator.
        self._host: str = os.environ.get("SWELL_HOST") or config.get("host", "127.0.0.1")
        self._far = self._host != config.get("host", "127.0.0.1")
        self._lease_s = _LEASE * float(config.get("away_s", 60.0))
        self._lost_s: float | None = None
        """Since when the coordinator has not been connected, if it was and is on another host."""
        self._changed = threading.Condition()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self.peers = Peers(name, self._host, config, self._changed, self._suspect)
        self._suspected: dict[str, float] = {}
        self._stood: Any = None
        """The exchange whose standstill was last reported."""
        self.step = 0
        self.report: Message = {}
        self.current: Mesh | None = None
        self._status = "starting"
        self._epoch = 0
        self._broken = 0
        self._operation = 0
        self._offer: Offer | None = None
        self._meshes: dict[int, Mesh] = {}
        self._welcome: Message | None = None
        self._turn: int | None = None
        self._pinned = 0
        self._stop = False
        self._deferred: list[Message | None] = []
        self._outbox: list[Message] = []
        self._connection: Connection | None = None
        self._closed = False
        threading.Thread(target=self._run, name="swell-link", daemon=True).start()

    # ------------------------------------------------------------------ for the main thread

    def welcome(self) -> Message:
        """The coordinator's first message: whether the job is training already, and in which epoch."""
        with self._changed:
            self._wait(lambda: self._welcome is not None, PATIENCE_S, "to be welcomed")
            assert self._welcome is not None
            return self._welcome

    def announce_ready(self, epoch: int) -> None:
        """Tell the coordinator that this worker is prepared for `epoch`."""
        with self._changed:
            self._status, self._epoch, self._turn = "ready", epoch, None
        self._send({"type": "ready", "epoch": epoch})

    def wait_join(self) -> Mesh | int:
        """Wait for a connected candidate (its mesh) or for the job to go to another epoch (its number)."""
        with self._changed:
            self._wait(lambda: self._turn is not None or self._connected() is not None, None, "to join")
            if self._turn is not None:
                turn, self._turn = self._turn, None
                return turn
            mesh = self._connected()
            assert mesh is not None
            return mesh

    def still_offered(self, number: int) -> bool:
        """Whether candidate `number` is still the latest one."""
        return self._offer is not None and self._offer.number == number

    def offer(self, epoch: int) -> int:
        """The number of the candidate that this worker, in `epoch`, could switch to right now, or 0.

        The candidate is kept until `release`: once a worker has agreed, a newer one must not replace it.
        """
        if self._stop:
            return STOP
        if self._offer is None:
            return 0
        with self._changed:
            offer = self._offer
            if offer is None or offer.recovery or offer.number <= self.peers.generation:
                return 0
            if offer.epoch != epoch and not set(offer.members) <= set(self.peers.members):
                return 0  # its newcomers are in another epoch; the coordinator will tell them
            if self.name not in offer.members or offer.number in self._meshes:
                self._pinned = offer.number
                return offer.number
            return 0

    def newcomers(self) -> int:
        """The number of the pending candidate if it adds a worker that needs the job's state, else 0."""
        offer = self._offer
        if (
            offer is None
            or offer.number <= self.peers.generation
            or set(offer.members) <= set(self.peers.members)
        ):
            return 0
        return offer.number

    def hold(self, number: int) -> None:
        """Defer newer candidates until this worker has its state: all members have entered `number`."""
        with self._changed:
            if self.still_offered(number):
                self._pinned = number

    def release(self) -> None:
        """Let newer candidates replace the one that `offer` or `hold` kept."""
        with self._changed:
            self._pinned = 0
            deferred, self._deferred = self._deferred, []
        for data in deferred[-1:]:
            self._on_candidate(data)

    def take(self, number: int) -> Mesh | None:
        """The mesh of an agreed candidate; None if this worker is not in it and has to leave.

        Raises PeerLost if a recovery has replaced the candidate.
        """
        with self._changed:
            offer = self._offer
            if offer is None or offer.number != number:
                raise PeerLost(f"candidate {number} was replaced by a newer one")
            return self._meshes[number] if self.name in offer.members else None

    def wait_recovery(self, broken: Mesh, operation: int) -> Mesh:
        """Report that a generation is broken, and wait for the mesh of the one that replaces it."""
        after = broken.number
        with self._changed:
            self._broken, self._operation = after, operation
        self._send(
            {
                "type": "broken",
                "generation": after,
                "operation": operation,
                "lost": broken.lost,
                "certain": broken.certain,
            }
        )

        def found() -> bool:
            offer = self._offer
            if offer is None or offer.number <= after:
                return False
            return offer.recovery and (offer.number in self._meshes or self.name not in offer.members)

        with self._changed:
            self._wait(found, PATIENCE_S, "for a new generation")
            assert self._offer is not None
            if self._offer.number not in self._meshes:  # the others went on without this worker
                raise SystemExit(RESPAWN)
            return self._meshes[self._offer.number]

    def entered(self, mesh: Mesh, step: int, epoch: int) -> None:
        """Report that this worker has entered the generation of `mesh`."""
        with self._changed:
            self.current = mesh
            self.peers.enter(mesh)
            self._status, self._broken, self._epoch, self.step = "member", 0, epoch, step
            for number in [n for n in self._meshes if n <= mesh.number]:
                del self._meshes[number]
        self._send(
            {
                "type": "switched",
                "generation": mesh.number,
                "members": list(mesh.members),
                "step": step,
                "epoch": epoch,
            }
        )
        self.release()

    def at_epoch(self, epoch: int) -> None:
        """Report that this worker begins `epoch`."""
        self._epoch = epoch
        self._send({"type": "epoch", "epoch": epoch})

    def event(self, name: str, **fields: Any) -> None:
        """Add an event to the job's history."""
        self._send({"type": "event", "name": name, "fields": fields})

    def leaving(self, number: int) -> None:
        """Report that this worker leaves: candidate `number` was agreed on without it."""
        with self._changed:
            self._status = "leaving"
        self._send({"type": "left", "generation": number})
        self.flush()

    def stopped(self) -> None:
        """Report that the job's state is on disk and that its workers leave."""
        self._send({"type": "stopped"})
        self.flush()

    def done(self, operation: int) -> None:
        """Report that this worker's training loop is over: it takes no part in `operation` and later ones."""
        with self._changed:
            self._status, self._operation = "done", operation
        # A short job may end between two heartbeats, so the last report is sent now.
        self._send({"type": "beat", "step": self.step, "report": self.report})
        self._send({"type": "done", "operation": operation})

    def failed(self, code: int, error: str) -> None:
        """Report that the user's script raised an exception."""
        self._send({"type": "failed", "code": code, "error": error})

    def flush(self, timeout_s: float = 2.0) -> None:
        """Wait until all messages have been sent, at the end of the process."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._changed:
                if not self._outbox:
                    return
            time.sleep(0.002)

    def close(self) -> None:
        """Close the connections; for workers inside a process that lives longer (tests)."""
        self._closed = True
        self._poke()
        self.peers.close()

    # ------------------------------------------------------------------ the control thread

    def _run(self) -> None:
        while not self._closed:
            try:
                connection = Connection.to_job(self.directory.address(), self.config, connect_s=_CONNECT_S)
                self._connection = connection
                if self._far:
                    keep_alive(connection.sock, every_s=1, probes=2, unacknowledged_s=3.0)
                self._hello(connection)
                self._talk(connection)
            except (OSError, WireError, KeyError, ValueError, TypeError):  # it is gone, or talks nonsense
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                self._check_lease()
                time.sleep(peers.RETRY_S)

    def _check_lease(self) -> None:
        """Stop training if the coordinator has been cut off for so long that it may soon start others."""
        now_s = time.monotonic()
        if not self._far or self._welcome is None:
            return
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        if now_s - self._lost_s > self._lease_s and self.current is not None:
            self.current.abandon()

    def _hello(self, connection: Connection) -> None:
        with self._changed:
            # Messages of other types may be lost: the fields of the greeting repeat what they say.
            keep = ("failed", "event", "done")
            self._outbox = [m for m in self._outbox if m["type"] in keep]
            message = {
                "type": "hello",
                "role": "worker",
                "worker": self.name,
                "pid": os.getpid(),
                "address": list(self.peers.address),
                "status": self._status,
                "generation": self.peers.generation,
                "members": list(self.peers.members),
                "epoch": self._epoch,
                "broken": self._broken,
                "operation": self._operation,
            }
        connection.send(message)

    def _talk(self, connection: Connection) -> None:
        next_beat = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if now >= next_beat:
                connection.send({"type": "beat", "step": self.step, "report": self.report})
                next_beat = now + self._beat_s
                self._look_for_standstill()
            with self._changed:
                outbox, self._outbox = self._outbox, []
            try:
                for message in outbox:
                    connection.send(message)
            except OSError:
                with self._changed:
                    self._outbox = outbox + self._outbox
                raise
            pulses = self.peers.pulses()
            watch: list[Any] = [connection, self._wake_r, *pulses]
            ready = readable(watch, next_beat - time.monotonic())
            if ended := [sock for sock in pulses if sock in ready]:
                self.peers.ended(ended)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            if connection in ready:
                for message in connection.pending():
                    self._on(message)

    def _on(self, message: Message) -> None:
        kind = message["type"]
        if kind == "welcome":
            self._lost_s = None
            with self._changed:
                self._welcome = self._welcome or message
                self._changed.notify_all()
        elif kind == "fenced":
            os._exit(FENCED)
        elif kind == "turn":
            with self._changed:
                if self._status == "ready" and message["epoch"] != self._epoch:
                    self._turn, self._status = int(message["epoch"]), "starting"
                self._changed.notify_all()
        elif kind == "stop":
            self._stop = True
        elif kind == "candidate":
            self._on_candidate(message["candidate"])
        elif kind == "check":
            threading.Thread(target=self._check, args=(message,), name="swell-check", daemon=True).start()

    def _check(self, message: Message) -> None:
        there = {n: (str(a[0]), int(a[1])) for n, a in message["addresses"].items() if a and n != self.name}
        missing = peers.unreachable(there, self._host)
        self._send({"type": "checked", "number": message["number"], "unreachable": missing})

    def _suspect(self, other: str) -> None:
        """Tell the coordinator, now and then, that a link seems to be cut."""
        now_s = time.monotonic()
        if now_s - self._suspected.get(other, float("-inf")) > _SUSPECT_EVERY_S:
            self._suspected[other] = now_s
            self._send({"type": "suspect", "worker": other})

    def _look_for_standstill(self) -> None:
        """Report a step that waits for others much longer than a step takes, once."""
        waits = self.current.waits() if self.current is not None else None
        if waits is None or waits.exchange == self._stood:
            return
        if waits.since_s > max(_STANDSTILL_S, 3 * float(self.report.get("step_s", 0.0))):
            self._stood = waits.exchange
            self._send({"type": "waiting", "step": self.step, "workers": waits.workers})

    def _on_candidate(self, data: Message | None) -> None:
        offer = None
        if data is not None:
            offer = Offer(
                int(data["number"]),
                tuple(data["members"]),
                {n: (str(a[0]), int(a[1])) for n, a in data["addresses"].items() if a},
                bool(data["recovery"]),
                int(data["epoch"]),
            )
        with self._changed:
            if offer is not None and self._offer is not None and offer.number == self._offer.number:
                self._offer.addresses.update(offer.addresses)
                return
            if self._pinned and not (offer is not None and offer.recovery):
                self._deferred.append(data)
                return
            self._pinned, self._deferred = 0, []
            self._offer = offer
            for number in [n for n in self._meshes if offer is None or n != offer.number]:
                self._meshes.pop(number).abandon()
            if offer is not None and offer.recovery and self.current is not None:
                self.current.abandon()  # wakes the main thread if it waits for a peer that will not answer
            self._changed.notify_all()
        if offer is not None and self.name in offer.members:
            threading.Thread(target=self._build, args=(offer,), name="swell-connect", daemon=True).start()

    def _build(self, offer: Offer) -> None:
        """Connect the mesh of a candidate."""
        found = self.peers.connect(offer, lambda: self.still_offered(offer.number))
        if found is None:
            return
        mesh = Mesh(offer.number, offer.members, self.name, found)
        mesh.recovery = offer.recovery
        with self._changed:
            if self.still_offered(offer.number):
                self._meshes[offer.number] = mesh
                self._changed.notify_all()
                return
        mesh.close()

    # ------------------------------------------------------------------ small things

    def _connected(self) -> Mesh | None:
        mesh = self._meshes.get(self._offer.number) if self._offer is not None else None
        return None if mesh is None or mesh.broken else mesh

    def _wait(self, condition: Any, timeout_s: float | None, what: str) -> None:
        if not self._changed.wait_for(condition, timeout_s):
            # No failure of the script: a link is cut, say. The coordinator has the worker started again.
            sys.stderr.write(
                f"worker {self.name} waited {timeout_s:g} s {what}; it ends, to be started again. See"
                " logs/coordinator.log in the job's directory\n"
            )
            raise SystemExit(RESPAWN)

    def _send(self, message: Message) -> None:
        with self._changed:
            self._outbox.append(message)
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"x")
