"""Workers of an unmodified script that come to stand at different places: one says so and gives way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HEAD = """
    import os, random, sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.randn(120, 4)
    y = x.sum(1, keepdim=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(a, b):
        time.sleep(0.005)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
"""

TWO_TASKS = """
    chance = random.SystemRandom()  # nobody's state, so that no two workers draw alike
    tasks = [DataLoader(TensorDataset(x[:80], y[:80]), 20), DataLoader(TensorDataset(x[80:], y[80:]), 10)]
    batches = [iter(task) for task in tasks]
    for number in range(int(sys.argv[1])):
        task = chance.randrange(2)
        try:
            a, b = next(batches[task])
        except StopIteration:
            batches[task] = iter(tasks[task])
            a, b = next(batches[task])
        step(a, b)
    print("came to its end")
"""

APART = """
    train = DataLoader(TensorDataset(x, y), 20)
    for epoch in range(int(sys.argv[1])):
        for a, b in train:
            step(a, b)
            if os.environ["SWELL_WORKER"] != "w0" and epoch > 3:
                raise ValueError("only here\\nand on two lines")
    print("came to its end")
"""

ONCE = """
    from pathlib import Path
    once = Path(sys.argv[2])
    train = DataLoader(TensorDataset(x, y), 20)
    for epoch in range(int(sys.argv[1])):
        for a, b in train:
            step(a, b)
            if os.environ["SWELL_WORKER"] != "w0" and not os.path.exists(once) and epoch > 3:
                os.close(os.open(once, os.O_CREAT))
                raise ValueError("only once")
    print("came to its end")
"""

LACKING = """
    import re
    train = DataLoader(TensorDataset(x, y), 20)

    found = None
    for epoch in range(int(sys.argv[1])):
        for a, b in train:
            step(a, b)
        if epoch == 3 and os.environ["SWELL_WORKER"] == "w0":
            found = [re.compile("x"), 3]
    print("came to its end")
"""


def _auto(stage: Any, script: str, *arguments: str, **config: Any) -> Any:
    return stage.run(HEAD + script, *arguments, settings={"auto": True}, minimum=1, **config)


def _said(job: Any) -> list[str]:
    return [event["why"] for event in job.events("could_not_follow")]


def test_a_script_that_draws_its_loaders_at_random_goes_on_with_one_worker_and_says_why(stage: Any) -> None:
    job = _auto(stage, TWO_TASKS, "600", workers=2)
    job.wait_for(lambda s: job.events("confined"))
    assert job.wait(120) == 0, job.output()
    assert job.output().count("came to its end") == 1
    silent = [e["worker"] for e in job.events("exited") if e.get("code") == 75]
    said = job.events("could_not_follow")
    assert {event["worker"] for event in said} >= set(silent), "no worker ends without a word"
    confined = job.events("confined")
    assert confined and "3 workers in a row could not follow it" in confined[-1]["reason"]
    assert confined[-1]["workers"] == 1 and len(said) == 3
    assert all(event["where"].startswith("script") for event in said), "the file and the line of the script"


def test_an_error_of_one_workers_script_is_told_with_its_line_and_the_job_goes_on(stage: Any) -> None:
    job = _auto(stage, APART, "120", workers=2)
    job.wait_for(lambda s: job.events("confined"))
    assert job.wait(120) == 0, job.output()
    said = job.events("could_not_follow")
    assert [event["tries"] for event in said] == [1, 2, 3]
    for event in said:
        assert event["why"] == "ValueError: only here"
        assert event["where"].startswith("script") and event["worker"] != "w0"
    assert [e["workers"] for e in job.events("confined")] == [1]
    assert "the job goes on with 1 worker: 3 workers in a row could not follow it" in job.output()
    assert job.output().count("came to its end") == 1


def test_a_worker_that_stays_ends_the_row(stage: Any, tmp_path: Path) -> None:
    job = _auto(stage, ONCE, "120", str(tmp_path / "once"), workers=2)
    job.wait_for(lambda s: job.events("could_not_follow"))
    status = job.members(2)
    note = job.directory.path / "private" / "could-not-follow"
    job.wait_for(lambda s: s["step"] > status["step"] + 150 and not note.exists())
    assert job.wait(120) == 0, job.output()
    assert _said(job) == ["ValueError: only once"] and not job.events("confined")


def test_a_worker_that_cannot_be_given_what_the_script_holds_says_so(stage: Any) -> None:
    job = _auto(stage, LACKING, "120", workers=1)
    job.wait_for(lambda s: s["epoch"] >= 5)
    job.resize(2)
    job.wait_for(lambda s: job.events("confined"))
    assert job.wait(120) == 0, job.output()
    assert job.output().count("came to its end") == 1
    assert len(_said(job)) == 3
    for why in _said(job):
        assert "it has not what the script holds" in why and "found[0] is a re.Pattern" in why, why
    assert [e["workers"] for e in job.events("confined")] == [1]


FOLDS = """
    def train(fold, scale):
        torch.manual_seed(fold)
        model = nn.Sequential(nn.Linear(4, 4 + fold), nn.Linear(4 + fold, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        loader = DataLoader(TensorDataset(x, y * scale), 10)
        for epoch in range(passes):
            for a, b in loader:
                time.sleep(0.004)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(a), b).backward()
                optimizer.step()
        with torch.no_grad():
            return nn.functional.mse_loss(model(x), y * scale).item()

    passes = int(sys.argv[1])
    x = torch.randn(1200, 4)
    y = x.sum(1, keepdim=True)
    print("errors", *[f"{train(fold, 1.0 + fold):.5f}" for fold in range(3)])
"""


def test_a_newcomer_joins_in_the_first_pass_of_a_new_model(stage: Any) -> None:
    """Each fold has a model and an optimizer of its own, and each pass is long."""
    plain = _auto(stage, FOLDS, "1", workers=1)
    assert plain.wait() == 0, plain.output()
    job = _auto(stage, FOLDS, "1", workers=1)
    job.wait_for(lambda s: s["epoch"] >= 1)
    job.resize(2)
    job.members(2)
    assert job.wait() == 0, job.output()
    assert [event for event in job.events("could_not_follow") if event["tries"]] == []
    assert job.events("generation")[1]["members"] == ["w0", "w1"], "and not another one in its place"
    lines = [one.output().split("errors ")[1].splitlines()[0].split() for one in (plain, job)]
    expected, found = (list(map(float, line)) for line in lines)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
