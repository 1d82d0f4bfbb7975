"""Successive halving, as a function of what trials have reported."""

from __future__ import annotations

import random

from swell.sweep.study import TrialStanding, Verdict, verdicts

GO, WAIT, GIVE_UP = Verdict.GO, Verdict.WAIT, Verdict.GIVE_UP


def of(*trials: TrialStanding, total: int | None = None, maximize: bool = True) -> dict[int, Verdict]:
    return verdicts(trials, total or len(trials), 1, maximize=maximize)


def test_nobody_goes_on_before_the_last_has_arrived() -> None:
    there, coming = TrialStanding(0, {1: 0.5}), TrialStanding(1, {})
    assert of(there, coming, total=3) == {0: WAIT, 1: GO}
    assert of(there, TrialStanding(1, {1: 0.4}), total=3) == {0: WAIT, 1: WAIT}, (
        "the third was not even started"
    )


def test_the_best_third_goes_on_and_the_last_one_to_its_end() -> None:
    trials = [TrialStanding(i, {1: i / 10}) for i in range(9)]
    assert of(*trials) == {i: GO if i >= 6 else GIVE_UP for i in range(9)}
    assert of(*trials, maximize=False) == {i: GO if i < 3 else GIVE_UP for i in range(9)}
    ended = [TrialStanding(i, {1: i / 10}, ended=True) for i in range(6)]
    later = [
        TrialStanding(6, {1: 0.6, 3: 0.9}),
        TrialStanding(7, {1: 0.7, 4: 0.8}),
        TrialStanding(8, {1: 0.8, 2: 0.9}),
    ]
    assert of(*ended, *later) == {6: WAIT, 7: WAIT, 8: GO}
    later[2] = TrialStanding(8, {1: 0.8, 3: 0.7})
    assert of(*ended, *later) == {6: GO, 7: GIVE_UP, 8: GIVE_UP}
    assert of(*ended, TrialStanding(6, {1: 0.6, 3: 0.9, 9: 0.1})) == {6: GO}


def test_failed_trials_keep_nobody_waiting_and_never_win() -> None:
    broken = [TrialStanding(i, ended=True, failed=True) for i in range(2)]
    assert of(*broken, TrialStanding(2, {1: 0.1})) == {2: GO}
    assert of(*broken) == {}


def test_whatever_the_values_one_survives_and_work_is_bounded() -> None:
    """Play whole sweeps: trials run to their rung, and 24 of them take as many epochs as the rule says."""
    rng = random.Random(0)
    for total in (1, 2, 3, 5, 24):
        curves: dict[int, dict[int, float]] = {i: {} for i in range(total)}
        ended: set[int] = set()
        for _ in range(200):
            standing = [TrialStanding(i, curves[i], ended=i in ended) for i in range(total)]
            found = verdicts(standing, total, 1, maximize=True)
            ended |= {i for i, verdict in found.items() if verdict is GIVE_UP}
            going = [i for i, verdict in found.items() if verdict is GO]
            if not going:
                break
            for i in going:
                curves[i][len(curves[i]) + 1] = rng.random()
                if len(curves[i]) == 27:
                    ended.add(i)
        assert [len(curve) for curve in curves.values()].count(27) == 1
        if total == 24:
            assert sum(map(len, curves.values())) == 24 * 1 + 8 * 2 + 3 * 6 + 1 * 18
