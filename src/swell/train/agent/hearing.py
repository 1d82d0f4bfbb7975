"""What workers, the launcher and tools say to the coordinator, and what follows from it.

Each function hears one kind of message from one role; `HANDLERS` finds it. A role is what a connection said
in its hello: "worker", "agent" (the launcher), "tool" (commands, control planes) or "notes" (a worker that
builds one of torch's process groups); before that it is "new".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from swell.train.agent.ending import STOPPED
from swell.train.agent.generations import Instruction, Status
from swell.train.agent.restarts import Restarts
from swell.train.agent.wire import Message

if TYPE_CHECKING:
    from swell.train.agent.coordinator import Coordinator
    from swell.train.agent.door import Client

Handler = Callable[["Coordinator", "Client", Message, float], list[Instruction]]
HANDLERS: dict[tuple[str, str], Handler] = {}
"""By role and kind of message."""
LAST_WORDS_S = 1.0
"""How long a member's exit waits for the member, if it has not connected to this coordinator yet."""


def _hears(role: str, kind: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS[role, kind] = handler
        return handler

    return register


@_hears("new", "hello")
def _new_hello(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    role = str(message["role"])
    if role not in ("worker", "agent", "tool", "notes"):
        raise ValueError(f"role: got {role!r}, must be worker, agent, tool or notes")
    if role == "notes":
        client.role, client.name = role, str(message["group"])
        c.notes.join(client.name, client)
        client.send({"type": "welcome"})
        return []
    client.role = role
    if role == "agent":
        c.agent = client
        client.send({"type": "welcome"})
        alive = {str(n) for n in message.get("alive", [])}
        out = c.membership.agent_connected(sorted(alive), now)
        for gone in c.processes.keys() - alive - c.membership.workers.keys():  # ended while nobody listened
            c.event("exited", worker=gone, code=0)
        return out
    if role == "worker":
        m = c.elastic
        client.name = str(message["worker"])
        c.workers[client.name] = client
        c.pids[client.name] = int(message["pid"])
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
        at = m.generation
        client.send({"type": "welcome", "live": at.live, "epoch": at.epoch, "generation": at.number})
        if message["status"] == "ready":
            out += m.ready(client.name, int(message.get("epoch", 0)), now)
        if message.get("broken"):
            out += m.broken(client.name, int(message["broken"]), int(message["operation"]), now)
        return out
    if message.get("fencing") is not None:
        client.fencing = int(message["fencing"])
        c.fencing = max(c.fencing, client.fencing)
    client.send({"type": "welcome", **c.status()})
    return []


def _check_leads(c: Coordinator, client: Client) -> None:
    """Refuse what a control plane says that leads no longer: it was frozen while another took over."""
    if client.fencing is not None and client.fencing < c.fencing:
        raise ValueError("another control plane leads by now")


@_hears("worker", "ready")
def _worker_ready(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    c.event("ready", worker=client.name)
    return c.elastic.ready(client.name, int(message["epoch"]), now)


@_hears("worker", "beat")
def _worker_beat(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    c.elastic.beat(client.name, int(message.get("step", 0)), now)
    report = message.get("report")
    if report:
        c.reports[client.name] = report
        c.stragglers.heard(client.name, report)
        c.publish({"type": "report", "worker": client.name, "report": report})
    return []


@_hears("worker", "epoch")
def _worker_epoch(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.at_epoch(int(message["epoch"]), now)


@_hears("worker", "switched")
def _worker_switched(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    number = int(message["generation"])
    if number > c.elastic.generation.number:
        c.event("generation", number=number, members=message["members"], step=message.get("step"))
    step = int(message.get("step", 0))
    out = c.elastic.switched(number, [str(n) for n in message["members"]], now, step)
    return out + c.elastic.at_epoch(int(message["epoch"]), now)


@_hears("worker", "broken")
def _worker_broken(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    operation, lost = int(message["operation"]), str(message.get("lost", ""))
    number, certain = int(message["generation"]), bool(message.get("certain"))
    return c.elastic.broken(client.name, number, operation, now, lost, certain)


@_hears("worker", "suspect")
def _worker_suspect(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.suspect(client.name, str(message["worker"]), now)


@_hears("worker", "checked")
def _worker_checked(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    unreachable = [str(name) for name in message["unreachable"]]
    return c.elastic.checked(client.name, int(message["number"]), unreachable, now)


@_hears("worker", "waiting")
def _worker_waiting(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    others = [str(name) for name in message["workers"]]
    return c.elastic.waiting(int(message["step"]), others, now)


@_hears("worker", "left")
def _worker_left(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.left(client.name, int(message["generation"]), now)


@_hears("worker", "stopped")
def _worker_stopped(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.finish(0, STOPPED)


@_hears("worker", "done")
def _worker_done(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    return c.elastic.done(client.name, int(message["operation"]), now)


@_hears("worker", "failed")
def _worker_failed(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    if not c.elastic.ending.over:
        c.event("failed", worker=client.name, code=message["code"])
        if c.agent is not None:
            c.agent.send({"type": "failed", "worker": client.name, "error": str(message["error"])})
    return c.elastic.finish(int(message["code"]), f"the script failed in worker {client.name}")


@_hears("worker", "event")
def _worker_event(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    fields = dict(message.get("fields", {}))
    c.event(str(message["name"]), worker=client.name, **fields)
    if message["name"] == "confined":
        return c.elastic.confine(int(fields["workers"]), str(fields["reason"]), now)
    return []


@_hears("notes", "note")
def _notes_note(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    c.notes.write(client.name, message["values"])
    client.send({"type": "noted"})
    return []


@_hears("notes", "read")
def _notes_read(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    client.send({"type": "notes", "values": c.notes.read(client.name, message["keys"])})
    return []


@_hears("agent", "exited")
def _agent_exited(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    name, code = str(message["worker"]), int(message["code"])
    worker = c.membership.workers.get(name)
    leaving = worker is not None and worker.status is Status.LEAVING
    ended_by_us = code < 0 and (leaving or c.membership.ending.over)
    ended_by_us = ended_by_us or (leaving and isinstance(c.membership, Restarts))
    c.event("exited", worker=name, code=0 if ended_by_us else code)
    member = worker if worker is not None and worker.status is Status.MEMBER else None
    if code == 0 and member is not None and (name in c.workers or member.address is None):
        # Its last words may still be on the way; so may be its connection, if another coordinator had it.
        c.exits[name] = message
        if name not in c.workers:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, c.settle_exit, name)
        return []
    return c.membership.exited(name, code, now, str(message.get("note", "")))


@_hears("agent", "said")
def _agent_said(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    """Take in what a program said in its output; only what rank 0 says counts."""
    name, figures, restarts = str(message["worker"]), dict(message["figures"]), c.membership
    if not isinstance(restarts, Restarts) or restarts.rank(name) != 0:
        return []
    saved = figures.pop("saved", None)
    if saved is not None:
        c.event("checkpoint", worker=name, step=max(int(saved), 0))
    if "done" not in figures:
        return []
    present = restarts.generation
    report = c.pace.report(figures, present.number, len(present.members), now)
    c.reports[name] = report
    c.publish({"type": "report", "worker": name, "report": report})
    return restarts.said(float(figures["done"]), now)


@_hears("agent", "lost")
def _agent_lost(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    name = str(message["worker"])
    c.event("exited", worker=name, code=-9)
    return c.membership.vanished(name, now)


@_hears("agent", "ending")
def _agent_ending(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    """The launcher was told to end the job: no worker is started any more."""
    return c.membership.finish(int(message["code"]), str(message["reason"]))


@_hears("agent", "goodbye")
def _agent_goodbye(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    c.over.set()
    return []


@_hears("tool", "resize")
def _tool_resize(c: Coordinator, client: Client, message: Message, now: float) -> list[Instruction]:
    _check_leads(c, client)
    slots = message.get("slots")
    places = None if slots is None else [int(slot) for slot in slots]
    out = c.membership.resize(int(message["workers"]), now, places)
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
    client.send({"type": "stopping"})
    if message.get("save"):
        c.event("stop")
        return c.membership.stop(now)
    return c.membership.finish(int(message.get("code", 143)), "stopped on request")
