"""The job's master as a process: sockets, disk and clock around `membership`.

From top to bottom: its life, what it receives (`protocol` has the messages), how it carries out what
`membership` decides, what it sends, shows and saves, and its port.

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
import ssl
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from swell.train.agent import membership_json, protocol
from swell.train.agent.errors import BROKEN, FENCED, RESPAWN, Refused
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.keepalive import keep_alive
from swell.train.agent.lines import Pace
from swell.train.agent.membership import (
    STOPPED,
    Announce,
    Begin,
    Candidate,
    Check,
    Fence,
    Instruction,
    Membership,
    Save,
    Say,
    Stop,
    Turn,
)
from swell.train.agent.notes import Notes
from swell.train.agent.protocol import Finish, Kill, Spawn, Status
from swell.train.agent.replicas import Replicas
from swell.train.agent.restarts import ProgramGeneration, Restarts
from swell.train.agent.sealed import Seal, crosses_hosts
from swell.train.agent.stragglers import Stragglers
from swell.train.agent.wire import HANDSHAKE_S, MOST_STRANGERS, Channel, Message, WireError

TICK_S = 0.1
LAST_WORDS_S = 1.0
"""How long a member's exit waits for the end of the member's connection: a descendant may keep that open, or
the member has not connected to this coordinator yet."""


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
        self.door = Door(self.config.secret, self._receive, self._closed, encrypt=self.config.encrypt)
        self.pace = Pace()
        self.stragglers = Stragglers()
        self.notes = Notes()
        self.port = int(saved["port"]) if saved is not None else 0
        self.workers: dict[str, ClientConnection] = {}
        self.exits: dict[str, tuple[float, int, str]] = {}
        """Workers whose connections are not read to their end yet: how long to wait, exit code, note."""
        self.agent: ClientConnection | None = None
        self.watchers: set[ClientConnection] = set()
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
        self._wrong = ""
        """Which invariant of the membership was last found not to hold, or ''."""

    async def run(self) -> None:
        """Serve until the job is over and the launcher knows it."""
        self._watch_lifeline()
        if self.over.is_set():
            return
        self.job.lock("coordinator", 5.0)
        host = self.config.listens_at
        server = await self.door.open(host, self.port)
        self.port = server.sockets[0].getsockname()[1]
        self.save()
        self.job.write_address(host, self.port, os.getpid())
        self.event(protocol.CoordinatorBegan(os.getpid(), not self.fresh))
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
            self._carry_out(instructions)
            if instructions or not repeated:
                self.save()
        except Refused:
            raise
        except Exception as error:
            self.failure = error
            self.over.set()
            traceback.print_exception(error)
            self._log_story("an error of swell's own")

    def _log_story(self, why: str) -> None:
        """Write to the log how the membership came to be where it is."""
        story = "\n    ".join([f"coordinator: {why}; the last that happened:", *self.membership.story()])
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{story}\n")
            sys.stderr.flush()

    def _tick(self, now: float) -> list[Instruction]:
        for name in [name for name, (until_s, *_) in self.exits.items() if now > until_s]:
            self.settle_exit(name)
        m = self.membership
        if (wrong := m.wrong()) != self._wrong:  # the job goes on: its workers may well be right
            self._wrong = wrong
            if wrong:
                self._log_story(f"{wrong}, which cannot be")
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
        if gone or self.job.config().launch != self.config.launch:
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

    # ------------------------------------------------------------------ what others send

    def _receive(self, client: ClientConnection, raw: Message) -> None:
        try:
            message = protocol.heard(client.role, raw)
            repeated = isinstance(message, protocol.REPEATED)
            self._decide(lambda now: self._take_in(client, message, now), repeated=repeated)
        except Refused as error:
            if client.role in ("worker", "agent"):  # which are ours: people should see it
                kind = str(raw.get("type"))
                self.door.grumble(f"refused {kind!r:.60} of {client.name or client.role}: {error}")
            client.send(protocol.Error(str(error)))

    def _take_in(self, client: ClientConnection, message: protocol.Message, now: float) -> list[Instruction]:
        match client.role:
            case "worker":
                return self._from_worker(client.name, message, now)
            case "agent":
                return self._from_launcher(message, now)
            case "tool":
                return self._from_tool(client, message, now)
            case "notes":
                return self._from_notes(client, message)
        return self._hello(client, message, now)

    def _hello(self, client: ClientConnection, message: protocol.Message, now: float) -> list[Instruction]:
        match message:
            case protocol.WorkerHello():
                return self._worker_hello(client, message, now)
            case protocol.LauncherHello(alive):
                client.role, self.agent = "agent", client
                client.send(protocol.Greeting())
                out = self.membership.agent_connected(list(alive), now)
                # Those that ended while nobody listened.
                for gone in self.processes.keys() - set(alive) - self.membership.workers.keys():
                    self.event(protocol.Exited(gone, 0))
                return out
            case protocol.ToolHello(fencing):
                client.role, client.fencing = "tool", fencing
                self.fencing = max(self.fencing, fencing or 0)
                client.send(self.status(protocol.WelcomeTool))
            case protocol.NotesHello(group):
                client.role, client.name = "notes", group
                self.notes.join(group, client)
                client.send(protocol.Greeting())
        return []

    def _worker_hello(
        self, client: ClientConnection, its: protocol.WorkerHello, now: float
    ) -> list[Instruction]:
        m = self.elastic
        client.role, client.name = "worker", its.worker
        self.workers[its.worker], self.pids[its.worker] = client, its.pid
        out = m.hello(its.worker, its.address, its.status, its.generation, list(its.members), now)
        if its.epoch is not None and its.status is Status.MEMBER:
            out += m.at_epoch(its.epoch, now)
        at = m.generation
        client.send(protocol.Welcome(at.live, at.epoch, at.number))
        if its.status is Status.READY:
            out += m.ready(its.worker, its.epoch or 0, now)
        if its.broken:
            out += m.broken(its.worker, its.broken, its.operation, now)
        return out

    def _from_worker(self, name: str, message: protocol.Message, now: float) -> list[Instruction]:
        m = self.elastic
        match message:
            case protocol.Beat(step, report):
                m.beat(name, step, now)
                if report:
                    self.reports[name] = report
                    if report.get("rank", 0) == 0:
                        self.last_report = report
                    self.stragglers.heard(name, report)
                    self.publish(protocol.Reported(name, report))
            case protocol.Ready(epoch):
                self.event(protocol.Prepared(name))
                return m.ready(name, epoch, now)
            case protocol.AtEpoch(epoch):
                return m.at_epoch(epoch, now)
            case protocol.Switched(number, members, epoch, step):
                if number > m.generation.number:
                    self.event(protocol.Began(members, number, step))
                out = m.switched(number, list(members), now, step)
                return out + m.at_epoch(epoch, now)
            case protocol.Broken(number, operation, lost, certain):
                return m.broken(name, number, operation, now, lost, certain)
            case protocol.Suspect(other):
                return m.suspect(name, other, now)
            case protocol.Checked(number, unreachable):
                return m.checked(name, number, list(unreachable), now)
            case protocol.Waiting(step, others):
                return m.waiting(step, list(others), now)
            case protocol.Left(number):
                return m.left(name, number, now)
            case protocol.Done(operation):
                return m.done(name, operation, now)
            case protocol.Stopped():
                return m.finish(0, STOPPED)
            case protocol.WorkerEvent("confined", about):
                limit = protocol.read(protocol.Confined, about)
                self._log({**about, "worker": name, "event": "confined"})
                return m.confine(limit.workers, limit.reason, now)
            case protocol.WorkerEvent(event, about):
                self._log({**about, "worker": name, "event": event})
        return []

    def _from_launcher(self, message: protocol.Message, now: float) -> list[Instruction]:
        match message:
            case protocol.Exited(name, code, note):
                return self._exited(name, code, note, now)
            case protocol.Said(name, figures):
                return self._said(name, figures, now)
            case protocol.Lost(name):
                self.event(protocol.Exited(name, -9))
                return self.membership.vanished(name, now)
            case protocol.Unstartable(name, node, cause, reason):
                self.event(message)
                self.event(protocol.Exited(name, 0))
                return self.membership.unstartable(name, f"{node}: {reason}", cause, now)
            case protocol.LauncherEnds(code, reason):
                return self.membership.finish(code, reason)
            case protocol.Goodbye():
                self.over.set()
        return []

    def _exited(self, name: str, code: int, note: str, now: float) -> list[Instruction]:
        worker = self.membership.workers.get(name)
        leaving = worker is not None and worker.status is Status.LEAVING
        ended_by_us = code < 0 and (leaving or self.membership.ending.over or name in self.killed)
        ended_by_us = ended_by_us or (leaving and isinstance(self.membership, Restarts))
        self.killed.discard(name)
        self.event(protocol.Exited(name, 0 if ended_by_us else code))
        trained = worker is not None and worker.status in (Status.MEMBER, Status.DONE)
        by_itself = code >= 0 and code not in (RESPAWN, FENCED)
        unmet = worker is not None and worker.address is None and code == 0
        if trained and by_itself and (name in self.workers or unmet):
            # Its last report may be on the way; so may its connection, if another coordinator had it.
            self.exits[name] = (now + LAST_WORDS_S, code, note)
            return []
        return self.membership.exited(name, code, now, note)

    def _said(self, name: str, figures: protocol.Figures, now: float) -> list[Instruction]:
        """Take in what a program printed about itself; only that of rank 0 counts."""
        restarts = self.membership
        if not isinstance(restarts, Restarts) or restarts.rank(name) != 0:
            return []
        if figures.saved is not None:
            self.event(protocol.Checkpoint(max(figures.saved, 0), name))
        new = {key: value for key, value in structs.asdict(figures).items() if value is not None}
        new.pop("saved", None)
        metrics = self.figures.get("metrics", {}) | new.pop("metrics")
        self.figures |= new | ({"metrics": metrics} if metrics else {})
        present = restarts.generation
        sum_up = {"done": restarts.done, **self.figures}
        report = self.pace.report(sum_up, present.number, len(present.members), now)
        self.reports[name] = self.last_report = report
        if "done" not in self.figures:
            return []  # metrics go with the first progress, or with the end of a program that reports none
        self.publish(protocol.Reported(name, report))
        return restarts.said(figures.done, now) if figures.done is not None else []

    def _from_tool(
        self, client: ClientConnection, message: protocol.Message, now: float
    ) -> list[Instruction]:
        match message:
            case protocol.Resize(workers, slots):
                self._check_leads(client)
                out = self.membership.resize(workers, now, slots)
                self.event(protocol.NewTarget(self.membership.scale.target))
                client.send(protocol.Resized(self.membership.scale.target))
                return out
            case protocol.GetStatus():
                client.send(self.status(protocol.StatusAnswer))
            case protocol.GetStory():
                client.send(protocol.StoryLines(self.membership.story()))
            case protocol.Watch():  # events after this snapshot are sent, from the next number on
                self.watchers.add(client)
                client.send(self.status(protocol.Watching))
            case protocol.StopJob(code, save):
                self._check_leads(client)
                client.send(protocol.Stopping())
                if not save:
                    return self.membership.finish(code, "stopped on request")
                self.event(protocol.StopAsked())
                return self.membership.stop(now)
        return []

    def _check_leads(self, client: ClientConnection) -> None:
        """Refuse the orders of a control plane that was frozen while another one took over."""
        if client.fencing is not None and client.fencing < self.fencing:
            raise Refused("another control plane leads by now")

    def _from_notes(self, client: ClientConnection, message: protocol.Message) -> list[Instruction]:
        match message:
            case protocol.WriteNotes(values):
                self.notes.write(client.name, values)
                client.send(protocol.Noted())
            case protocol.ReadNotes(keys):
                client.send(protocol.NotesFound(self.notes.read(client.name, keys)))
        return []

    def _closed(self, client: ClientConnection) -> None:
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

    # ------------------------------------------------------------------ what was decided

    def _carry_out(self, instructions: list[Instruction]) -> None:
        """Do what these instructions say, in their order."""
        for instruction in instructions:
            match instruction:
                case Spawn():
                    self.event(instruction)
                    self.tell_agent(instruction)
                case Kill(worker):
                    self.killed.add(worker)
                    self.tell_agent(instruction)
                case Fence(worker):
                    self.event(protocol.GaveUp(worker))
                    self.tell(worker, protocol.Fenced())
                case Turn(worker, epoch):
                    self.tell(worker, protocol.GoToEpoch(epoch))
                case Stop(to):
                    for worker in to:
                        self.tell(worker, protocol.SaveAndLeave())
                case Announce(candidate, to):
                    self._announce(candidate, to)
                case Check(number, to):
                    question = protocol.TryReach(number, self._addresses(to))
                    for worker in to:
                        self.tell(worker, question)
                case Begin(number, members):
                    self.save()  # no number is ever used twice
                    self.job.begin_generation(number, list(members))
                    self.event(protocol.Began(members, number))
                case Save(number):
                    self.job.ask_to_save(number)
                    self.event(protocol.Saving(number))
                case Say(event):
                    self.event(event)
                case Finish(code, reason):
                    if code != 0:
                        self._log_story(f"the job ends with exit code {code}: {reason}")
                    self.event(Finish(code, reason))
                    self.tell_agent(Finish(code, reason, self.last_report))

    def _announce(self, candidate: Candidate | None, to: tuple[str, ...]) -> None:
        self.save()  # the number must be on disk before any worker is told
        offer = None
        if candidate is not None:
            number, members, recovery = candidate.number, candidate.members, candidate.recovery
            offer = protocol.Offer(number, members, self._addresses(members), candidate.epoch, recovery)
            self.event(protocol.Proposed(number, members, recovery))
        for worker in to:
            self.tell(worker, protocol.NextGeneration(offer))

    def _addresses(self, names: tuple[str, ...]) -> dict[str, tuple[str, int] | None]:
        """Where these workers listen, as far as that is known."""
        workers = self.elastic.workers  # of a job of replicas, this makes the whole list
        return {name: workers[name].address for name in names}

    # ------------------------------------------------------------------ what is sent, shown and saved

    def tell(self, worker: str, message: Struct) -> None:
        """Send a message to a worker, if it is connected."""
        if (client := self.workers.get(worker)) is not None:
            client.send(message)

    def tell_agent(self, message: Struct) -> None:
        """Send a message to the launcher, if it is connected."""
        if self.agent is not None:
            self.agent.send(message)

    def publish(self, message: Struct | Message) -> None:
        """Send a message to everybody who watches the job."""
        for watcher in self.watchers:
            watcher.send(message)

    def event(self, event: Struct) -> None:
        """Add an event to the job's history, and show it to those who watch."""
        self._log(protocol.record(event))

    def _log(self, about: dict[str, Any]) -> None:
        if about["event"] == "spawn":
            self.processes[str(about["worker"])] = about.get("slot")
        elif about["event"] == "exited":
            self.processes.pop(str(about["worker"]), None)
        line = {"time_s": 0.0, **about}
        line["time_s"] = round(time.time(), 6)
        self.events += 1
        self.job.append_event(line)
        self.publish(line | {"type": "event", "number": self.events})

    def status(self, kind: type[protocol.JobStatus]) -> protocol.JobStatus:
        """What a tool is told about the job."""
        m = self.membership
        generation, scale, workers = m.generation, m.scale, m.workers  # a job of replicas makes each of them
        return kind(
            job=self.config.name,
            generation=generation.number,
            members=tuple(generation.members),
            target=scale.target,
            minimum=scale.minimum,
            maximum=scale.maximum,
            confined=scale.confined,
            workers={w.name: w.status.value for w in workers.values()},
            slots={w.name: w.slot for w in workers.values() if w.slot is not None},
            processes=dict(self.processes),
            event=self.events,
            epoch=0 if isinstance(generation, ProgramGeneration) else generation.epoch,
            step=m.step,
            over=m.ending.over,
            result=None if (end := m.ending.result) is None else protocol.Result(end.code, end.reason),
            pids={n: p for n, p in self.pids.items() if n in workers},
            reports={n: r for n, r in self.reports.items() if n in workers},
            last_report=self.last_report,
        )

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


# ---------------------------------------------------------------------- the port


class ClientConnection:
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
            frame = self.channel.encode(protocol.Error(str(error)))
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
    """Accepts connections, and passes on the messages of those that have proved to know the secret.

    A stranger costs little and learns nothing: there are `MOST_STRANGERS` connections at a time that have
    proved nothing yet, each for `HANDSHAKE_S` at most, and what they send is bounded (`wire`).
    """

    def __init__(
        self,
        secret: str,
        receive: Callable[[ClientConnection, Message], None],
        closed: Callable[[ClientConnection], None],
        *,
        encrypt: bool = True,
    ) -> None:
        self._secret = secret
        self._encrypt = encrypt
        self._receive = receive
        self._closed = closed
        self.strangers: set[ClientConnection] = set()
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
        client = ClientConnection(self._secret, writer, encrypt=self._encrypt)
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

    def _give_up(self, client: ClientConnection) -> None:
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


def main() -> None:
    """Run the coordinator of the job whose directory (and launch) is given."""
    coordinator = Coordinator(Path(sys.argv[1]))
    if len(sys.argv) < 3 or coordinator.config.launch == sys.argv[2]:
        asyncio.run(coordinator.run())
        if coordinator.failure is not None:
            raise SystemExit(BROKEN)


if __name__ == "__main__":
    main()
