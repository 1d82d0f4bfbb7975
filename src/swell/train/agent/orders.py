"""Carry out what `membership` decided: tell workers and the launcher, write events, files and state."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    Stop,
    Turn,
)
from swell.train.agent.wire import Message

if TYPE_CHECKING:
    from swell.train.agent.coordinator import Coordinator


def carry_out(c: Coordinator, instructions: list[Instruction]) -> None:
    """Do what these instructions say, in their order."""
    for instruction in instructions:
        match instruction:
            case Spawn(worker, slot):
                c.event("spawn", worker=worker, **({} if slot is None else {"slot": slot}))
                c.tell_agent({"type": "spawn", "worker": worker, "slot": slot})
            case Kill(worker):
                c.killed.add(worker)
                c.tell_agent({"type": "kill", "worker": worker})
            case Fence(worker):
                c.event("fenced", worker=worker)
                c.tell(worker, {"type": "fenced"})
            case Turn(worker, epoch):
                c.tell(worker, {"type": "turn", "epoch": epoch})
            case Stop(to):
                for worker in to:
                    c.tell(worker, {"type": "stop"})
            case Announce(candidate, to):
                c.save()  # the number must be on disk before any worker is told
                message: Message = {"type": "candidate", "candidate": None}
                if candidate is not None:
                    workers = c.elastic.workers  # of a job of replicas, this makes the whole list
                    addresses = {name: workers[name].address for name in candidate.members}
                    message["candidate"] = {
                        "number": candidate.number,
                        "members": list(candidate.members),
                        "addresses": addresses,
                        "recovery": candidate.recovery,
                        "epoch": candidate.epoch,
                    }
                    c.event(
                        "candidate",
                        number=candidate.number,
                        members=list(candidate.members),
                        recovery=candidate.recovery,
                    )
                for worker in to:
                    c.tell(worker, message)
            case Check(number, to):
                workers = c.elastic.workers
                there = {name: workers[name].address for name in to}
                for worker in to:
                    c.tell(worker, {"type": "check", "number": number, "addresses": there})
            case Begin(number, members):
                c.save()  # no number is ever used twice
                c.job.begin_generation(number, list(members))
                c.event("generation", number=number, members=list(members))
            case Save(number):
                c.job.ask_to_save(number)
                c.event("save", number=number)
            case Say(event, fields):
                c.event(event, **fields)
            case Finish(code, reason):
                c.event("finish", code=code, reason=reason)
                last = {"report": c.last_report} if c.last_report else {}
                c.tell_agent({"type": "finish", "code": code, "reason": reason, **last})
