"""Capacity as a function of time."""

from __future__ import annotations

import math

import pytest

from swell.domain import Calendar, Cluster, InputError, Reservation

CLUSTER = Cluster.parse("2x4")


def steps(calendar: Calendar, now_s: float = 0.0, until_s: float = 1000.0) -> list[tuple[float, int]]:
    ahead = calendar.ahead(CLUSTER, now_s, until_s)
    return list(zip(ahead.times.tolist(), ahead.gpus.tolist()))


def test_hours_take_gpus_and_give_them_back() -> None:
    calendar = Calendar((Reservation(name="a", gpus=3, start_s=10, end_s=20),))
    assert steps(calendar) == [(0, 8), (10, 5), (20, 8)]
    assert steps(calendar, 15) == [(15, 5), (20, 8)]
    assert steps(calendar, 20) == [(20, 8)]
    assert [one.name for one in calendar.at(19.9)] == ["a"] and not calendar.at(20)


def test_named_nodes_and_numbers_are_different_gpus() -> None:
    calendar = Calendar(
        (
            Reservation(name="count", gpus=3, start_s=5, end_s=30),
            Reservation(name="node", nodes=("n1",), start_s=10, end_s=20),
            Reservation(name="more", gpus=7, start_s=12, end_s=15),
        )
    )
    assert steps(calendar) == [(0, 8), (5, 5), (10, 1), (12, 0), (15, 1), (20, 5), (30, 8)]
    assert [one.name for one in calendar.at(12)] == ["node", "count", "more"]


def test_repeated_hours_come_back_at_exactly_their_time() -> None:
    daily = Reservation(name="night", gpus=4, start_s=100, end_s=200, every_s=300)
    for day in range(50):
        begin_s = 100 + 300.0 * day
        assert daily.active(begin_s) and daily.active(begin_s + 99.9) and not daily.active(begin_s + 100)
        assert daily.next_change_s(begin_s) == begin_s + 100
        assert daily.next_change_s(begin_s + 100) == begin_s + 300


def test_a_look_ahead_ends_with_the_worst_of_what_is_repeated() -> None:
    night = Reservation(name="night", gpus=4, start_s=100, end_s=200, every_s=300)
    noon = Reservation(name="noon", gpus=1, start_s=250, end_s=260, every_s=300)
    found = Calendar((night, noon)).ahead(CLUSTER, 0.0)
    assert len(found.times) < 250 and found.gpus[-1] == 3
    assert (found.times[1:] > found.times[:-1]).all()


def test_a_service_counts_with_the_most_it_may_want() -> None:
    calendar = Calendar((Reservation(name="web", gpus=1, most=3),))
    assert steps(calendar) == [(0, 5)] and [one.gpus for one in calendar.at(0)] == [1]


@pytest.mark.parametrize("by_s", [-50.0, -150.0, -250.0, -420.0, -950.0])
def test_another_clock_sees_the_same_hours(by_s: float) -> None:
    calendar = Calendar(
        (
            Reservation(name="night", gpus=4, start_s=100, end_s=200, every_s=300),
            Reservation(name="once", gpus=1, start_s=180, end_s=400),
            Reservation(name="web", gpus=1, most=2),
        )
    )
    there = calendar.shifted(by_s)
    for tick in range(0, 900, 5):
        here_s = tick - by_s
        seen = sum(one.gpus for one in there.at(tick))
        assert seen == sum(one.gpus for one in calendar.at(here_s)), here_s


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"gpus": 0}, "gpus"),
        ({"gpus": -1}, "gpus"),
        ({"gpus": 1, "nodes": ("n0",)}, "gpus"),
        ({"gpus": 1, "start_s": 5, "end_s": 5}, "end_s"),
        ({"gpus": 1, "start_s": math.nan}, "start_s"),
        ({"gpus": 1, "every_s": 10}, "end_s"),
        ({"gpus": 1, "end_s": 10, "every_s": 5}, "every_s"),
        ({"gpus": 4, "most": 3}, "gpus"),
        ({"most": 0}, "most"),
        ({"most": 2, "end_s": 5}, "most"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as error:
        Reservation(name="a", **fields)  # type: ignore[arg-type]
    assert error.value.field == field


def test_a_name_is_checked_and_used_once() -> None:
    with pytest.raises(InputError, match="letters"):
        Reservation(name="no spaces", gpus=1)
    with pytest.raises(InputError, match="two reservations"):
        Calendar((Reservation(name="a", gpus=1), Reservation(name="a", gpus=2)))
