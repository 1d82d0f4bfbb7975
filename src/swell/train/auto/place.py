"""Where a worker's script is, as it tells the others with everything that they exchange.

All workers run the same script on the same numbers, so all must be at the same place. One that is elsewhere
than the leader leaves, says what differed, and another one takes its place.
"""

from __future__ import annotations

from typing import NoReturn

from swell.train.agent.errors import LEFT
from swell.train.auto.giving_way import give_way
from swell.train.auto.job import ScriptJob
from swell.train.auto.position import Position
from swell.train.auto.run import ScriptRun
from swell.train.sync.mesh import Header

END = [2**60, 0]
"""The batch of a script that has come to its end."""
_INEXACT = 1e-5
_WORDS = {
    "step": "after a backward pass",
    "call": "at a call of its model",
    "trial": "at the first call of a model",
    "input": "in a backward pass",
    "norm": "in a SyncBatchNorm",
    "end": "at the end of the script",
}


def place(job: ScriptJob, position: Position, doing: str) -> Header:
    """What this worker tells of its place: what it does, at which batch, after how many steps."""
    drawn = position.next_batch() if doing != "step" else None
    drawn = drawn or (position.current[0] if position.current else None)
    at = [-1, 0] if drawn is None else [drawn.ordinal, drawn.index]
    return {"what": "step", "doing": doing, "at": at, "steps": job.steps}


def leave(run: ScriptRun, job: ScriptJob, headers: list[Header]) -> None:
    """End this worker if it is elsewhere than the leader."""
    mine, leader = headers[job.rank], headers[0]
    if leader.get("at") == END != mine.get("at"):
        stop_with_the_leader(run, job)
    if all(mine.get(name) == leader.get(name) for name in ("doing", "at", "steps")) and _fit(mine, leader):
        if _near(mine.get("given", []), leader.get("given", [])):
            return
        give_way(run.link, "its model is given other numbers than the leader's", steps=job.steps)
    why = f"it is {_in_words(mine)}, and the leader is {_in_words(leader)}"
    give_way(run.link, why, steps=job.steps)


def stop_with_the_leader(run: ScriptRun, job: ScriptJob) -> NoReturn:
    """End this worker's script, which would go on: the leader's has come to its end, and that counts.

    A script that stops early by a number of its own part does so on each worker at another time.
    """
    run.left = True
    job.end()
    raise SystemExit(LEFT)


def _near(mine: list[list[float]], leader: list[list[float]]) -> bool:
    """Whether sums are the same, as exactly as machines of different kinds compute them."""
    if len(mine) != len(leader):
        return False
    for (one, sizes, count), (other, _, as_many) in zip(mine, leader):
        if count != as_many or abs(one - other) > _INEXACT * sizes:
            return False
    return True


def _fit(mine: Header, leader: Header) -> bool:
    """Whether both send tensors of the same kinds; their numbers of samples may differ."""
    one, other = mine.get("shapes", []), leader.get("shapes", [])
    return not one or not other or [[s[0], *s[2:]] for s in one] == [[s[0], *s[2:]] for s in other]


def _in_words(header: Header) -> str:
    ordinal, index = header.get("at", [-1, 0])
    where = "" if ordinal < 0 or [ordinal, index] == END else f" of batch {index} in training pass {ordinal}"
    sizes = f", with tensors {header['shapes']}" if "shapes" in header else ""
    doing = _WORDS.get(str(header.get("doing")), "elsewhere")
    return f"{doing}{where}, after {header.get('steps')} steps{sizes}"
