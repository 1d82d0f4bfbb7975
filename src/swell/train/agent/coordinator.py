"""The job's master as a process: sockets, disk and clock around `membership`.

The coordinator is small on purpose and does not import torch: it starts in a fraction of a second, so when it
is killed the launcher just starts it again. All it knows is in `state.json` in the job's directory (replaced
atomically after every change) and in what workers tell it when they reconnect. No step ever waits for it.

    python -m swell.train.agent.coordinator JOB_DIRECTORY [LAUNCH]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from swell.train.agent import membership_json, orders
from swell.train.agent.door import Client, Door
from swell.train.agent.generations import Instruction
from swell.train.agent.hearing import HANDLERS
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.lines import Pace
from swell.train.agent.membership import Membership
from swell.train.agent.notes import Notes
from swell.train.agent.replicas.membership import Replicas
from swell.train.agent.restarts import Restarts
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
        self.exits: dict[str, Message] = {}
        """Exits of workers whose connections are not read to their end yet."""
        self.agent: Client | None = None
        self.watchers: set[Client] = set()
        self.processes: dict[str, int | None] = {} if saved is None else dict(saved.get("processes", {}))
        """The workers that were started and have not ended, with their slots, as the events say."""
        self.events = 0
        """The number of the last event of this coordinator."""
        self.reports: dict[str, Message] = {}
        self.pids: dict[str, int] = {}
        self.over = asyncio.Event()
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
        async with server:
            while not self.over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), TICK_S)
                if self.agent is not None:
                    self._carry_out(self._tick(time.monotonic()))

    def _tick(self, now: float) -> list[Instruction]:
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
            raise TypeError("the workers of this job do not speak to its coordinator")
        return self.membership

    def _receive(self, client: Client, message: Message) -> None:
        kind = str(message.get("type"))
        handler = HANDLERS.get((client.role or "new", kind))
        try:
            if handler is None:
                raise ValueError(f"unknown message {kind!r} from {client.role or 'a stranger'}")
            instructions = handler(self, client, message, time.monotonic())
        except (ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
            instructions = []
            client.send({"type": "error", "error": str(error)})
        self._carry_out(instructions)

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
                self._carry_out(self.elastic.disconnected(client.name, time.monotonic()))

    def settle_exit(self, name: str) -> None:
        """Tell the membership that a worker's process ended, unless its connection is still read."""
        if name not in self.workers and (ended := self.exits.pop(name, None)) is not None:
            now, note = time.monotonic(), str(ended.get("note", ""))
            self._carry_out(self.membership.exited(name, int(ended["code"]), now, note))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        orders.carry_out(self, instructions)
        self.save()

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

    def event(self, name: str, **fields: Any) -> None:
        """Add an event to the job's history, and show it to those who watch."""
        if name == "spawn":
            self.processes[str(fields["worker"])] = fields.get("slot")
        elif name == "exited":
            self.processes.pop(str(fields["worker"]), None)
        record = {"time_s": round(time.time(), 6), "event": name, **fields}
        self.events += 1
        self.job.append_event(record)
        self.publish({"type": "event", "number": self.events, **record})

    def status(self) -> Message:
        """What a tool is told about the job."""
        m = self.membership
        return {
            "job": self.config["name"],
            "generation": m.generation.number,
            "members": m.generation.members,
            "target": m.scale.target,
            "minimum": m.scale.minimum,
            "maximum": m.scale.maximum,
            "confined": m.scale.confined,
            "workers": {w.name: w.status.value for w in m.workers.values()},
            "slots": {w.name: w.slot for w in m.workers.values() if w.slot is not None},
            "processes": dict(self.processes),
            "event": self.events,
            "epoch": 0 if isinstance(m, Restarts) else m.generation.epoch,  # a program counts itself
            "step": m.step,
            "over": m.ending.over,
            "pids": {n: p for n, p in self.pids.items() if n in m.workers},
            "reports": {n: r for n, r in self.reports.items() if n in m.workers},
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


if __name__ == "__main__":
    main()
