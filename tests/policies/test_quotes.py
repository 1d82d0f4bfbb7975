"""People ask without submitting: `admit` changes nothing, however often it is called."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tests.policies.histories import Books, make_history

from swell.policies import Policy, make_policy, policy_class, policy_names

ADMITTING = [name for name in policy_names() if policy_class(name).admit is not Policy.admit]
CHEAPER = {"oasis": "oasis:slots=6,steps=16"}
QUOTES = 25
"""How often each of the 40 guests asks."""


@pytest.mark.parametrize("name", ADMITTING)
def test_a_thousand_quotes_change_nothing(name: str) -> None:
    history = make_history(crowd=60, arrivals=20, deadlines=0.9)
    quiet, asked = (Books(history, make_policy(CHEAPER.get(name, name)), None) for _ in range(2))
    answers = []
    for step, (now_s, newcomers) in enumerate(history.steps):
        for books in (quiet, asked):
            books.pass_time(step, now_s)
            for job in newcomers:
                books.let_in(now_s, job)
            # Guests ask halfway through, those of the later steps: of one set of books only.
            for guest in history.steps[5][1] + history.steps[6][1] if step == 4 else []:
                number = books.add(guest)
                snapshot, before = books.snapshot(now_s), pickle.dumps(vars(books.policy))
                if books is asked:
                    for _ in range(QUOTES):
                        answer = books.policy.admit(snapshot, len(snapshot) - 1)
                        answers.append(answer.admitted)
                    assert pickle.dumps(vars(books.policy)) == before
                books.remove(number)
        expected, decision = (books.policy.allocate(books.snapshot(now_s)) for books in (quiet, asked))
        assert np.array_equal(decision.gpus, expected.gpus)
        for books in (quiet, asked):
            books.carry_out(books.snapshot(now_s), decision)
    assert len(answers) == 1000
    assert any(answers) and not all(answers), "guests heard both answers"
