"""Jobs that exchange slots: each gets those that it is to have, also in a circle, and no slot is ever in two
hands.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from swell.domain import JobRequest, Placement
from swell.engines import Launch, supervised
from swell.engines.job_state import JobState
from swell.engines.local import LocalSite
from swell.engines.supervised import Exchanger, SupervisedEngine, give_way
from swell.engines.supervised_job import CoordinatorLine, SupervisedJob
from swell.engines.supervisor import STOPPED
from swell.train.agent.children import Child
from swell.train.agent.protocol import JobStatus, Resize
from swell.train.agent.wire import Connection

TICK_S = 0.5
READY_S = 2.0
"""How long a worker of the world below takes to get ready, and a job to save and stop."""
LOST_AFTER_S = 3.0
SLOTS = 6


def waits(job_id: str, told: Placement, wanted: Placement, size: int = 1) -> Exchanger:
    return Exchanger(job_id=job_id, told=told, wanted=wanted, size=size)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([waits("a", (0, 1), (3,)), waits("b", (3,), (2,)), waits("c", (2,), (0, 1))], ("a", (1,))),
        ([waits("a", (0, 1), (2, 3)), waits("b", (2, 3), (0, 1))], ("a", (1,))),
        ([waits("a", (0, 1, 4), (2,)), waits("b", (2,), (0,))], ("a", (1, 4))),
        ([waits("a", (0,), (1,)), waits("b", (1,), (0,))], ("a", ())),
        ([waits("a", (0, 1), (2, 3), 2), waits("b", (2, 3), (0, 1), 2)], ("a", ())),
        ([waits("a", (0, 1), (2,), 2), waits("b", (2,), (0, 1))], ("b", ())),
        ([waits("a", (0,), (1,)), waits("b", (1,), (2,)), waits("c", (2,), (0, 5))], None),
        ([waits("a", (0,), (1,)), waits("b", (1,), ())], None),
        ([waits("a", (0,), (1,))], None),
    ],
)
def test_one_job_of_a_circle_gives_way_and_shrinks_rather_than_stops(
    jobs: list[Exchanger], expected: tuple[str, Placement] | None
) -> None:
    given_way = give_way(jobs)
    if expected is None or given_way is None:
        assert given_way == expected
        return
    job_id, keeps = given_way
    assert (job_id, len(keeps)) == (expected[0], len(expected[1]))
    others = {slot for job in jobs if job.job_id != job_id for slot in job.wanted}
    unasked = {slot for job in jobs if job.job_id == job_id for slot in job.told} - others
    assert unasked <= set(keeps) or not keeps


# -- many jobs under the real engine, whose processes are played ---------------------------------------------


class Site(LocalSite):
    """This machine, without processes."""

    def may_start(self, job: SupervisedJob) -> bool:
        return True

    def sweep(self, job: SupervisedJob) -> bool:
        return True

    def start_supervisor(self, job: SupervisedJob) -> Child:
        assert job.order is not None
        cast(Played, job).line.start(job.order.slots)
        return cast(Child, None)


@dataclass
class Line(CoordinatorLine):
    """A coordinator with its workers: newcomers take a while, then the job goes on, then leavers end."""

    world: World = field(kw_only=True)
    directory: Path = field(kw_only=True)
    up: bool = False
    live: dict[str, int] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    due_s: float | None = None
    stopping: bool = False
    said: list[dict[str, Any]] = field(default_factory=list)

    def start(self, slots: Placement) -> None:
        self.up, self.live, self.members, self.stopping, self.said = True, {}, [], False, []
        self.send(Resize(len(slots), list(slots)))

    def end(self) -> None:
        self.up, self.live, self.members, self.connection = False, {}, [], None

    def connect(
        self, directory: Path, now_s: float, slots: int, fencing: int | None = None
    ) -> JobStatus | None:
        if not self.up or self.connection is not None:
            return None
        self.connection, self.said = cast(Connection, self), []
        states = {name: "member" if name in self.members else "starting" for name in self.live}
        return JobStatus(states, tuple(self.members), 1, processes=dict(self.live))

    def send(self, message: Struct) -> bool:
        if not isinstance(message, Resize):
            self.stopping, self.due_s = True, self.world.now_s + READY_S
            return True
        self.target = set(message.slots or ())
        for name in [n for n, slot in self.live.items() if n not in self.members and slot not in self.target]:
            self._exited(name)
        for slot in self.target - set(self.live.values()):
            self.world.workers += 1
            self.live[name := f"w{self.world.workers}"] = slot
            self.said.append({"type": "event", "event": "spawn", "worker": name, "slot": slot})
        self.due_s = self.world.now_s + READY_S
        return True

    def pending(self) -> list[dict[str, Any]]:
        said, self.said = self.said, []
        return said

    def close(self) -> None:
        self.connection = None

    def turn(self) -> None:
        """What happens in the job meanwhile."""
        if not self.up or self.due_s is None or self.world.now_s < self.due_s:
            return
        self.due_s = None
        if self.stopping:
            (self.directory / "exit.json").write_text(json.dumps({"code": 0, "reason": STOPPED}))
            self.end()
            return
        self.members = sorted(n for n, slot in self.live.items() if slot in self.target)
        self.said.append({"type": "event", "event": "generation", "members": self.members})
        self.said.append({"type": "report", "report": {"rank": 0, "done": 1}})
        for name in [name for name in self.live if name not in self.members]:
            self._exited(name)

    def _exited(self, name: str) -> None:
        del self.live[name]
        self.said.append({"type": "event", "event": "exited", "worker": name, "code": 0})


class Played(SupervisedJob):
    """A job whose processes are played."""

    line: Line

    def has_processes(self) -> bool:
        return self.line.up


class World:
    """A control plane that has decided, and the engine that is to get there."""

    def __init__(self, home: Path) -> None:
        self.now_s, self.workers = 1000.0, 0
        self.engine = SupervisedEngine(Site(home, slots=SLOTS))
        self.home = home
        self.wishes: dict[str, Placement] = {}
        self.shown: dict[str, Placement] = {}
        """The slots of each job by the event log."""
        self.missing_s: dict[str, float] = {}

    def wish(self, wishes: dict[str, Placement]) -> None:
        self.wishes = wishes
        for job_id, slots in sorted(wishes.items(), key=lambda item: len(item[1])):
            self._apply(job_id, slots)

    def _apply(self, job_id: str, slots: Placement) -> None:
        request = JobRequest(name=job_id, script="train.py")
        launch = Launch(job_id=job_id, request=request, job_dir=self.home / "jobs" / job_id)
        if job_id not in self.engine._jobs:
            line = Line(world=self, directory=launch.job_dir)
            self.engine._jobs[job_id] = Played(launch, JobState(), line=line)
        self.engine.apply(launch, slots)

    @property
    def lines(self) -> dict[str, Line]:
        return {job_id: cast(Line, job.line) for job_id, job in self.engine._jobs.items()}

    def kill(self, job_id: str) -> None:
        self.lines[job_id].end()

    def turn(self) -> None:
        self.now_s += TICK_S
        for line in self.lines.values():
            line.turn()
        for job in self.engine._all_jobs():
            self.engine._listener.read(job)
        self.engine._break_circle(self.now_s)
        for job in self.engine._all_jobs():
            self.engine._tend(job)
        self._follow()
        self._check()

    def _follow(self) -> None:
        """Keep the event log, and have jobs started again whose processes are gone."""
        observed = self.engine.observe()
        for report in self.engine.reports():
            if report.kind in ("started", "resized"):
                self.shown[report.job_id] = report.data["gpus"]
        for job_id, wanted in self.wishes.items():
            if job_id in observed:
                self.missing_s.pop(job_id, None)
            elif self.now_s - self.missing_s.setdefault(job_id, self.now_s) >= LOST_AFTER_S:
                self.shown[job_id] = ()
                self._apply(job_id, wanted)

    def _check(self) -> None:
        for job in self.engine._jobs.values():
            job.state.validate()
        for what, by_job in (
            ("workers are on", {j: set(line.live.values()) for j, line in self.lines.items()}),
            ("the log shows", {j: set(slots) for j, slots in self.shown.items()}),
        ):
            slots = [slot for slots in by_job.values() for slot in slots]
            assert len(slots) == len(set(slots)), f"{what} a slot in two hands: {by_job}"

    @property
    def reached(self) -> bool:
        """Whether every job is where it is to be, in fact and by the event log."""
        return all(
            sorted(line.live[name] for name in line.members) == sorted(line.live.values()) == list(wanted)
            and self.shown.get(job_id) == wanted
            for job_id, wanted in self.wishes.items()
            for line in [self.lines[job_id]]
        )

    def settle(self, within_s: float) -> None:
        until_s = self.now_s + within_s
        while not self.reached:
            assert self.now_s < until_s, (
                f"{self.wishes} not reached: {[(j, line.live) for j, line in self.lines.items()]}"
            )
            self.turn()


@st.composite
def shares(draw: st.DrawFn) -> dict[str, Placement]:
    """Slots for four jobs, all of which get some."""
    order = draw(st.permutations(range(SLOTS)))
    cuts = sorted(draw(st.sets(st.integers(1, SLOTS - 1), min_size=3, max_size=4)))[:4]
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, SLOTS])]
    return {name: tuple(sorted(part)) for name, part in zip("abcd", parts)}


KILLS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abcd")), max_size=3)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], World]:
    """A new world in each call."""
    made: list[World] = []

    def make() -> World:
        (home := tmp_path / str(len(made))).mkdir()
        made.append(World(home))
        monkeypatch.setattr(supervised, "time", SimpleNamespace(monotonic=lambda: made[-1].now_s))
        return made[-1]

    return make


def test_slots_that_three_jobs_exchange_in_a_circle_are_exchanged(world: Callable[[], World]) -> None:
    here = world()
    here.wish({"a": (0, 1), "b": (3,), "c": (2,)})
    here.settle(30.0)
    here.wish({"a": (3,), "b": (2,), "c": (0, 1)})
    here.settle(30.0)
    here.wish({"a": (2,), "b": (3,), "c": (0, 1)})
    here.settle(30.0)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(first=shares(), exchanges=st.lists(st.tuples(shares(), KILLS), min_size=1, max_size=3))
def test_every_exchange_of_slots_ends_with_each_job_on_its_own_whatever_is_killed_meanwhile(
    world: Callable[[], World],
    first: dict[str, Placement],
    exchanges: list[tuple[dict[str, Placement], list[tuple[int, str]]]],
) -> None:
    here = world()
    here.wish(first)
    here.settle(30.0)
    for wishes, kills in exchanges:
        here.wish(wishes)
        for turn in range(31):
            for at, job_id in kills:
                if at == turn:
                    here.kill(job_id)
            here.turn()
        # A job that was killed keeps its slots until the control plane has noted that (a minute at most).
        here.settle(150.0 if kills else 60.0)
