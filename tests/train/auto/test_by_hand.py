"""`--auto` on scripts that draw their batches by hand, and the loops that newcomers go on with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.conftest import PlainRun

from swell.train.auto import by_hand

HEAD = """
import json, os, random, sys, time
import numpy as np
import torch
from torch import nn

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
random.seed(3)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
seen, scores = [], {}

def learn(a, b):
    time.sleep(0.01)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(a), b)
    loss.backward()
    optimizer.step()
    seen.append(round(loss.item(), 9))
"""

SCRIPTS = {
    # Loops over ranges in two calls, an evaluation beside, a counter in a dict.
    "minibatches": """
def train_epoch(order):
    for number, at in enumerate(range(0, len(order), 16)):
        learn(x[order[at : at + 16]], y[order[at : at + 16]])
        scores[number] = seen[-1]

for epoch in range(80):
    order = list(range(64))
    random.shuffle(order)
    train_epoch(order)
    seen.append(round(float(torch.rand(1)), 9))
""",
    # What the inner loop goes over is in no variable.
    "bars": """
from tqdm import tqdm
for epoch in tqdm(range(60), disable=False, mininterval=1000):
    for part in tqdm(torch.randperm(64).split(16), leave=False, mininterval=1000):
        learn(x[part], y[part])
""",
    # Steps at two places in turns.
    "two optimizers": """
maker = nn.Linear(4, 4)
of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
try:
    for step in range(100):
        for k in range(2):
            at = torch.randint(64, (16,))
            learn(maker(x[at]).detach(), y[at])
        of_maker.zero_grad()
        at = torch.randint(64, (16,))
        (model(maker(x[at])) ** 2).mean().backward()
        of_maker.step()
except KeyboardInterrupt:
    pass
seen.append(maker.weight.sum().item())
""",
}
UNSEEDED = """
for step in range(300):
    at = [int.from_bytes(os.urandom(2), "big") % 64 for _ in range(16)]
    learn(x[:16], y[at])
"""
TAIL = """
result = {"seen": seen, "weights": model[0].weight.flatten().tolist(), "next": torch.rand(2).tolist()}
print(json.dumps(result))
"""


LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("bars", "two optimizers")]


@pytest.mark.parametrize(
    "kind", [pytest.param("minibatches", marks=[pytest.mark.long, pytest.mark.gallery]), *LONG]
)
def test_a_script_that_draws_by_hand_is_shared_as_it_is(stage: Any, tmp_path: Path, kind: str) -> None:
    text = HEAD + SCRIPTS[kind] + TAIL
    plain = PlainRun(stage, text, tmp_path)
    job = stage.run(text, settings={"auto": True, "checkpoint_s": 0.2}, workers=1, maximum=3)
    job.wait_for(lambda s: s["step"] >= 20)
    job.grow_and_lose_the_leader_then_all()
    result, expected = job.printed(), plain.printed()
    assert result["seen"] == pytest.approx(expected["seen"], abs=1e-8)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-9)
    assert result["next"] == expected["next"]


DEATHS = {
    "in the model's call": "model[0].register_forward_hook(lambda *_: die())",
    "in backward": "model[0].weight.register_hook(lambda g: die())",
    "after a step": "optimizer.register_step_post_hook(lambda *_: die())",
}
DYING = """
import signal

def die():
    if len(seen) == 60 and os.environ.get("SWELL_WORKER") == "w0":
        os.kill(os.getpid(), signal.SIGKILL)
"""


MOMENTS = [pytest.param(m, marks=[] if m == "in backward" else pytest.mark.long) for m in DEATHS]


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_death_of_the_leader_in_a_step_drawn_by_hand_changes_nothing(
    stage: Any, tmp_path: Path, moment: str
) -> None:
    text = HEAD + DYING + DEATHS[moment] + SCRIPTS["minibatches"] + TAIL
    plain = PlainRun(stage, text, tmp_path)
    job = stage.run(text, settings={"auto": True}, workers=3)
    job.members(3)
    job.wait_for(lambda s: len(s["members"]) == 3 and "w0" not in s["members"])
    result, expected = job.printed(), plain.printed()
    assert result["seen"] == pytest.approx(expected["seen"], abs=1e-8)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-9)


def test_workers_that_draw_other_batches_by_hand_leave_and_say_so(stage: Any) -> None:
    job = stage.run(HEAD + UNSEEDED + TAIL, settings={"auto": True}, workers=2, maximum=2, minimum=1)
    job.wait_for(lambda s: s["step"] and job.events("confined"))
    assert job.wait(120.0) == 0, job.output()
    assert "other numbers than the leader's" in job.output()
    assert "the job goes on with 1 worker" in job.output()


# ---------------------------------------------------------------------- how far loops have come

LOOPS = {
    "ranges": lambda: (range(3, 12, 2), range(5, 0, -1)),
    "numbered": lambda: (range(4), enumerate(zip(range(6), [5, 4, 3, 2, 1, 0]))),
    "collections": lambda: ((7, 8, 9), np.arange(5)),
    "an empty one beside": lambda: (["a", "b"], range(0, 1)),
    "other ones in each run": lambda: (range(3), enumerate(zip(torch.randperm(20).split(5), range(4)))),
}


def _walk(kind: str, stop: int, told: Any = None) -> tuple[list[Any], Any]:
    """Go through two loops up to a step; with `told`, from there on to the end."""
    outer, make = LOOPS[kind]()[0], lambda: LOOPS[kind]()[1]
    after, count, begun = [], 0, False
    for _ in outer:
        with torch.no_grad():
            for inner in make():
                if begun:
                    after.append(str(inner))
                    continue
                count += 1
                if told is not None:
                    assert by_hand.set_iterators(sys._getframe(), told[0], told[1])
                    begun = True
                elif count == stop:
                    begun, over = True, list[Any]()
                    told = by_hand.describe(sys._getframe(), over), dict(enumerate(over))
    return after, told


@pytest.mark.parametrize("stop", [1, 2, 7, 8])
@pytest.mark.parametrize("kind", LOOPS)
def test_loops_go_on_from_where_others_are(kind: str, stop: int) -> None:
    stop = min(stop, sum(1 for _ in LOOPS[kind]()[0])) if "empty" in kind else stop
    after, told = _walk(kind, stop)
    assert told is not None and json.loads(json.dumps(told[0])) == told[0]
    again, _ = _walk(kind, 1, told)
    same = -stop % 4 if "other" in kind else len(after)  # each run shuffles the next inner loop by itself
    assert again[:same] == after[:same] and len(again) == len(after)


def test_a_loop_over_something_unknown_is_not_described() -> None:
    for _ in {1: 2}:
        assert by_hand.describe(sys._getframe(), []) is None
    for _ in (number for number in range(2)):
        assert by_hand.describe(sys._getframe(), []) is None
    for _ in [1, 2]:
        mine = by_hand.describe(sys._getframe(), [])
    for _ in [1, 3]:
        assert not by_hand.set_iterators(sys._getframe(), mine or [], {}), "another list"


def test_what_was_drawn_from_is_found_wherever_the_script_holds_it(tmp_path: Path) -> None:
    def drawn() -> Any:
        return next(numbers)

    (tmp_path / "lines").write_text("a\nb\n")
    numbers, used_up, inside = (n for n in range(3)), iter([1]), {"inside": [iter([1, 2])]}
    begun, read = (tmp_path / "lines").open(), (tmp_path / "lines").open()
    written = (tmp_path / "log").open("w")
    assert drawn() == 0 and list(used_up) == [1] and next(begun) == "a\n" and read.read()
    found = by_hand._held_iterators()
    assert numbers in found and inside["inside"][0] in found and begun in found
    assert not {id(used_up), id(read), id(written)} & {id(item) for item in found}
    for file in (begun, read, written):
        file.close()
