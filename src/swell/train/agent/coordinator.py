"""The job's master as a process: sockets, disk and clock around `membership`.

The coordinator is small on purpose and does not import torch: it starts in a fraction of a second, so when it
is killed the launcher just starts it again. All it knows is in `state.json` in the job's directory (replaced
atomically after every change) and in what workers tell it when they reconnect. No step ever waits for it.

A message that is malformed is refused, and changes nothing. Any other exception is an error of ours, which
may leave the state half changed: it is logged, nothing more is done or saved, and the process ends. The
launcher starts the next one, which goes on with the last state that was whole.

    python -m swell.train.agent.coordinator JOB_DIRECTORY [LAUNCH]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swell.train.agent import membership_json, orders
from swell.train.agent.door import Client, Door
from swell.train.agent.errors import BROKEN, Refused
from swell.train.agent.generations import Instruction
from swell.train.agent.hearing import HANDLERS, REPEATED
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.lines import Pace
from swell.train.agent.membership import Membership
from swell.train.agent.notes import Notes
from swell.train.agent.replicas.membership import Replicas
from swell.train.agent.restarts import ProgramGeneration, Restarts
from swell.train.agent.stragglers import Stragglers
from swell.train.agent.wire import Message

TICK_S = 0.1


class Coordinator:
    """Passes the messages of connections to `Membership` and has its instructions carried out.

    `door` has the connections, `hearing` what their messages mean, `orders` what instructions do.
    """

    def __init__(self, directory: Path) -> None:
        self.job = JobDirectory(directory)
        self.config = self.job.config()
        now = time.monotonic()
        saved = self.job.load_state()
        self.fresh = saved is None
        before = None if saved is None else saved["membership"]
        self.membership = membership_json.of_job(self.config, before, now)
        self.door = Door(
            self.config["secret"], self._receive, self._closed, encrypt=self.config.get("encrypt", True)
        )
        self.pace = Pace()
        self.stragglers = Stragglers()
        self.notes = Notes()
        self.port = int(saved["port"]) if saved is not None else 0
        self.workers: dict[str, Client] = {}
        self.exits: dict[str, tuple[float, int, str]] = {}
        """Workers whose connections are not read to their end yet: how long to wait, exit code, note."""
        self.agent: Client | None = None
        self.watchers: set[Client] = set()
        self.processes: dict[str, int | None] = {} if saved is None else dict(saved.get("processes", {}))
        """The workers that were started and have not ended, with their slots, as the events say."""
        self.events = 0
        """The number of the last event of this coordinator."""
        self.reports: dict[str, Message] = {}
        self.last_report: Message = {}
        """The leader's latest report, which outlives its worker."""
        self.figures: Message = {}
        """What a program has said of itself so far: later lines add to earlier ones."""
        self.pids: dict[str, int] = {}
        self.killed: set[str] = set()
        """Workers that the launcher was told to end, and whose end was not reported yet."""
        self.over = asyncio.Event()
        self.failure: Exception | None = None
        """The error of ours that ended this coordinator, if one did."""
        self.fencing = 0
        """The highest fencing number of a control plane that has connected."""
        self._last_saved = ""

    async def run(self) -> None:
        """Serve until the job is over and the launcher knows it."""
        self._watch_lifeline()
        if self.over.is_set():
            return
        self.job.lock("coordinator", 5.0)
        host = self.config.get("host", "127.0.0.1")
        server = await self.door.open(host, self.port)
        self.port = server.sockets[0].getsockname()[1]
        self.save()
        self.job.write_address(host, self.port, os.getpid())
        self.event("coordinator", pid=os.getpid(), restarted=not self.fresh)
        try:
            while not self.over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), TICK_S)
                self._decide(self._tick if self.agent is not None else lambda now: [])
        finally:
            server.close()

    def _decide(self, take_in: Callable[[float], list[Instruction]], *, repeated: bool = False) -> None:
        """Pass on that something happened, and carry out what is decided. Refused passes: nothing changed.

        `repeated`: workers will say it again to the next coordinator, so unless something was decided it is
        enough to save it with the next tick.
        """
        if self.failure is not None:
            return
        try:
            instructions = take_in(time.monotonic())
            orders.carry_out(self, instructions)
            if instructions or not repeated:
                self.save()
        except Refused:
            raise
        except Exception as error:
            self.failure = error
            self.over.set()
            traceback.print_exception(error)

    def _tick(self, now: float) -> list[Instruction]:
        for name in [name for name, (until_s, *_) in self.exits.items() if now > until_s]:
            self.settle_exit(name)
        m = self.membership
        said = self.stragglers.tick(m, now) if isinstance(m, Membership) else []
        return [*said, *m.tick(now)]

    def _watch_lifeline(self) -> None:
        """End the coordinator when the launcher is gone."""
        path = self.job.path / "lifeline"
        if not path.exists():
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(descriptor, self.over.set)
        try:
            gone = os.read(descriptor, 1) == b""  # a pipe that never had a writer does not report its end
        except BlockingIOError:
            gone = False
        if gone or self.job.config().get("launch") != self.config.get("launch"):
            self.over.set()

    @property
    def elastic(self) -> Membership | Replicas:
        """The membership of a job whose workers connect to this process."""
        if isinstance(self.membership, Restarts):
            raise Refused(
                "this job runs with --command, so its workers do not connect to its coordinator; leave out "
                "--command for a script that calls swell.elastic"
            )
        return self.membership

    def _receive(self, client: Client, message: Message) -> None:
        kind = str(message.get("type"))
        handler = HANDLERS.get((client.role or "new", kind))
        try:
            if handler is None:
                raise Refused(f"unknown message {kind!r:.60} from {client.role or 'a stranger'}")
            self._decide(lambda now: handler(self, client, message, now), repeated=kind in REPEATED)
        except Refused as error:
            if client.role in ("worker", "agent"):  # which are ours: people should see it
                self.door.grumble(f"refused {kind!r:.60} of {client.name or client.role}: {error}")
            client.send({"type": "error", "error": str(error)})

    def _closed(self, client: Client) -> None:
        self.watchers.discard(client)
        if client is self.agent:
            self.agent = None
        if client.role == "notes":
            self.notes.leave(client.name, client)
        if client.role == "worker" and self.workers.get(client.name) is client:
            del self.workers[client.name]
            if client.name in self.exits:
                self.settle_exit(client.name)
            else:
                self._decide(lambda now: self.elastic.disconnected(client.name, now))

    def settle_exit(self, name: str) -> None:
        """Tell the membership that a worker's process ended, now that its last messages were read."""
        _, code, note = self.exits.pop(name)
        self._decide(lambda now: self.membership.exited(name, code, now, note))

    def tell(self, worker: str, message: Message) -> None:
        """Send a message to a worker, if it is connected."""
        if (client := self.workers.get(worker)) is not None:
            client.send(message)

    def tell_agent(self, message: Message) -> None:
        """Send a message to the launcher, if it is connected."""
        if self.agent is not None:
            self.agent.send(message)

    def publish(self, message: Message) -> None:
        """Send a message to everybody who watches the job."""
        for watcher in self.watchers:
            watcher.send(message)

    def event(self, name: str, /, **fields: Any) -> None:
        """Add an event to the job's history, and show it to those who watch."""
        if name == "spawn":
            self.processes[str(fields["worker"])] = fields.get("slot")
        elif name == "exited":
            self.processes.pop(str(fields["worker"]), None)
        record = {"time_s": round(time.time(), 6), "event": name}
        record |= {key: value for key, value in fields.items() if key not in record}
        self.events += 1
        self.job.append_event(record)
        self.publish({"type": "event", "number": self.events, **record})

    def status(self) -> Message:
        """What a tool is told about the job."""
        m = self.membership
        generation, scale, workers = m.generation, m.scale, m.workers  # a job of replicas makes each of them
        return {
            "job": self.config["name"],
            "generation": generation.number,
            "members": generation.members,
            "target": scale.target,
            "minimum": scale.minimum,
            "maximum": scale.maximum,
            "confined": scale.confined,
            "workers": {w.name: w.status.value for w in workers.values()},
            "slots": {w.name: w.slot for w in workers.values() if w.slot is not None},
            "processes": dict(self.processes),
            "event": self.events,
            "epoch": 0 if isinstance(generation, ProgramGeneration) else generation.epoch,
            "step": m.step,
            "over": m.ending.over,
            "result": None if (end := m.ending.result) is None else {"code": end.code, "reason": end.reason},
            "pids": {n: p for n, p in self.pids.items() if n in workers},
            "reports": {n: r for n, r in self.reports.items() if n in workers},
            "last_report": self.last_report,
        }

    def save(self) -> None:
        """Write the state to disk if it has changed."""
        members = membership_json.to_json(self.membership)
        text = json.dumps({"port": self.port, "processes": self.processes, "membership": members})
        if text == self._last_saved:
            return
        try:
            self.job.save_state(text)
            self._last_saved = text
        except OSError as error:
            # A full disk must not end the training: what is not saved is needed only if this process is
            # killed before there is room again. Every later change and every tick tries again.
            self.door.grumble(f"state.json cannot be written: {error}")


def main() -> None:
    """Run the coordinator of the job whose directory (and launch) is given."""
    coordinator = Coordinator(Path(sys.argv[1]))
    if len(sys.argv) < 3 or coordinator.config.get("launch") == sys.argv[2]:
        asyncio.run(coordinator.run())
        if coordinator.failure is not None:
            raise SystemExit(BROKEN)


if __name__ == "__main__":
    main()
