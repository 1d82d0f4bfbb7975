"""What a job's membership decides: whom to start, whom to end, and which generation comes next.

`membership` has the state and what happens to it, `links` what follows from cut links. Each function here
changes the `Membership` and returns the instructions that carry its decision out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swell.train.agent import links
from swell.train.agent.ending import FINISHED, MAX_FRUITLESS_DEATHS, STOPPED
from swell.train.agent.generations import (
    Announce,
    Candidate,
    Instruction,
    Kill,
    Spawn,
    Status,
    Stop,
    Worker,
)
from swell.train.agent.slots import age, newcomers, open_slots

if TYPE_CHECKING:
    from swell.train.agent.membership import Membership


def recovering(m: Membership) -> bool:
    """Whether the present generation is broken, and its members enter the candidate at once."""
    return m.candidate is not None and m.candidate.recovery


# ---------------------------------------------------------------------- towards the target


def plan(m: Membership, now_s: float) -> list[Instruction]:
    """Start or end workers and announce a candidate, as the target requires."""
    if m.ending.over:
        return []
    if m.ending.stopping:
        if _some(m, Status.MEMBER, Status.DONE):
            return [Stop(tuple(m.generation.members))]
        return m.finish(0, STOPPED)  # no worker has state that is not on disk
    if recovering(m) or _some(m, Status.DONE):
        return []
    staying = _staying(m)
    out = _start_and_end(m, staying, now_s)
    wanted = _next_members(m, staying, now_s)
    if not wanted or wanted == m.generation.members:
        if m.candidate is not None:
            out.append(Announce(None, links.concerned(m)))
            m.candidate = None
    elif m.candidate is None or list(m.candidate.members) != wanted:
        out += announce(m, wanted)
    return out


def _staying(m: Membership) -> list[str]:
    """Members that go on under the present target, in their order."""
    slow = {w.name for w in m.workers.values() if w.slow}
    members = [name for name in m.generation.members if name not in slow]
    if m.scale.slots is None:
        return members[: m.scale.target]
    there = [m.workers[name] for name in members if name in m.workers]
    return [w.name for w in there if w.slot in m.scale.slots]


def _start_and_end(m: Membership, staying: list[str], now_s: float) -> list[Instruction]:
    """Start the workers that are missing beside those that stay, and end newcomers that are too many."""
    present = [*_oldest_first(m, Status.READY), *_oldest_first(m, Status.STARTING)]
    free = open_slots(m.scale.open(now_s), [m.workers[name] for name in staying])
    missing = m.scale.target - len(staying)
    waiting = max(missing, 0) + m.rules.spares
    # A spare starts only after a switch, because its preparation would slow the steps around it.
    urgent = missing if missing > 0 or now_s < m.quiet.settled_s else waiting
    needed, surplus = newcomers(present, free, waiting, urgent)
    out: list[Instruction] = []
    for worker in surplus:
        worker.status = Status.LEAVING
        out.append(Kill(worker.name))
    for slot in needed if now_s >= m.quiet.calm_s else []:
        name = m.names.new()
        m.workers[name] = Worker(name, Status.STARTING, now_s, slot=slot)
        out.append(Spawn(name, slot))
    return out


def _next_members(m: Membership, staying: list[str], now_s: float) -> list[str]:
    """The members that the next generation should have: those that stay, and newcomers that can join now."""
    ready = _oldest_first(m, Status.READY)
    missing = m.scale.target - len(staying)
    joiners = [w for w in ready if w.connected and not m.reach.held(w.name, now_s)][:missing]
    if missing > len(joiners) and joiners and _some(m, Status.STARTING):
        # Others are still being prepared: wait for them, so that one switch is enough for all.
        waited = now_s - min(w.ready_s for w in joiners)
        if waited < m.rules.gather_s:
            joiners = []
    members, live = m.generation.members, m.generation.live
    if not live and len(joiners) < min(m.scale.minimum, m.scale.target):
        joiners = []
    wanted = staying + [w.name for w in joiners]
    if not staying and members and live:
        # All workers move to other slots: one member stays until the newcomers have its state.
        wanted = members[:1] + wanted if joiners else members
    return wanted


def announce(m: Membership, members: list[str], recovery: bool = False) -> list[Instruction]:
    """Replace the candidate by one with these members."""
    m.candidate = Candidate(m.generation.next_number(), tuple(members), recovery, m.generation.epoch)
    return [Announce(m.candidate, links.concerned(m))]


def adopt(m: Membership, number: int, members: list[str], now_s: float) -> list[Instruction]:
    """Generation `number` has begun with these members."""
    present = m.generation
    left = [name for name in present.members if name not in members]
    out: list[Instruction] = list(links.returned(m, members))
    m.quiet.after_switch(now_s)
    present.number, present.live, present.leader = number, True, members[0]
    present.counter = max(present.counter, number)
    present.members = [name for name in members if name in m.workers]
    for name in left:
        if name in m.workers:
            links.leaves(m.workers[name], now_s)
    for worker in [m.workers[name] for name in present.members]:
        if worker.status is not Status.DONE:
            worker.status, worker.seen_s = Status.MEMBER, max(now_s, worker.seen_s)
    if m.candidate is not None and m.candidate.number <= number:
        m.candidate = None
    if len(present.members) < len(members) and present.members:  # a member died around the switch
        out += recover(m, now_s)
    return out


# ---------------------------------------------------------------------- losses


def lost(m: Membership, name: str, reason: str, now_s: float) -> list[Instruction]:
    """A worker is dead or given up: form a generation without it, and replace it."""
    if m.workers.pop(name, None) is None:
        return []
    if over := died_fruitless(m, name, reason):
        return over
    if name not in m.generation.members:
        return plan(m, now_s)
    m.generation.members.remove(name)
    if has_state(m):
        return [*recover(m, now_s), *plan(m, now_s)]
    return without_state(m, now_s)


def has_state(m: Membership) -> bool:
    """Whether a member has the job's state: those that leave have let go of it."""
    there = [m.workers[name] for name in m.generation.members if name in m.workers]
    return any(worker.status is not Status.LEAVING for worker in there)


def without_state(m: Membership, now_s: float) -> list[Instruction]:
    """Nobody has the job's state any more: the job is over, or goes on from its checkpoint."""
    m.generation.members = []
    return closing(m) or begin_again(m, now_s)


def recover(m: Membership, now_s: float) -> list[Instruction]:
    """Have the members that train on form a new generation at once."""
    m.quiet.after_loss(now_s)
    going = _going(m)
    return announce(m, going, recovery=True) if going else []


def _going(m: Membership) -> list[str]:
    """Members that train on."""
    there = [m.workers[name] for name in m.generation.members if name in m.workers]
    return [w.name for w in there if w.status not in (Status.DONE, Status.LEAVING)]


def part(m: Membership, now_s: float) -> list[Instruction]:
    """A check is over: go on with the largest set of members that all reach each other."""
    cuts, mute = m.reach.end(now_s)
    if m.ending.over or not cuts:
        return []
    before = _going(m)
    out = [*links.leave_out(m, before, cuts, mute), *links.hold_back(m, cuts, now_s)]
    if len(_going(m)) < len(before):
        out += recover(m, now_s)
    return [*out, *plan(m, now_s)]


def give_up(m: Membership, name: str, now_s: float) -> list[Instruction]:
    """Go on without `name`, and make sure that it cannot come back."""
    m.given_up.fence(name)
    kill: list[Instruction] = [Kill(name)] if m.rules.kill_silent else []
    return [*lost(m, name, "it does not answer", now_s), *kill]


def recover_without(m: Membership, name: str, now_s: float) -> list[Instruction]:
    """Announce a recovery again without `name`, if `name` was part of it."""
    if not recovering(m) or m.candidate is None or name not in m.candidate.members:
        return []
    m.generation.members = [member for member in m.generation.members if member != name]
    return recover(m, now_s)


def begin_again(m: Membership, now_s: float) -> list[Instruction]:
    """Start over without live state; newcomers, prepared for another position, are replaced too."""
    out: list[Instruction] = []
    for worker in m.workers.values():
        if worker.status is not Status.LEAVING:
            worker.status = Status.LEAVING
            out.append(Kill(worker.name))
    m.generation.live, m.generation.epoch, m.candidate = False, 0, None
    return out + plan(m, now_s)


# ---------------------------------------------------------------------- the end


def died_fruitless(m: Membership, name: str, reason: str) -> list[Instruction]:
    """Count a death, and end the job if there were too many without a step in between."""
    m.ending.fruitless += 1
    if m.ending.fruitless <= MAX_FRUITLESS_DEATHS + m.scale.target:
        return []
    last = f"the last was {name} ({reason})"
    return m.finish(1, f"{m.ending.fruitless} workers died without a single step in between; {last}")


def closing(m: Membership) -> list[Instruction]:
    """End the job with success once the script has finished and no worker trains any more."""
    if not m.ending.finished or _some(m, Status.MEMBER, Status.DONE):
        return []
    return m.finish(0, FINISHED)


def _some(m: Membership, *status: Status) -> bool:
    """Whether there is a worker with one of these."""
    return any(worker.status in status for worker in m.workers.values())


def _oldest_first(m: Membership, status: Status) -> list[Worker]:
    return sorted((w for w in m.workers.values() if w.status is status), key=lambda w: age(w.name))
