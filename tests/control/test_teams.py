"""Teams on the live platform: set by administrators, kept, obeyed, explained; promises stay sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.control.virtual import Trace, VirtualPlatform, make_trace

from swell.control import promises
from swell.control.errors import Conflict, NotFound
from swell.control.plane import ControlPlane
from swell.domain import InputError, JobSpec, Team

RED = Team(name="red", slots=4, users=("ann",))
BLUE = Team(name="blue", slots=4, users=("ben",))


class Desk(VirtualPlatform):
    """A platform of 8 slots, where the test is the clock."""

    def __init__(self, home: Path, policy: str = "elasticflow") -> None:
        trace = make_trace(1, 4, "2x4", 0.1)
        curves = {name: 1.0 * rates / rates[1] for name, rates in trace.rates.items()}
        jobs = [
            JobSpec(job_id=f"j{i}", submit_s=0.0, model=f"j{i}", batch_size=1, work=1e4) for i in range(4)
        ]
        super().__init__(Trace(jobs, curves, trace.cluster), policy, home, cost_s=1.0, round_s=None)
        self.plane.come_up()

    def submit(self, number: int, owner: str, **fields: Any) -> str:
        """Submit a job and take the turns that follow."""
        spec = self.trace.jobs[number]
        request = self.request(spec)
        for name, value in fields.items():
            object.__setattr__(request, name, value)
        record = self.plane.jobs.submit(request, owner)
        self.turn()
        return record.job_id

    def turn(self) -> None:
        self.now_s += 1.0
        self.plane.turn()
        self.plane.turn()

    def slots(self, job_id: str) -> int:
        return len(self.plane.jobs.get(job_id).wanted)


@pytest.fixture(autouse=True)
def _no_looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "MOST_JOBS", 0)


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    made = Desk(tmp_path)
    made.plane.teams.change(RED)
    made.plane.teams.change(BLUE)
    yield made
    made.store.close()


def test_idle_slots_are_lent_and_come_back_at_once(desk: Desk) -> None:
    first = desk.submit(0, "ann", max_workers=None)
    assert desk.slots(first) > 4, "nothing was borrowed"
    red = desk.plane.teams.states()[0]
    assert red.team == RED and red.use.borrowed == desk.slots(first) - 4
    second = desk.submit(1, "ben")
    assert (desk.slots(first), desk.slots(second)) == (4, 4)
    third = desk.submit(2, "ann", priority="low")
    why = desk.plane.jobs.explain(third)
    assert "waits: team red uses its 4 slots; policy 'elasticflow'" in why["why"]
    assert "1 job of a higher class goes first" in why["why"]
    listed = {job.job_id: job.reason for job in desk.plane.jobs.find()}
    assert listed[third] == "waits: team red uses its 4 slots" and not listed[first]
    assert why["team"] == {"name": "red", "own": 4, "used": 4, "borrowed": 0}
    red, blue, others = desk.plane.teams.states()
    assert (red.running, red.waiting, blue.running, others.use.own) == (1, 1, 1, 0)


def test_a_job_that_waits_for_lent_slots_is_told_that_they_come_back(desk: Desk) -> None:
    first = desk.submit(0, "ann")
    borrowed = desk.slots(first) - 4
    request = desk.request(desk.trace.jobs[1])
    waiting = desk.plane.jobs.submit(request, "ben").job_id  # no decision yet
    why = desk.plane.jobs.explain(waiting)["why"]
    assert f"team blue uses 0 of its 4 slots; lent to red ({borrowed}) and coming back" in why


def test_a_promise_counts_on_the_quota_only(desk: Desk) -> None:
    rates = desk.trace.rates["j0"]
    alone_s = 1e4 / float(rates.max())
    own_s = 1e4 / float(rates[:5].max())
    assert alone_s < own_s
    between = desk.request(desk.trace.jobs[0])
    object.__setattr__(between, "deadline_s", desk.now_s + (alone_s + own_s) / 2)
    assert not desk.plane.jobs.quote(between, "ann").admitted
    assert desk.plane.jobs.quote(between, "eve").admitted is False, (
        "users in no team have no slots of their own"
    )
    object.__setattr__(between, "deadline_s", desk.now_s + own_s * 1.2 + 100.0)
    assert desk.plane.jobs.quote(between, "ann").admitted


def test_a_change_that_breaks_a_promise_is_refused_unless_forced(desk: Desk) -> None:
    own_s = 1e4 / float(desk.trace.rates["j0"][:5].max())
    job_id = desk.submit(0, "ann", deadline_s=desk.now_s + own_s * 1.2 + 100.0)
    assert desk.plane.jobs.get(job_id).promise.guaranteed_s is not None
    with pytest.raises(Conflict, match=f"would break what was promised to {job_id}.*--force"):
        desk.plane.teams.change(Team(name="red", slots=0, users=("ann",)))
    assert desk.plane.teams.states()[0].team == RED
    forced = desk.plane.teams.change(Team(name="red", slots=0, users=("ann",)), force=True)
    assert forced.endangered == (job_id,)


def test_teams_survive_a_restart_and_can_be_removed(desk: Desk) -> None:
    again = ControlPlane(desk.store, desk.engine, home=desk.home, policy="elasticflow", clock=desk.clock)
    again.come_up()
    assert [state.team for state in again.teams.states()][:2] == [RED, BLUE]
    again.teams.remove("red")
    assert [state.team.name for state in again.teams.states()] == ["blue", ""]
    with pytest.raises(NotFound, match="swell teams list"):
        again.teams.remove("red")
    again.teams.remove("blue")
    assert again.teams.states() == []


def test_quotas_beyond_the_cluster_and_users_of_two_teams_are_refused(desk: Desk) -> None:
    with pytest.raises(InputError, match="9 slots together, and the cluster has 8") as refused:
        desk.plane.teams.change(Team(name="red", slots=5))
    assert refused.value.field == "slots"
    with pytest.raises(InputError, match="'ben' is in team 'blue' already") as refused:
        desk.plane.teams.change(Team(name="red", slots=4, users=("ben",)))
    assert refused.value.field == "users"
