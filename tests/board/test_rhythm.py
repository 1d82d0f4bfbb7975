"""When a policy is asked."""

from __future__ import annotations

import math

from swell.board import DecisionRhythm
from swell.policies import make_policy


def test_without_rounds_a_policy_is_asked_at_once() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"))
    assert rhythm.due_s == math.inf
    rhythm.ask(7.0)
    assert rhythm.due_s == 7.0
    rhythm.decided(7.0, math.inf)
    assert rhythm.due_s == math.inf


def test_with_rounds_it_waits_for_the_next_one_unless_it_is_urgent() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"), 60.0)
    rhythm.ask(61.0)
    assert rhythm.due_s == 120.0
    rhythm.ask(62.0, urgent=True)
    assert rhythm.due_s == 62.0
    rhythm.ask(120.0)
    assert rhythm.due_s == 62.0, "the earlier one stands"


def test_a_round_that_begins_now_is_now() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"), 60.0)
    rhythm.ask(120.0)
    assert rhythm.due_s == 120.0


def test_a_wake_up_is_put_off_to_a_round() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"), 60.0)
    rhythm.decided(60.0, 130.0)
    assert rhythm.due_s == 180.0
    rhythm.decided(60.0, 61.0)
    assert rhythm.due_s == 120.0


def test_a_policy_whose_decision_changes_with_time_is_asked_in_every_round() -> None:
    rhythm = DecisionRhythm(make_policy("pollux"), 60.0)
    rhythm.decided(60.0, math.inf)
    assert rhythm.due_s == 120.0


def test_nobody_is_asked_twice_in_one_moment() -> None:
    rhythm = DecisionRhythm(make_policy("elasticflow"))
    rhythm.decided(5.0, 5.0)
    assert rhythm.due_s > 5.0
