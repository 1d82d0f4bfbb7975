"""`--auto` on loops that count the batches they draw, and go on when a pass is over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from swell.train.auto import held, loops
from swell.train.auto.catching_up import Replay
from swell.train.auto.passes import Pass
from swell.train.auto.position import Position

HEAD = """
import itertools, json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps, pace, late = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
if os.path.exists(late):
    pace = 0.0  # a newcomer: it gets the pace of the others with the other variables
torch.manual_seed(3)
x = torch.randn(210, 4)
y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 0.1 * torch.randn(210, 1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.7)
loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
done, passes = 0, 0

def learn(a, b, draw=None):
    global done
    time.sleep(pace)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(a), b)
    ahead = draw() if draw else None
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    done += 1
    return ahead
"""

LOOPS = {
    "generator": """
def endless():
    global passes
    while True:
        passes += 1
        yield from loader

batches = endless()
for step in range(steps):
    learn(*next(batches))
""",
    "again": """
batches, passes = iter(loader), 1
for step in range(steps):
    try:
        a, b = next(batches)
    except StopIteration:
        batches, passes = iter(loader), passes + 1
        a, b = next(batches)
    learn(a, b)
""",
    "ahead": """
class Batches:
    def __init__(self):
        self.renew()

    def renew(self):
        global passes
        self.batches, passes = iter(loader), passes + 1

    def draw(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.renew()
            return next(self.batches)

source = Batches()
batch = source.draw()
for step in range(steps):
    batch = learn(*batch, source.draw)
""",
    "cycle": """
for step, (a, b) in zip(range(steps), itertools.cycle(loader)):
    learn(a, b)
""",
}

CRITIC = """
maker, critic = nn.Linear(4, 1), nn.Sequential(nn.Linear(1, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
optimizer_m = torch.optim.RMSprop(maker.parameters(), lr=5e-4)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
batches = iter(loader)
for step in range(steps):
    for _ in range(3):
        try:
            _, real = next(batches)
        except StopIteration:
            batches, passes = iter(loader), passes + 1
            _, real = next(batches)
        time.sleep(pace)
        optimizer_c.zero_grad()
        loss = critic(maker(torch.randn(len(real), 4)).detach()).mean() - critic(real).mean()
        loss.backward()
        optimizer_c.step()
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.1, 0.1)
    optimizer_m.zero_grad()
    (-critic(maker(torch.randn(len(real), 4))).mean()).backward()
    optimizer_m.step()
    done += 1
"""

TAIL = """
result = {"done": done, "passes": passes, "lr": optimizer.param_groups[0]["lr"]}
print(json.dumps(result | {"weights": model[0].weight.flatten().tolist()}))
"""


def _run(stage: Any, tmp_path: Path, loop: str, steps: int, pace: float, **config: Any) -> Any:
    settings = {"auto": True, **config.pop("settings", {})}
    arguments = [str(steps), str(pace), str(tmp_path / "late")]
    return stage.run(HEAD + loop + TAIL, *arguments, settings=settings, workers=1, **config)


def _together(job: Any, count: int) -> None:
    """Change the workers, and wait until these have made some steps."""
    job.resize(count)
    begin = job.members(count)["step"]
    there = job.wait_for(lambda s: s["step"] >= begin + 4)
    assert len(there["members"]) == count


def _result(job: Any) -> dict[str, Any]:
    assert job.wait(120.0) == 0, job.output()
    assert "could not follow" not in job.output()
    lines = [line for line in job.output().splitlines() if '{"' in line]
    assert len(lines) == 1, f"only the leader speaks: {job.output()}"
    result: dict[str, Any] = json.loads(lines[0][lines[0].index('{"') :])
    return result


@pytest.fixture(scope="module")
def undisturbed(_stage: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of 300 steps on a single worker throughout; all loops draw the same batches."""
    return _result(_run(_stage, tmp_path_factory.mktemp("undisturbed"), LOOPS["again"], 300, 0.0))


@pytest.mark.parametrize(
    "kind",
    [
        "again",
        *(
            pytest.param(kind, marks=[pytest.mark.long, pytest.mark.gallery])
            for kind in ("generator", "ahead")
        ),
    ],
)
def test_a_loop_that_counts_steps_over_passes_grows_and_shrinks(
    stage: Any, tmp_path: Path, undisturbed: dict[str, Any], kind: str
) -> None:
    job = _run(stage, tmp_path, LOOPS[kind], 300, 0.005)
    job.wait_for(lambda s: s["step"] >= 40)  # in the fourth pass
    (tmp_path / "late").touch()
    for count in (2, 1, 3):
        _together(job, count)
    result = _result(job)
    assert result["done"] == 300 and result["passes"] == undisturbed["passes"]
    assert result["lr"] == pytest.approx(undisturbed["lr"])
    # The part that one who leaves had drawn ahead comes again with a later batch.
    assert result["weights"] == pytest.approx(undisturbed["weights"], abs=0.1 if kind == "ahead" else 1e-4)
    sizes = [len(e["members"]) for e in job.events("generation")]
    assert (sizes[:3], sizes[-1]) == ([1, 2, 1], 3)


@pytest.mark.parametrize(("kind", "victim"), [("generator", 1), ("again", 0), ("critic", 1)])
def test_a_loop_that_counts_steps_over_passes_survives_a_death(
    stage: Any, tmp_path: Path, undisturbed: dict[str, Any], kind: str, victim: int
) -> None:
    job = _run(stage, tmp_path, LOOPS.get(kind, CRITIC), 300, 0.005)
    job.wait_for(lambda s: s["step"] >= 40)
    (tmp_path / "late").touch()
    _together(job, 2)
    dead = job.kill(victim)
    job.wait_for(lambda s: len(s["members"]) == 2 and dead not in s["members"])
    _together(job, 1)
    result = _result(job)
    assert result["done"] == 300
    if kind != "critic":
        assert result["weights"] == pytest.approx(undisturbed["weights"], abs=0.1)


def test_a_loop_that_counts_steps_goes_on_from_a_checkpoint_when_everybody_dies(
    stage: Any, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    job = _run(stage, tmp_path, LOOPS["again"], 300, 0.005, settings={"checkpoint_s": 0.1})
    job.wait_for(lambda s: s["step"] >= 80)
    job.kill(0)
    result = _result(job)
    assert result["done"] == 300 and result["passes"] == undisturbed["passes"]
    assert result["weights"] == pytest.approx(undisturbed["weights"], abs=1e-4)


def test_a_pass_that_is_repeated_with_cycle_runs_on_one_worker_and_says_so(
    stage: Any, tmp_path: Path
) -> None:
    job = _run(stage, tmp_path, LOOPS["cycle"], 60, 0.0, minimum=1)
    assert _result(job)["done"] == 60
    assert "itertools.cycle" in job.output() and "while True: yield from loader" in job.output()
    assert [e["workers"] for e in job.events("confined")] == [1]


# ---------------------------------------------------------------------- which loops count


class _Batches:
    """A loader that notes, for each pass over it, the lines of the counting loops that draw from it."""

    def __init__(self) -> None:
        self.lines: list[list[int]] = []

    def __iter__(self) -> Any:
        return _Begun(self)


class _Begun:
    def __init__(self, owner: _Batches) -> None:
        self._owner, self._drawn = owner, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self._drawn == 0:
            found = loops.drawn_in(held.script_frames())
            self._owner.lines.append(sorted(loop.line for loop in found if loop.file.endswith("script.py")))
        self._drawn += 1
        if self._drawn > 3:
            raise StopIteration
        return self._drawn


COUNTING = {
    "the usual loops": ("for epoch in range(2):\n    for batch in loader:\n        pass", []),
    "numbered batches": ("for epoch in range(2):\n    for i, batch in enumerate(loader):\n        pass", []),
    "a function for each pass": (
        "def train():\n    for batch in loader:\n        pass\nfor epoch in range(2):\n    train()",
        [],
    ),
    "an iterator made again": (
        "it = iter(loader)\nfor step in range(7):\n    try:\n        batch = next(it)\n"
        "    except StopIteration:\n        it = iter(loader)\n        batch = next(it)",
        [2],
    ),
    "an iterator made again when it has nothing": (
        "it = iter(loader)\nfor step in range(7):\n    batch = next(it, None)\n"
        "    if batch is None:\n        it = iter(loader)\n        batch = next(it)",
        [2],
    ),
    "another loader beside": (
        "it = iter(loader)\nfor step in range(7):\n    other = next(iter([1]))\n    try:\n"
        "        batch = next(it)\n    except StopIteration:\n        it = iter(loader)\n"
        "        batch = next(it)",
        [2],
    ),
    "an endless generator": (
        "def endless():\n    while True:\n        for batch in loader:\n            yield batch\n"
        "batches = endless()\nfor step in range(7):\n    batch = next(batches)",
        [6],
    ),
    "an endless generator, numbered": (
        "def endless():\n    while True:\n        yield from loader\n"
        "for step, batch in zip(range(7), endless()):\n    pass",
        [4],
    ),
    "an endless generator whose count is a variable": (
        "def endless():\n    while True:\n        yield from loader\nstep = 0\n"
        "for batch in endless():\n    step += 1\n    if step == 7:\n        break",
        [],
    ),
    "a generator of its own iterator": (
        "def endless():\n    it = iter(loader)\n    while True:\n        try:\n            yield next(it)\n"
        "        except StopIteration:\n            it = iter(loader)\nbatches = endless()\n"
        "for step in range(7):\n    batch = next(batches)",
        [9],
    ),
    "a generator for each pass": (
        "def prepared():\n    for batch in loader:\n        yield batch\nfor epoch in range(2):\n"
        "    for i, batch in enumerate(prepared()):\n        pass",
        [],
    ),
    "a while loop": (
        "it, step = iter(loader), 0\nwhile step < 7:\n    step += 1\n    try:\n        batch = next(it)\n"
        "    except StopIteration:\n        it = iter(loader)\n        batch = next(it)",
        [],
    ),
    "a function that draws": (
        "it = iter(loader)\ndef draw():\n    global it\n    try:\n        return next(it)\n"
        "    except StopIteration:\n        it = iter(loader)\n        return next(it)\n"
        "for step in range(7):\n    draw()",
        [9],
    ),
    "an object that draws": (
        "class Source:\n    def __init__(self):\n        self.it = iter(loader)\n    def draw(self):\n"
        "        try:\n            return next(self.it)\n        except StopIteration:\n"
        "            self.it = iter(loader)\n            return next(self.it)\n"
        "source = Source()\nfor step in range(7):\n    source.draw()",
        [11],
    ),
    "a number of batches in each pass": (
        "for epoch in range(2):\n    it = iter(loader)\n    for i in range(3):\n        batch = next(it)",
        [3],
    ),
    "an iterator handed to a function": (
        "def train(batches):\n    for i in range(3):\n        next(batches)\nfor epoch in range(2):\n"
        "    it = iter(loader)\n    train(it)",
        [2],
    ),
    "inside the usual condition": (
        "if True:\n    it = iter(loader)\n    for step in range(7):\n        try:\n"
        "            batch = next(it)\n        except StopIteration:\n            it = iter(loader)\n"
        "            batch = next(it)",
        [3],
    ),
    "a reader ahead for each pass": (
        "class Ahead:\n    def __init__(self):\n        self.it = iter(loader)\n    def __iter__(self):\n"
        "        return self\n    def __next__(self):\n        return next(self.it)\n"
        "for epoch in range(2):\n    for batch in Ahead():\n        pass",
        [],
    ),
    "several batches at a time": (
        "it, step = iter(loader), 0\nwhile step < 2:\n    step += 1\n"
        "    batches = [next(it) for _ in range(1)]\n    it = iter(loader)",
        [4],
    ),
}


@pytest.mark.parametrize("name", COUNTING)
def test_loops_that_count_are_told_by_their_source(tmp_path: Path, name: str) -> None:
    source, expected = COUNTING[name]
    file, loader = tmp_path / "script.py", _Batches()
    file.write_text(source)
    exec(compile(source, str(file), "exec"), {"loader": loader, "__name__": "__main__"})
    assert len(loader.lines) >= 2, "the script comes into a second pass"
    assert loader.lines == [expected] * len(loader.lines)


def test_without_its_source_a_script_is_followed_as_if_it_counted_nothing(tmp_path: Path) -> None:
    source, _ = COUNTING["an iterator made again"]
    loader = _Batches()
    exec(compile(source, str(tmp_path / "script.py"), "exec"), {"loader": loader, "__name__": "__main__"})
    assert loader.lines[0] == []


# ---------------------------------------------------------------------- following them


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=2)


def _begin(position: Position, loader: DataLoader[Any], *inside: int, **options: Any) -> Pass:
    here = position.open(loader, Mock())
    here.drawn_in = frozenset(loops.SourceLoop("script.py", line, 0) for line in inside)
    position.begin(here, **options)
    return here


def test_passes_that_one_loop_draws_from_are_one_epoch_and_their_batches_are_counted() -> None:
    position, loader = Position(), _loader()
    first = _begin(position, loader)
    first.take()
    first.over = True
    for drawn in (1, 3):
        here = _begin(position, loader, 7)
        for _ in range(2):
            here.take()
        here.over = True
        assert (here.epoch, position.drawn) == (1, drawn + 1), "the pass before counts no batches"
    assert here.ordinal == 2
    assert position.short_of(here, position.capture() | {"drawn": 9}) == 5


def test_a_loop_that_ends_within_each_step_needs_no_count() -> None:
    position, loader = Position(), _loader()
    first = _begin(position, loader, 5, 7)
    assert first.counted
    position.stepped_in(frozenset({loops.SourceLoop("script.py", 7, 0)}))
    assert _begin(position, loader, 5, 7).counted
    assert not _begin(position, loader, 5).counted


def test_a_newcomer_may_be_in_another_pass_after_as_many_batches() -> None:
    job, newcomer, loader = Position(), Position(), _loader()
    for position, passes in ((job, 2), (newcomer, 1)):
        for _ in range(passes):
            here = _begin(position, loader, 7)
            here.take()
            here.over = True
    newcomer.restore(job.capture())
    newcomer.arrive(here)
    assert here.ordinal == 1 and newcomer.drawn == 1
    here.over = True
    assert _begin(newcomer, loader, 7).ordinal == 2, "the next pass is the job's next one"


def test_a_batch_that_was_drawn_ahead_of_the_end_of_a_pass_is_computed_in_the_next_one() -> None:
    position, loader = Position(), _loader()
    first = _begin(position, loader, 7)
    first.take()
    last = first.take()
    first.flight.popleft()
    first.over = True
    second = _begin(position, loader, 7, ahead=1)
    assert list(second.flight) == [last]
    second.take()
    assert position.next_batch() is last


def _replay(position: Position, drawn_by_job: list[int]) -> Replay:
    replay = Replay(Mock(), position)
    answers = iter(drawn_by_job)
    replay._drawn_by_job = lambda: next(answers)  # type: ignore[method-assign]
    return replay


def test_a_newcomer_waits_to_join_only_once_it_is_near_or_comes_no_nearer() -> None:
    position = Position()
    here = _begin(position, _loader(), 7)
    replay = _replay(position, [100, 140, 145])
    for drawn in (1, 99):
        here.drawn = drawn
        assert replay.is_behind()
    here.drawn = 100
    assert replay.is_behind(), "the job has made 40 more meanwhile"
    here.drawn = 140
    assert not replay.is_behind(), "the others wait for the last five"
    slow = _replay(position, [200, 290])
    assert slow.is_behind()
    here.drawn = 200
    assert not slow.is_behind(), "it is no faster than the job"


def test_gradients_are_left_out_unless_the_script_wants_those_of_its_inputs() -> None:
    model = nn.Linear(2, 1)
    job = Mock(parameters=lambda: list(model.parameters()))
    for adversarial in (False, True):
        position = Position()
        _begin(position, _loader(), 7)
        replay = Replay(Mock(), position)
        inputs = torch.ones(2, 2, requires_grad=adversarial)
        skipped = [replay.skips(model(inputs).mean(), job) for _ in range(5)]
        assert skipped == [False] * 3 + [not adversarial] * 2
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def _bar(batches: Any) -> Iterator[Any]:
    yield from batches


@pytest.mark.parametrize("wrap", [enumerate, lambda p: enumerate(_bar(p)), lambda p: _bar(enumerate(p))])
def test_an_enumerate_over_a_pass_goes_on_from_the_count_that_it_is_given(wrap: Any) -> None:
    class Begun:
        """A pass of four batches, which is set to another place when the third one is drawn."""

        drawn = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> str:
            if self.drawn == 2:
                assert loops.counts(self) == [2]
                assert loops.set_counts(self, [7]) and loops.counts(self) == [7]
            self.drawn += 1
            if self.drawn > 4:
                raise StopIteration
            return "batch"

    assert [index for index, _ in wrap(Begun())] == [0, 1, 7, 8]
    assert not loops.set_counts(Begun(), [1]), "there is none"
