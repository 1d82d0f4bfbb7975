"""What workers, the launcher and tools say to the coordinator, and what follows from it.

Each function hears one kind of message from one role; `HANDLERS` finds it. A role is what a connection said
in its hello: "worker", "agent" (the launcher), "tool" (commands, control planes) or "notes" (a worker that
builds one of torch's process groups); before that it is "new".

Each function reads all fields that it needs (`fields`) before it changes anything: a message that is
malformed is refused whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swell.train.agent import fields
from swell.train.agent.ending import STOPPED
from swell.train.agent.errors import FENCED, RESPAWN, Refused
from swell.train.agent.generations import Instruction, Status
from swell.train.agent.restarts import Restarts
from swell.train.agent.wire import Message

if TYPE_CHECKING:
    from swell.train.agent.coordinator import Coordinator
    from swell.train.agent.door import Client

Handler = Callable[["Coordinator", "Client", Message, float], list[Instruction]]
HANDLERS: dict[tuple[str, str], Handler] = {}
"""By role and kind of message."""
REPEATED = frozenset({"beat", "epoch", "ready", "switched", "status", "watch", "note", "read"})
"""Messages that change nothing which a worker's next greeting or heartbeat would not say again."""
LAST_WORDS_S = 1.0
"""How long a member's exit waits for the end of the member's connection: a descendant may keep that open, or
the member has not connected to this coordinator yet."""


def _hears(role: str, kind: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS[role, kind] = handler
        return handler

    return register


@_hears("new", "hello")
def _new_hello(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    match role := fields.text(message, "role"):
        case "notes":
            group = fields.text(message, "group")
            client.role, client.name = role, group
            c.notes.join(group, client)
            client.send({"type": "welcome"})
            return []
        case "agent":
            alive = fields.workers(message, "alive", [])
            client.role, c.agent = role, client
            client.send({"type": "welcome"})
            out = c.membership.agent_connected(alive, now)
            # Those that ended while nobody listened.
            for gone in c.processes.keys() - set(alive) - c.membership.workers.keys():
                c.event("exited", worker=gone, code=0)
            return out
        case "worker":
            return _worker_hello(c, client, message, now)
        case "tool":
            fencing = None if message.get("fencing") is None else fields.number(message, "fencing")
            client.role, client.fencing = role, fencing
            c.fencing = max(c.fencing, fencing or 0)
            client.send({"type": "welcome", **c.status()})
            return []
    raise Refused(f"role: got {role!r:.60}, must be worker, agent, tool or notes")


def _worker_hello(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    m, name, pid = c.elastic, fields.worker(message), fields.number(message, "pid")
    address = fields.address(message.get("address"))
    if (status := fields.text(message, "status")) not in set(Status):
        raise Refused(f"status: got {status!r:.60}, must be one of {', '.join(Status)}")
    generation, epoch = fields.number(message, "generation"), fields.number(message, "epoch", 0)
    members = fields.workers(message, "members", least=1 if generation else 0)
    broken, operation = fields.number(message, "broken", 0), fields.number(message, "operation", 0)
    client.role, client.name = "worker", name
    c.workers[name], c.pids[name] = client, pid
    out = m.hello(name, address, status, generation, members, now)
    if "epoch" in message and status == Status.MEMBER:
        out += m.at_epoch(epoch, now)
    at = m.generation
    client.send({"type": "welcome", "live": at.live, "epoch": at.epoch, "generation": at.number})
    if status == Status.READY:
        out += m.ready(name, epoch, now)
    if broken:
        out += m.broken(name, broken, operation, now)
    return out


def _check_leads(c: Coordinator, client: Client) -> None:
    """Refuse what a control plane says that leads no longer: it was frozen while another took over."""
    if client.fencing is not None and client.fencing < c.fencing:
        raise Refused("another control plane leads by now")


@_hears("worker", "ready")
def _worker_ready(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    epoch = fields.number(message, "epoch")
    c.event("ready", worker=client.name)
    return c.elastic.ready(client.name, epoch, now)


@_hears("worker", "beat")
def _worker_beat(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    step, report = fields.number(message, "step", 0), fields.mapping(message, "report", {})
    c.elastic.beat(client.name, step, now)
    if report:
        c.reports[client.name] = report
        if report.get("rank", 0) == 0:
            c.last_report = report
        c.stragglers.heard(client.name, report)
        c.publish({"type": "report", "worker": client.name, "report": report})
    return []


@_hears("worker", "epoch")
def _worker_epoch(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.at_epoch(fields.number(message, "epoch"), now)


@_hears("worker", "switched")
def _worker_switched(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    number, members = fields.number(message, "generation"), fields.workers(message, "members", least=1)
    step, epoch = fields.number(message, "step", 0), fields.number(message, "epoch")
    if number > c.elastic.generation.number:
        c.event("generation", number=number, members=members, step=step)
    out = c.elastic.switched(number, members, now, step)
    return out + c.elastic.at_epoch(epoch, now)


@_hears("worker", "broken")
def _worker_broken(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    operation, number = fields.number(message, "operation"), fields.number(message, "generation")
    lost = fields.worker(message, "lost") if message.get("lost") else ""
    certain = bool(message.get("certain"))
    return c.elastic.broken(client.name, number, operation, now, lost, certain)


@_hears("worker", "suspect")
def _worker_suspect(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.suspect(client.name, fields.worker(message), now)


@_hears("worker", "checked")
def _worker_checked(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    number, unreachable = fields.number(message, "number"), fields.workers(message, "unreachable")
    return c.elastic.checked(client.name, number, unreachable, now)


@_hears("worker", "waiting")
def _worker_waiting(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    others = fields.workers(message, "workers")
    return c.elastic.waiting(fields.number(message, "step"), others, now)


@_hears("worker", "left")
def _worker_left(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.left(client.name, fields.number(message, "generation"), now)


@_hears("worker", "stopped")
def _worker_stopped(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.finish(0, STOPPED)


@_hears("worker", "done")
def _worker_done(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.done(client.name, fields.number(message, "operation"), now)


@_hears("worker", "failed")
def _worker_failed(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    code, error = fields.exit_code(message), fields.text(message, "error")
    if not c.elastic.ending.over:
        c.event("failed", worker=client.name, code=code)
        if c.agent is not None:
            c.agent.send({"type": "failed", "worker": client.name, "error": error})
    return c.elastic.finish(code, f"the script failed in worker {client.name}")


@_hears("worker", "event")
def _worker_event(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    name, about = fields.text(message, "name"), fields.mapping(message, "fields", {})
    confined = None
    if name == "confined":
        confined = fields.number(about, "workers", least=1), fields.text(about, "reason")
    c.event(name, **{**about, "worker": client.name})
    return [] if confined is None else c.elastic.confine(*confined, now)


@_hears("notes", "note")
def _notes_note(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    c.notes.write(client.name, fields.mapping(message, "values"))
    client.send({"type": "noted"})
    return []


@_hears("notes", "read")
def _notes_read(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    keys = [str(key) for key in fields.array(message, "keys")]
    client.send({"type": "notes", "values": c.notes.read(client.name, keys)})
    return []


@_hears("agent", "exited")
def _agent_exited(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    name, code, note = fields.worker(message), fields.exit_code(message), fields.text(message, "note", "")
    worker = c.membership.workers.get(name)
    leaving = worker is not None and worker.status is Status.LEAVING
    ended_by_us = code < 0 and (leaving or c.membership.ending.over or name in c.killed)
    ended_by_us = ended_by_us or (leaving and isinstance(c.membership, Restarts))
    c.killed.discard(name)
    c.event("exited", worker=name, code=0 if ended_by_us else code)
    trained = worker is not None and worker.status in (Status.MEMBER, Status.DONE)
    by_itself = code >= 0 and code not in (RESPAWN, FENCED)
    unmet = worker is not None and worker.address is None and code == 0
    if trained and by_itself and (name in c.workers or unmet):
        # Its last report may still be on the way; so may be its connection, if another coordinator had it.
        c.exits[name] = (now + LAST_WORDS_S, code, note)
        return []
    return c.membership.exited(name, code, now, note)


@_hears("agent", "said")
def _agent_said(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    """Take in what a program said in its output; only what rank 0 says counts."""
    name, figures, restarts = fields.worker(message), fields.mapping(message, "figures"), c.membership
    saved = None if figures.get("saved") is None else fields.number(figures, "saved", least=-fields.MOST)
    done = None if "done" not in figures else fields.amount(figures, "done")
    metrics = fields.mapping(figures, "metrics", {})
    if not isinstance(restarts, Restarts) or restarts.rank(name) != 0:
        return []
    figures = {key: value for key, value in figures.items() if key not in ("saved", "metrics")}
    if saved is not None:
        c.event("checkpoint", worker=name, step=max(saved, 0))
    metrics = c.figures.get("metrics", {}) | metrics
    c.figures |= figures | ({"metrics": metrics} if metrics else {})
    present = restarts.generation
    report = c.pace.report({"done": restarts.done, **c.figures}, present.number, len(present.members), now)
    c.reports[name] = c.last_report = report
    if "done" not in c.figures:
        return []  # metrics go with the first progress, or with the end of a program that reports none
    c.publish({"type": "report", "worker": name, "report": report})
    return restarts.said(done, now) if done is not None else []


@_hears("agent", "lost")
def _agent_lost(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    name = fields.worker(message)
    c.event("exited", worker=name, code=-9)
    return c.membership.vanished(name, now)


@_hears("agent", "unstartable")
def _agent_unstartable(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    name = fields.worker(message)
    node, cause, reason = (fields.text(message, key) for key in ("node", "cause", "reason"))
    c.event("unstartable", worker=name, node=node, cause=cause, reason=reason)
    c.event("exited", worker=name, code=0)
    return c.membership.unstartable(name, f"{node}: {reason}", cause, now)


@_hears("agent", "ending")
def _agent_ending(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    """The launcher was told to end the job: no worker is started any more."""
    return c.membership.finish(fields.exit_code(message), fields.text(message, "reason"))


@_hears("agent", "goodbye")
def _agent_goodbye(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    c.over.set()
    return []


@_hears("tool", "resize")
def _tool_resize(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    _check_leads(c, client)
    places = None
    if message.get("slots") is not None:
        places = [fields.number({"slots": slot}, "slots") for slot in fields.array(message, "slots")]
    out = c.membership.resize(fields.number(message, "workers"), now, places)
    c.event("resize", target=c.membership.scale.target)
    client.send({"type": "resized", "workers": c.membership.scale.target})
    return out


@_hears("tool", "status")
def _tool_status(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    client.send({"type": "status", **c.status()})
    return []


@_hears("tool", "watch")
def _tool_watch(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    """Answer with the job's status; what happens after that is sent as events, from the next number on."""
    c.watchers.add(client)
    client.send({"type": "watching", **c.status()})
    return []


@_hears("tool", "stop")
def _tool_stop(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    _check_leads(c, client)
    code = fields.exit_code(message, default=143)
    client.send({"type": "stopping"})
    if message.get("save"):
        c.event("stop")
        return c.membership.stop(now)
    return c.membership.finish(code, "stopped on request")
