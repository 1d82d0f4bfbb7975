"""What `membership` concludes from cut links: who is given up, who is left out, who came back."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from swell.train.agent.generations import Check, Fence, Instruction, Kill, Say, Status, Worker
from swell.train.agent.patience import FIRST_STEP
from swell.train.agent.protocol import LeftOut, Returned, Standstill, Unreachable
from swell.train.agent.reach import Pair, connected, pair

if TYPE_CHECKING:
    from swell.train.agent.membership import Membership

LEAVE_S = 0.5
"""How long a worker that has left training may take to end by itself, in a job whose workers have slots."""


def is_far(m: Membership, worker: Worker) -> bool:
    """Whether a worker is on another host than the coordinator."""
    return bool(m.rules.host) and worker.address is not None and worker.address[0] != m.rules.host


def heard(m: Membership, worker: Worker, now_s: float) -> None:
    """A worker said something. If nobody was heard before, everybody gets the time to speak again."""
    if is_far(m, worker) and now_s - worker.seen_s > m.rules.silent_after_s:
        for other in m.workers.values():
            other.seen_s = max(other.seen_s, now_s)
    worker.seen_s = now_s


def silent(m: Membership, now_s: float) -> list[Worker]:
    """The members that are given up because they say nothing.

    One that hangs still has its connection. Where that has ended too, the link to its host is cut; but if
    nobody else on another host was heard after it, it is the coordinator's own link that is cut, and the
    members may train on without it. Then it waits for `away_s`. In the first step of a job, which no worker
    has rehearsed, libraries are loaded and initialised, and a worker may say nothing for as long as that
    takes.
    """
    patience_s = m.silence.patience_s(m.rules.silent_after_s)
    last_s = max((w.seen_s for w in m.workers.values() if is_far(m, w)), default=float("-inf"))
    found = []
    for worker in m.workers.values():
        silent_s = now_s - worker.seen_s
        if worker.status is not Status.MEMBER or silent_s <= patience_s:
            continue
        last_heard = last_s - worker.seen_s < m.rules.silent_after_s / 2
        alone = is_far(m, worker) and not worker.connected and last_heard
        if not alone or silent_s > m.rules.away_s:
            found.append(worker)
    return found


def stuck(m: Membership, now_s: float) -> list[Worker]:
    """The workers that the end of the job does not wait for: their part is done, and they are silent.

    The job needs the leader's end, so the leader has more time: its threads are over before its process is,
    and the link to its host may be cut for a while. If it is given up, the job goes on from its checkpoint.
    """
    found = []
    for worker in m.workers.values() if not m.ending.over else []:
        patience_s = m.rules.silent_after_s
        if worker.name == m.generation.leader:
            patience_s = max(FIRST_STEP * patience_s, m.rules.away_s if is_far(m, worker) else 0.0)
        elif not m.ending.finished:
            continue
        if worker.status is Status.DONE and now_s - worker.seen_s > patience_s:
            found.append(worker)
    return found


def leaves(worker: Worker, now_s: float) -> None:
    """Note that a member leaves; the time that it may take counts from the first word of it."""
    if worker.status is not Status.LEAVING:
        worker.status, worker.leaving_s = Status.LEAVING, now_s


def overdue(m: Membership, now_s: float) -> list[Instruction]:
    """Kill the workers that have left training and still hold a slot: it is meant for somebody else."""
    out: list[Instruction] = []
    for worker in m.workers.values():
        since_s = worker.leaving_s if worker.slot is not None else None
        if worker.status is Status.LEAVING and since_s is not None and now_s - since_s > LEAVE_S:
            worker.leaving_s = None
            out.append(Kill(worker.name))
    return out


def gone(m: Membership, worker: Worker, now_s: float) -> Say:
    """The event of a silent member that is given up."""
    m.given_up.missing[worker.name] = worker.slot
    return Say(LeftOut(worker.name, silent_s=round(now_s - worker.seen_s, 1)))


def standstill(m: Membership, step: int, others: list[str]) -> list[Instruction]:
    """The event of a step that waits for these members; once for each step."""
    others = [other for other in others if other in m.generation.members]
    if not others or not m.silence.stands_still(step):
        return []
    return [Say(Standstill(step, tuple(others)))]


def concerned(m: Membership) -> tuple[str, ...]:
    """The members, and those that the candidate would add."""
    coming = m.candidate.members if m.candidate is not None else ()
    return tuple(dict.fromkeys([*m.generation.members, *coming]))


def check(m: Membership, name: str, other: str, now_s: float) -> list[Instruction]:
    """Have all members, and those that are about to join them, try whom they reach, if these two are some."""
    names = concerned(m)
    if name not in names or other not in names:
        return []
    there = [m.workers[one] for one in names if one in m.workers]
    asked = tuple(w.name for w in there if w.connected and w.address is not None)
    number = m.reach.begin(asked, now_s)
    return [] if number is None else [Check(number, asked)]


def leave_out(m: Membership, going: list[str], cuts: set[Pair], mute: Collection[str]) -> list[Instruction]:
    """Go on with the largest set of these members that all reach each other; the others have to end.

    Those in `mute` did not answer and cannot be reached by some: they go on only if there is nobody else.
    """
    stay = connected([name for name in going if name not in mute] or going, cuts)
    out: list[Instruction] = []
    for name in [name for name in going if name not in stay]:
        m.given_up.missing[name] = m.workers.pop(name).slot
        m.generation.members.remove(name)
        m.given_up.fence(name)
        by = tuple(other for other in stay if pair(other, name) in cuts)
        out += [Say(LeftOut(name, by)), Fence(name)]
        out += [Kill(name)] if m.rules.kill_silent else []
    return out


def hold_back(m: Membership, cuts: set[Pair], now_s: float) -> list[Instruction]:
    """Let the newcomers wait that members, or each other, cannot reach."""
    members = m.generation.members
    coming = [w.name for w in m.workers.values() if w.status is Status.READY and w.name not in members]
    stay = connected([*members, *coming], cuts, keep=members)
    out: list[Instruction] = []
    for name in [name for name in coming if name not in stay]:
        if m.reach.hold(name, now_s):
            by = tuple(other for other in stay if pair(other, name) in cuts)
            out.append(Say(Unreachable(name, by)))
    return out


def returned(m: Membership, members: list[str]) -> list[Say]:
    """The events of workers that join in the place of those that were left out."""
    missing, out = m.given_up.missing, []
    for name in [n for n in members if n not in m.generation.members and n in m.workers]:
        slot = m.workers[name].slot
        before = next((gone for gone, its in missing.items() if its == slot), None)
        if before is not None:
            del missing[before]
            out.append(Say(Returned(name, before)))
    if len(members) >= m.scale.target:
        missing.clear()
    return out
