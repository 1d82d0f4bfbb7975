"""The event log: everything that happens, in one form for live clusters and simulations alike.

An event is a moment, a kind, the job or node it concerns, and a few plain values. It is written as one JSON
object per line; readers ignore unknown keys, so that later versions may add some.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from swell.domain.errors import InputError

VERSION = 1
"""Version of the line format, written into each line as 'v'."""


class EventKind(StrEnum):
    """Everything that can happen to a job or a node."""

    SUBMITTED = "submitted"
    """A job was submitted; data: model, batch_size, gpus, work, deadline_s."""
    ADMITTED = "admitted"
    """The policy admitted the job; data: finish_s if it promised one."""
    REJECTED = "rejected"
    """The policy refused the job; data: reason, earliest_deadline_s if known."""
    ALLOCATED = "allocated"
    """A waiting job got its GPUs; data: gpus (their numbers), pause_s (what a start is expected to take), and
    gpu_type on a cluster with several types."""
    RESIZED = "resized"
    """A running job went on with other GPUs; data: gpus, before, pause_s, reason if it was not the policy's
    choice, gpu_type on a cluster with several types."""
    PREEMPTED = "preempted"
    """A running job lost all its GPUs; data: before, reason if not the policy's choice."""
    PROGRESS = "progress"
    """How far a job is; data: done, of, workers (how many), and the job's own figures (epoch, loss, lr,
    batch_size, metrics, noise_scale ...)."""
    WORKER_LOST = "worker_lost"
    """A worker of a running job died or was given up; data: worker, reason."""
    NOTICED = "noticed"
    """A running job is held up (by cut links between workers, for example), or no longer is; data: text."""
    CHECKPOINT_SAVED = "checkpoint_saved"
    """A job saved its state; data: step."""
    FINISHED = "finished"
    """A job's script ended with exit code 0; data: jct_s, met (whether in time; null without a deadline)."""
    FAILED = "failed"
    """A job's script failed, or all its workers died too often; data: reason."""
    CANCELLED = "cancelled"
    """A person or a time limit ended a job; data: by (who, or a text that begins with TIME_LIMIT)."""
    NODE_JOINED = "node_joined"
    """A node came into service, or came back; data: gpus, gpu_type, per_gpu (how many of its slots share a
    GPU), reason if it was rented."""
    NODE_LOST = "node_lost"
    """A node went out of service; data: gpus, reason if it was drained, let go or slow."""
    NODE_SLOW = "node_slow"
    """Workers on a node were slow again after they were replaced; data: gpus, times (how many times slower
    than others), until_s (how long the node is avoided, while other nodes have room)."""
    SCALED = "scaled"
    """The autoscaler wants another number of nodes; data: nodes, before (how many there are), reason."""
    POLICY_REPLACED = "policy_replaced"
    """A policy of another package failed, and the default policy decides in its place; data: policy, by (the
    policy that decides now), reason."""
    RESERVED = "reserved"
    """A reservation was made or changed; data: reservation (its name), its fields, by."""
    UNRESERVED = "unreserved"
    """A reservation was removed; data: reservation, by."""
    HELD = "held"
    """A reservation holds other GPUs from now on; data: reservation, gpus (their numbers), before."""
    YIELDED = "yielded"
    """Training has left the GPUs that a reservation holds; data: reservation, gpus, after_s (since held)."""


TIME_LIMIT = "its time limit"
"""Beginning of `by` of a job that was cancelled because it ran for too long."""
_NODE_KINDS = frozenset({EventKind.NODE_JOINED, EventKind.NODE_LOST, EventKind.NODE_SLOW})
RESERVATION_KINDS = frozenset({EventKind.RESERVED, EventKind.UNRESERVED, EventKind.HELD, EventKind.YIELDED})
_CLUSTER_KINDS = frozenset({EventKind.SCALED, EventKind.POLICY_REPLACED})
_JOB_KINDS = frozenset(EventKind) - _NODE_KINDS - RESERVATION_KINDS - _CLUSTER_KINDS


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: to a job, a node, a reservation named in `data`, or the whole cluster."""

    time_s: float
    kind: EventKind
    job_id: str | None = None
    node: str | None = None
    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if self.kind in _CLUSTER_KINDS:
            return
        if self.kind in RESERVATION_KINDS:
            subject, what = self.data.get("reservation"), "reservation"
        else:
            in_job = self.kind in _JOB_KINDS
            subject, what = (self.job_id, "job_id") if in_job else (self.node, "node")
        if not subject:
            raise InputError(f"event '{self.kind}' needs a {what}")

    def to_json(self) -> str:
        out: dict[str, Any] = {"v": VERSION, "time_s": self.time_s, "kind": str(self.kind)}
        if self.job_id is not None:
            out["job_id"] = self.job_id
        if self.node is not None:
            out["node"] = self.node
        return json.dumps(out | dict(self.data), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Read a line written by `to_json`."""
        try:
            raw = json.loads(line)
            version = raw.pop("v")
            if version != VERSION:
                raise InputError(f"event line has version {version!r}, this swell reads {VERSION}", field="v")
            return cls(
                time_s=float(raw.pop("time_s")),
                kind=EventKind(raw.pop("kind")),
                job_id=raw.pop("job_id", None),
                node=raw.pop("node", None),
                data=MappingProxyType(raw),
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"not an event line ({error}): {line[:80]!r}") from error


def write_events(events: Iterable[Event]) -> Iterator[str]:
    """Events as lines of a log file, each ending in a newline."""
    for event in events:
        yield event.to_json() + "\n"


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """Events of a log file, empty lines left out."""
    for line in lines:
        if line.strip():
            yield Event.from_json(line)


def was_withdrawn(end: Event) -> bool:
    """Whether a job ended because a person cancelled it, so that its deadline was neither met nor missed."""
    return end.kind is EventKind.CANCELLED and not str(end.data.get("by")).startswith(TIME_LIMIT)
