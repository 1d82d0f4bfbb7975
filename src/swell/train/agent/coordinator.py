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

from swell.train.agent import membership_json
from swell.train.agent.generations import (
    Announce,
    Begin,
    Check,
    Fence,
    Finish,
    Instruction,
    Kill,
    Save,
    Say,
    Spawn,
    Status,
    Stop,
    Turn,
)
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.keepalive import keep_alive
from swell.train.agent.lines import Pace
from swell.train.agent.membership import Membership
from swell.train.agent.replicas import Replicas
from swell.train.agent.restarts import Restarts
from swell.train.agent.wire import HANDSHAKE_S, MOST_STRANGERS, Channel, Message, WireError

TICK_S = 0.1


class Client:
    """One connection: a worker, the launcher ("agent"), or a tool."""

    def __init__(self, secret: str, writer: asyncio.StreamWriter) -> None:
        self.channel = Channel(secret, server=True)
        self.writer = writer
        self.role = ""
        self.name = ""
        self.fencing: int | None = None
        """Of a control plane that is one of several: its fencing number."""

    def send(self, message: Message) -> None:
        """Queue a message; a broken connection is noticed by its reader."""
        if not self.writer.is_closing():
            self.writer.write(self.channel.encode(message))


class Coordinator:
    """Passes the messages of connections to `Membership` and carries out its instructions."""

    def __init__(self, directory: Path) -> None:
        self.job = JobDirectory(directory)
        self.config = self.job.config()
        now = time.monotonic()
        saved = self.job.load_state()
        self.fresh = saved is None
        before = None if saved is None else saved["membership"]
        self.membership = membership_json.of_job(self.config, before, now)
        self.pace = Pace()
        self.port = int(saved["port"]) if saved is not None else 0
        self.workers: dict[str, Client] = {}
        self._exits: dict[str, Message] = {}
        """Exits of workers whose connections are not read to their end yet."""
        self.agent: Client | None = None
        self.watchers: set[Client] = set()
        self.strangers: set[Client] = set()
        """Connections that have not proved yet that they know the job's secret."""
        self._grumbled = 0
        self.reports: dict[str, Message] = {}
        self.pids: dict[str, int] = {}
        self.over = asyncio.Event()
        self._last_saved = ""
        self._fencing = 0
        """The highest fencing number of a control plane that has connected."""

    async def run(self) -> None:
        """Serve until the job is over and the launcher knows it."""
        self._watch_lifeline()
        if self.over.is_set():
            return
        self.job.lock("coordinator", 5.0)
        host = self.config.get("host", "127.0.0.1")
        try:
            server = await asyncio.start_server(self._serve, host, self.port, reuse_address=True)
        except OSError:  # the old port is taken; workers read the new one from the directory
            server = await asyncio.start_server(self._serve, host, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._save()
        self.job.write_address(host, self.port, os.getpid())
        self._event("coordinator", pid=os.getpid(), restarted=not self.fresh)
        async with server:
            while not self.over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), TICK_S)
                if self.agent is not None:
                    self._carry_out(self.membership.tick(time.monotonic()))
                    self._save()

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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(self.config["secret"], writer)
        if len(self.strangers) >= MOST_STRANGERS:
            self._grumble("too many connections that prove nothing: closed one")
            writer.close()
            return
        self.strangers.add(client)
        keep_alive(writer.get_extra_info("socket"), every_s=1, probes=2)
        late = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._give_up, client)
        try:
            writer.write(client.channel.opening())
            while data := await reader.read(1 << 16):
                messages, reply = client.channel.feed(data)
                if client.channel.established:
                    self.strangers.discard(client)
                if reply:
                    writer.write(reply)
                for message in messages:
                    self._receive(client, message)
                    self._save()
        except WireError as error:
            self._grumble(f"refused a connection: {error}")
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

    def _grumble(self, text: str) -> None:
        """Write a line to the log; only some of many, because a stranger may cause as many as it likes."""
        self._grumbled += 1
        if self._grumbled <= 20 or self._grumbled % 1000 == 0:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"coordinator ({self._grumbled}): {text!s:.300}\n")
                sys.stderr.flush()

    def _closed(self, client: Client) -> None:
        self.watchers.discard(client)
        if client is self.agent:
            self.agent = None
        if client.role == "worker" and self.workers.get(client.name) is client:
            del self.workers[client.name]
            now, ended = time.monotonic(), self._exits.pop(client.name, None)
            if ended is not None:
                note = str(ended.get("note", ""))
                self._carry_out(self.membership.exited(client.name, int(ended["code"]), now, note))
            else:
                self._carry_out(self._elastic.disconnected(client.name, now))
            self._save()

    # ------------------------------------------------------------------ messages in

    @property
    def _elastic(self) -> Membership | Replicas:
        """The membership of a job whose workers connect to this process."""
        if isinstance(self.membership, Restarts):
            raise TypeError("the workers of this job do not speak to its coordinator")
        return self.membership

    def _receive(self, client: Client, message: Message) -> None:
        kind = str(message.get("type"))
        now = time.monotonic()
        handler = getattr(self, f"_on_{client.role or 'new'}_{kind.replace('-', '_')}", None)
        if handler is None:
            client.send(
                {"type": "error", "error": f"unknown message {kind!r} from {client.role or 'a stranger'}"}
            )
            return
        try:
            instructions = handler(client, message, now)
        except (ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
            client.send({"type": "error", "error": str(error)})
            return
        self._carry_out(instructions or [])

    def _on_new_hello(self, client: Client, message: Message, now: float) -> list[Instruction]:
        role = str(message["role"])
        if role not in ("worker", "agent", "tool"):
            raise ValueError(f"role: got {role!r}, must be worker, agent or tool")
        client.role = role
        if role == "agent":
            self.agent = client
            client.send({"type": "welcome"})
            return self.membership.agent_connected([str(n) for n in message.get("alive", [])], now)
        if role == "worker":
            m = self._elastic
            client.name = str(message["worker"])
            self.workers[client.name] = client
            self.pids[client.name] = int(message["pid"])
            host, port = message["address"]
            out = m.hello(
                client.name,
                (str(host), int(port)),
                str(message["status"]),
                int(message["generation"]),
                [str(n) for n in message["members"]],
                now,
            )
            if "epoch" in message and message["status"] == "member":
                out += m.at_epoch(int(message["epoch"]), now)
            client.send({"type": "welcome", "live": m.live, "epoch": m.epoch, "generation": m.generation})
            if message["status"] == "ready":
                out += m.ready(client.name, int(message.get("epoch", 0)), now)
            if message.get("broken"):
                out += m.broken(client.name, int(message["broken"]), int(message["operation"]), now)
            return out
        if message.get("fencing") is not None:
            client.fencing = int(message["fencing"])
            self._fencing = max(self._fencing, client.fencing)
        client.send({"type": "welcome", **self._status()})
        return []

    def _check_leads(self, client: Client) -> None:
        """Refuse what a control plane says that leads no longer: it was frozen while another took over."""
        if client.fencing is not None and client.fencing < self._fencing:
            raise ValueError("another control plane leads by now")

    def _on_worker_ready(self, client: Client, message: Message, now: float) -> list[Instruction]:
        self._event("ready", worker=client.name)
        return self._elastic.ready(client.name, int(message["epoch"]), now)

    def _on_worker_beat(self, client: Client, message: Message, now: float) -> list[Instruction]:
        self._elastic.beat(client.name, int(message.get("step", 0)), now)
        report = message.get("report")
        if report:
            self.reports[client.name] = report
            self._publish({"type": "report", "worker": client.name, "report": report})
        return []

    def _on_worker_epoch(self, client: Client, message: Message, now: float) -> list[Instruction]:
        return self._elastic.at_epoch(int(message["epoch"]), now)

    def _on_worker_switched(self, client: Client, message: Message, now: float) -> list[Instruction]:
        number = int(message["generation"])
        if number > self._elastic.generation:
            self._event("generation", number=number, members=message["members"], step=message.get("step"))
        out = self._elastic.switched(number, [str(n) for n in message["members"]], now)
        return out + self._elastic.at_epoch(int(message["epoch"]), now)

    def _on_worker_broken(self, client: Client, message: Message, now: float) -> list[Instruction]:
        operation, lost = int(message["operation"]), str(message.get("lost", ""))
        number, certain = int(message["generation"]), bool(message.get("certain"))
        return self._elastic.broken(client.name, number, operation, now, lost, certain)

    def _on_worker_suspect(self, client: Client, message: Message, now: float) -> list[Instruction]:
        return self._elastic.suspect(client.name, str(message["worker"]), now)

    def _on_worker_checked(self, client: Client, message: Message, now: float) -> list[Instruction]:
        unreachable = [str(name) for name in message["unreachable"]]
        return self._elastic.checked(client.name, int(message["number"]), unreachable, now)

    def _on_worker_waiting(self, client: Client, message: Message, now: float) -> list[Instruction]:
        others = [str(name) for name in message["workers"]]
        return self._elastic.waiting(int(message["step"]), others, now)

    def _on_worker_left(self, client: Client, message: Message, now: float) -> list[Instruction]:
        return self._elastic.left(client.name, int(message["generation"]), now)

    def _on_worker_stopped(self, client: Client, message: Message, now: float) -> list[Instruction]:
        return self._elastic.stopped()

    def _on_worker_done(self, client: Client, message: Message, now: float) -> list[Instruction]:
        return self._elastic.done(client.name, int(message["operation"]), now)

    def _on_worker_failed(self, client: Client, message: Message, now: float) -> list[Instruction]:
        if self._elastic.result is None:
            self._event("failed", worker=client.name, code=message["code"])
            if self.agent is not None:
                self.agent.send({"type": "failed", "worker": client.name, "error": str(message["error"])})
        return self._elastic.failed(client.name, int(message["code"]), now)

    def _on_worker_event(self, client: Client, message: Message, now: float) -> list[Instruction]:
        fields = dict(message.get("fields", {}))
        self._event(str(message["name"]), worker=client.name, **fields)
        if message["name"] == "confined":
            return self._elastic.confine(int(fields["workers"]), str(fields["reason"]), now)
        return []

    def _on_agent_exited(self, client: Client, message: Message, now: float) -> list[Instruction]:
        name, code = str(message["worker"]), int(message["code"])
        worker = self.membership.workers.get(name)
        ended_by_us = isinstance(self.membership, Restarts) and worker and worker.status is Status.LEAVING
        self._event("exited", worker=name, code=0 if ended_by_us else code)
        if code == 0 and name in self.workers and worker is not None and worker.status is Status.MEMBER:
            self._exits[name] = message  # its last words may still be on the way: `_closed` goes on
            return []
        return self.membership.exited(name, code, now, str(message.get("note", "")))

    def _on_agent_said(self, client: Client, message: Message, now: float) -> list[Instruction]:
        """Take in what a program said in its output; only what rank 0 says counts."""
        name, figures, restarts = str(message["worker"]), dict(message["figures"]), self.membership
        if not isinstance(restarts, Restarts) or restarts.rank(name) != 0:
            return []
        saved = figures.pop("saved", None)
        if saved is not None:
            self._event("checkpoint", worker=name, step=max(int(saved), 0))
        if "done" not in figures:
            return []
        report = self.pace.report(figures, restarts.generation, len(restarts.members), now)
        self.reports[name] = report
        self._publish({"type": "report", "worker": name, "report": report})
        return restarts.said(float(figures["done"]), now)

    def _on_agent_lost(self, client: Client, message: Message, now: float) -> list[Instruction]:
        name = str(message["worker"])
        self._event("exited", worker=name, code=-9)
        return self.membership.vanished(name, now)

    def _on_agent_goodbye(self, client: Client, message: Message, now: float) -> list[Instruction]:
        self.over.set()
        return []

    def _on_tool_resize(self, client: Client, message: Message, now: float) -> list[Instruction]:
        self._check_leads(client)
        slots = message.get("slots")
        places = None if slots is None else [int(slot) for slot in slots]
        out = self.membership.resize(int(message["workers"]), now, places)
        self._event("resize", target=self.membership.target)
        client.send({"type": "resized", "workers": self.membership.target})
        return out

    def _on_tool_status(self, client: Client, message: Message, now: float) -> list[Instruction]:
        client.send({"type": "status", **self._status()})
        return []

    def _on_tool_watch(self, client: Client, message: Message, now: float) -> list[Instruction]:
        self.watchers.add(client)
        client.send({"type": "watching"})
        return []

    def _on_tool_stop(self, client: Client, message: Message, now: float) -> list[Instruction]:
        self._check_leads(client)
        client.send({"type": "stopping"})
        if message.get("save"):
            self._event("stop")
            return self.membership.stop(now)
        return self.membership.finish(int(message.get("code", 143)), "stopped on request")

    # ------------------------------------------------------------------ instructions out

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Spawn(worker, slot):
                    self._event("spawn", worker=worker, **({} if slot is None else {"slot": slot}))
                    self._tell_agent({"type": "spawn", "worker": worker, "slot": slot})
                case Kill(worker):
                    self._tell_agent({"type": "kill", "worker": worker})
                case Fence(worker):
                    self._event("fenced", worker=worker)
                    self._tell(worker, {"type": "fenced"})
                case Turn(worker, epoch):
                    self._tell(worker, {"type": "turn", "epoch": epoch})
                case Stop(to):
                    for worker in to:
                        self._tell(worker, {"type": "stop"})
                case Announce(candidate, to):
                    self._save()  # the number must be on disk before any worker is told
                    message: Message = {"type": "candidate", "candidate": None}
                    if candidate is not None:
                        addresses = {n: self._elastic.workers[n].address for n in candidate.members}
                        message["candidate"] = {
                            "number": candidate.number,
                            "members": list(candidate.members),
                            "addresses": addresses,
                            "recovery": candidate.recovery,
                            "epoch": candidate.epoch,
                        }
                        self._event(
                            "candidate",
                            number=candidate.number,
                            members=list(candidate.members),
                            recovery=candidate.recovery,
                        )
                    for worker in to:
                        self._tell(worker, message)
                case Check(number, to):
                    there = {n: self._elastic.workers[n].address for n in to}
                    for worker in to:
                        self._tell(worker, {"type": "check", "number": number, "addresses": there})
                case Begin(number, members):
                    self._save()  # no number is ever used twice
                    self.job.begin_generation(number, list(members))
                    self._event("generation", number=number, members=list(members))
                case Save(number):
                    self.job.ask_to_save(number)
                    self._event("save", number=number)
                case Say(event, fields):
                    self._event(event, **fields)
                case Finish(code, reason):
                    self._event("finish", code=code, reason=reason)
                    self._tell_agent({"type": "finish", "code": code, "reason": reason})

    def _tell(self, worker: str, message: Message) -> None:
        if (client := self.workers.get(worker)) is not None:
            client.send(message)

    def _tell_agent(self, message: Message) -> None:
        if self.agent is not None:
            self.agent.send(message)

    def _publish(self, message: Message) -> None:
        for watcher in self.watchers:
            watcher.send(message)

    def _event(self, name: str, **fields: Any) -> None:
        record = {"time_s": round(time.time(), 6), "event": name, **fields}
        self.job.append_event(record)
        self._publish({"type": "event", **record})

    def _status(self) -> Message:
        m = self.membership
        return {
            "job": self.config["name"],
            "generation": m.generation,
            "members": m.members,
            "target": m.target,
            "minimum": m.minimum,
            "maximum": m.maximum,
            "confined": "" if isinstance(m, Restarts) else m.confined,
            "workers": {w.name: w.status.value for w in m.workers.values()},
            "slots": {w.name: w.slot for w in m.workers.values() if w.slot is not None},
            "epoch": m.epoch,
            "step": m.step,
            "over": m.result is not None,
            "pids": {n: p for n, p in self.pids.items() if n in m.workers},
            "reports": {n: r for n, r in self.reports.items() if n in m.workers},
        }

    def _save(self) -> None:
        m = self.membership
        saved = m.to_json() if isinstance(m, Restarts) else membership_json.to_json(m)
        text = json.dumps({"port": self.port, "membership": saved})
        if text == self._last_saved:
            return
        try:
            self.job.save_state(text)
            self._last_saved = text
        except OSError as error:
            # A full disk must not end the training: what is not saved is needed only if this process is
            # killed before there is room again. Every later change and every tick tries again.
            self._grumble(f"state.json cannot be written: {error}")


def main() -> None:
    """Run the coordinator of the job whose directory (and launch) is given."""
    coordinator = Coordinator(Path(sys.argv[1]))
    if len(sys.argv) < 3 or coordinator.config.get("launch") == sys.argv[2]:
        asyncio.run(coordinator.run())


if __name__ == "__main__":
    main()
