"""What a script holds under `--auto` travels to newcomers: scores, averages, collections, its own objects."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import enum
import json
import random
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from swell.train.auto import held
from swell.train.auto.held import Data, Holder, OfRuntime
from swell.train.auto.packing import Packer, Unpacker
from swell.train.state import statetree


class Meter:
    kinds = 0

    def __init__(self) -> None:
        self.total, self.seen = 0.0, collections.deque([1], maxlen=3)
        self.me = self


@dataclasses.dataclass(frozen=True)
class Point:
    x: float


class Best(NamedTuple):
    score: float
    weights: torch.Tensor


class Phase(enum.Enum):
    WARM = 1
    TRAIN = 2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class Scores(dict[str, float]):
    """A collection of the script's own, with an attribute."""


def counter() -> Any:
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count

    return call


def _runtime(model: nn.Module | None = None, *optimizers: Any) -> OfRuntime:
    return OfRuntime(model or nn.Linear(1, 1), optimizers)


def _travel(
    theirs: dict[str, Any],
    mine: dict[str, Any],
    runtimes: tuple[OfRuntime, OfRuntime] | None = None,
    data: Data | None = None,
) -> Unpacker:
    """Put what one worker holds into another one, through what travels between them."""
    one, other = runtimes or (_runtime(), _runtime())
    packed = Packer(one, data or Data()).pack([Holder("0:main", theirs, Mock(), must=True)])
    document, tensors = statetree.split(packed)
    sent = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    unpacker = Unpacker(statetree.join(json.loads(json.dumps(document)), sent), other)
    unpacker.unpack([Holder("0:main", dict(mine), mine.__setitem__, must=True)])
    return unpacker


def test_everything_that_can_be_copied_travels() -> None:
    group = collections.defaultdict(list, {3: [np.float64(0.5)], (1, "a"): [float("nan")]})
    theirs: dict[str, Any] = {
        "best": np.float64(0.9),
        "average": {"weight": torch.ones(2, 2), "steps": torch.tensor(3)},
        "recent": collections.deque([0.1, 0.2], maxlen=2),
        "group": group,
        "counts": collections.Counter("aab"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "table": np.arange(6.0).reshape(2, 3),
        "names": np.array(["x", "yy"]),
        "flags": {True, 2},
        "frozen": frozenset({"q"}),
        "history": [float(i) / 3 for i in range(5_000)],
        "point": Point(0.25),
        "tuple": Best(0.5, torch.full((2,), 7.0)),
        "phase": Phase.TRAIN,
        "slotted": Slotted(4),
        "when": datetime.timedelta(seconds=5),
        "shape": torch.Size([2, 3]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": nn.Parameter(torch.ones(3)),
        "raw": b"\x00\xff",
        "large": 2**80,
        "sum": torch.ones((), requires_grad=True) * 2,
    }
    mine: dict[str, Any] = {"best": -1.0, "average": None, "table": np.zeros((2, 3))}
    table = mine["table"]
    found = _travel(theirs, mine)
    assert found.lacks == [] and found.keeps == []
    assert isinstance(mine["best"], np.float64) and mine["best"] == 0.9
    assert torch.equal(mine["average"]["weight"], torch.ones(2, 2)) and mine["average"]["steps"] == 3
    assert mine["recent"] == theirs["recent"] and mine["recent"].maxlen == 2
    assert mine["group"][3] == [0.5] and np.isnan(mine["group"][1, "a"][0]) and mine["group"]["new"] == []
    assert mine["counts"] == theirs["counts"] and type(mine["counts"]) is collections.Counter
    assert list(mine["ordered"].items()) == [("b", 1), ("a", 2)]
    assert mine["table"] is table and table[1, 2] == 5.0, "it is changed in place"
    assert mine["names"].tolist() == ["x", "yy"] and mine["history"] == theirs["history"]
    for name in ("flags", "frozen", "point", "phase", "when", "shape", "raw", "large"):
        assert mine[name] == theirs[name] and type(mine[name]) is type(theirs[name]), name
    assert mine["tuple"].score == 0.5 and mine["tuple"].weights.tolist() == [7.0, 7.0]
    assert mine["slotted"].value == 4 and torch.equal(mine["half"], theirs["half"])
    assert isinstance(mine["parameter"], nn.Parameter) and mine["sum"] == 2.0


def test_objects_stay_what_the_rest_of_the_script_refers_to() -> None:
    theirs: dict[str, Any] = {"meter": Meter(), "scores": Scores(a=1.0), "next": counter()}
    theirs["meter"].total, theirs["meter"].best = 2.5, 0.5
    theirs["also"], theirs["list"] = theirs["meter"], [theirs["meter"], [1]]
    theirs["meter"].seen.extend([2, 3, 4])
    theirs["scores"].note = "n"
    theirs["next"]()
    mine: dict[str, Any] = {"meter": Meter(), "scores": Scores(), "next": counter(), "list": [None, [0]]}
    meter, inner, scores, call = mine["meter"], mine["list"][1], mine["scores"], mine["next"]
    meter.gone = 1
    _travel(theirs, mine)
    assert mine["meter"] is mine["also"] is mine["list"][0] is meter is meter.me, "what was one is one"
    assert (meter.total, meter.best, list(meter.seen)) == (2.5, 0.5, [2, 3, 4]) and not hasattr(meter, "gone")
    assert mine["list"][1] is inner and inner == [1]
    assert mine["scores"] is scores == {"a": 1.0} and scores.note == "n"  # type: ignore[attr-defined]
    assert mine["next"] is call and call() == 2, "what a function has counted"


def test_a_function_of_torch_that_the_script_has_replaced_stays_the_one_that_it_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the script's replacement would call itself."""
    kept = nn.functional.cross_entropy
    mine = {"kept": kept, "other": None}
    theirs = {"kept": kept, "other": kept}
    monkeypatch.setattr(nn.functional, "cross_entropy", lambda *a, **k: kept(*a, **k))
    _travel(theirs, mine)
    assert mine == {"kept": kept, "other": kept}


def test_a_batch_that_is_a_part_of_the_data_does_not_change_them() -> None:
    theirs, mine = torch.arange(400_000.0), torch.arange(400_000.0)
    order, own = np.arange(8)[::-1].copy(), np.arange(8)
    ours = {"data": mine, "batch": mine[:5], "order": own, "part": own[:2]}
    found = dict(ours)
    _travel({"data": theirs, "batch": theirs[20:25], "order": order, "part": order[4:6]}, found)
    assert found["batch"].tolist() == [20.0, 21.0, 22.0, 23.0, 24.0] and found["part"].tolist() == [3, 2]
    assert mine[:5].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and found["order"].tolist() == order.tolist()


def test_what_was_one_only_in_the_newcomer_is_two_afterwards() -> None:
    both = [0]
    mine: dict[str, Any] = {"a": both, "b": both}
    _travel({"a": [1], "b": [2]}, mine)
    assert mine == {"a": [1], "b": [2]} and mine["a"] is both
    loop: list[Any] = []
    loop.append((loop, "x"))
    mine = {}
    _travel({"loop": loop}, mine)
    assert mine["loop"][0][0] is mine["loop"]


def test_generators_of_random_numbers_go_on_where_theirs_are() -> None:
    def made(seed: int) -> dict[str, Any]:
        torch_generator = torch.Generator().manual_seed(seed)
        state = np.random.RandomState(seed)
        return {"a": random.Random(seed), "b": np.random.default_rng(seed), "c": torch_generator, "d": state}

    def draw(of: dict[str, Any]) -> list[float]:
        return [of["a"].random(), of["b"].random(), float(torch.rand(1, generator=of["c"])), of["d"].rand()]

    theirs, mine, none = made(1), made(2), {}  # type: ignore[var-annotated]
    draw(theirs)
    mine_before = dict(mine)
    _travel(theirs, mine)
    _travel(theirs, none)
    assert all(mine[name] is mine_before[name] for name in mine)
    assert draw(theirs) == draw(mine) == draw(none)


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def test_what_the_runtime_moves_is_only_referred_to() -> None:
    model, optimizer = _trained()
    own, own_optimizer = _trained()
    theirs = {
        "model": model,
        "optimizer": optimizer,
        "first": model[0],
        "states": model.state_dict(),
        "parameters": list(model.parameters()),
        "view": model[0].weight.data.T,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5),
        "ema": torch.optim.swa_utils.AveragedModel(model),
        "best": copy.deepcopy(model),
        "best_states": copy.deepcopy(model.state_dict()),
    }
    theirs["ema"].update_parameters(model)
    for _ in range(3):
        optimizer.step()
        theirs["scheduler"].step()
    for tensor in theirs["best"].state_dict().values():
        tensor.fill_(4)
    mine = {
        "model": own,
        "optimizer": own_optimizer,
        "parameters": [],
        "view": own[0].weight.data.T,
        "scheduler": torch.optim.lr_scheduler.StepLR(own_optimizer, 5),
        "ema": torch.optim.swa_utils.AveragedModel(own),
        "best": None,
        "best_states": own.state_dict(),  # of the model itself, unlike theirs
    }
    before = [p.detach().clone() for p in own.parameters()]
    scheduler, ema, view = mine["scheduler"], mine["ema"], mine["view"]
    found = _travel(theirs, mine, (_runtime(model, optimizer), _runtime(own, own_optimizer)))
    assert found.lacks == []
    assert mine["model"] is own and mine["first"] is own[0] and mine["optimizer"] is own_optimizer
    assert all(a is b for a, b in zip(mine["parameters"], own.parameters()))
    assert mine["states"]["0.weight"].data_ptr() == own[0].weight.data_ptr()
    assert mine["view"] is view and mine["scheduler"] is scheduler and scheduler.last_epoch == 3
    assert mine["ema"] is ema and ema.n_averaged == 1
    assert torch.equal(ema.module[0].weight, theirs["ema"].module[0].weight)
    assert type(mine["best"]) is nn.Sequential and mine["best"] is not own and mine["best"][1].bias[0] == 4
    assert torch.equal(mine["best_states"]["0.weight"], model[0].weight)
    for parameter, value in zip(own.parameters(), before):
        assert torch.equal(parameter, value), "the model is not written to"


def test_data_that_did_not_change_stay_and_what_changed_travels() -> None:
    samples = [{"text": str(i)} for i in range(2_000)]
    theirs: dict[str, Any] = {
        "samples": samples,
        "images": np.zeros((600, 600)),
        "inputs": torch.zeros(600, 600),
        "weights": torch.zeros(600, 600),
        "curve": [0.0] * 2_000,
        "words": {str(i): i for i in range(2_000)},
    }
    survey = Packer(_runtime(), None)
    survey.pack([Holder("0:main", theirs, Mock())])
    assert len(survey.large) == 6
    data = Data()
    data.note(survey.large)
    mine = copy.deepcopy(theirs)
    mine["samples"][0]["text"] = mine["images"][0, 0] = mine["inputs"][0, 0] = 5  # to see what stays
    mine["words"]["0"] = 5
    theirs["weights"] += 1
    theirs["curve"].append(1.0)
    found = _travel(theirs, mine, data=data)
    assert found.lacks == []
    assert (
        mine["samples"][0]["text"] == mine["images"][0, 0] == mine["inputs"][0, 0] == mine["words"]["0"] == 5
    )
    assert mine["weights"][0, 0] == 1 and mine["curve"] == theirs["curve"]
    theirs["images"][0, 0] = theirs["words"]["0"] = 7
    _travel(theirs, mine, data=data)
    assert mine["images"][0, 0] == mine["words"]["0"] == 7


def test_tools_of_a_process_are_each_workers_own_and_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    class Local:  # a class that no other process finds by its name
        pass

    with (tmp_path / "a").open("w") as log, (tmp_path / "b").open("w") as other:
        theirs: dict[str, Any] = {"log": log, "batches": iter([1]), "pattern": [Local()], "place": Local()}
        theirs["step"] = 3
        mine: dict[str, Any] = {"log": other, "place": Local(), "pattern": None}
        place = mine["place"]
        found = _travel(theirs, mine)
        assert mine["log"] is other and mine["place"] is place and mine["step"] == 3
    assert len(found.lacks) == 1 and "main: pattern[0] is a " in found.lacks[0] and "Local" in found.lacks[0]
    assert len(found.keeps) == 1 and "batches" in found.keeps[0]


def test_a_table_of_results_travels() -> None:
    pandas = pytest.importorskip("pandas")
    theirs = pandas.DataFrame(
        {"epoch": [0, 1], "loss": [0.5, float("nan")], "note": ["a", None]}, index=[3, 7]
    )
    mine: dict[str, Any] = {"table": pandas.DataFrame({"epoch": [0]}), "new": None, "empty": 1}
    table = mine["table"]
    found = _travel({"table": theirs, "new": theirs, "empty": pandas.DataFrame()}, mine)
    assert found.lacks == [] and mine["table"] is table is mine["new"]
    pandas.testing.assert_frame_equal(table, theirs)
    assert len(mine["empty"]) == 0
    table.loc[9] = [2, 0.25, "b"]
    assert table["epoch"].tolist() == [0, 1, 2]


def test_what_is_nested_too_deep_is_said_and_not_cut_in_silence() -> None:
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    assert _travel({"nested": nested}, {"nested": copy.deepcopy(nested)}).lacks


def _named(frames: list[Any]) -> list[Any]:
    return [frame for frame in frames if frame.f_code.co_name.startswith("test_")]


def test_variables_of_calls_modules_and_classes_are_set_in_place() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.rate, self.calls = nn.Linear(1, 1), 0.5, 0

    epoch, best, model = 3, 0.5, Net()

    def places() -> list[Holder]:
        return held.places(_named(held.script_frames()), [], model)

    runtime = _runtime(model)
    Meter.kinds, model.calls = 6, 8
    packed = copy.deepcopy(
        Packer(runtime, Data()).pack([p for p in places() if p.name != f"module {__name__}"])
    )
    Meter.kinds, model.calls, epoch, best = 0, 0, 0, 0.0
    Unpacker(packed, runtime).unpack(places())
    assert (epoch, best, Meter.kinds, model.calls, model.rate) == (3, 0.5, 6, 8, 0.5)
    Meter.kinds = 0


BEST = """
    import collections, copy, os, sys, time
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    epochs, folder = int(sys.argv[1]), sys.argv[2]

    class Keeper:
        def __init__(self):
            self.best, self.bad = np.float64(np.inf), 0

        def improves(self, score):
            if score < self.best:
                self.best, self.bad = score, 0
                return True
            self.bad += 1
            return False

    torch.manual_seed(0)
    x = torch.randn(80, 4)
    y = x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    train = DataLoader(TensorDataset(x, y), batch_size=20)

    def main():
        keeper, recent, by_kind = Keeper(), collections.deque(maxlen=5), collections.defaultdict(list)
        average = {k: v.clone() for k, v in model.state_dict().items()}
        errors, best_average = np.zeros(epochs), None
        for epoch in range(epochs):
            for a, b in train:
                time.sleep(0.01)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(a), b).backward()
                optimizer.step()
                average = {k: 0.9 * v + 0.1 * model.state_dict()[k] for k, v in average.items()}
            with torch.no_grad():
                score = np.mean([nn.functional.mse_loss(model(x), y).item() + 4.0 * (epoch >= 20)])
            recent.append(score)
            by_kind[epoch % 2].append(score)
            errors[epoch] = score
            if keeper.improves(score):
                best_average = copy.deepcopy(average)
                torch.save({"epoch": epoch, "score": float(score)}, f"{folder}/best.pt")
        torch.save(
            {
                "average": average, "best_average": best_average, "bad": keeper.bad,
                "recent": [float(r) for r in recent], "errors": torch.tensor(errors),
                "kinds": [len(by_kind[0]), len(by_kind[1])],
            },
            f"{folder}/end.pt",
        )

    main()
"""


def _end(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return torch.load(folder / "best.pt"), torch.load(folder / "end.pt")


def test_a_newcomer_that_leads_goes_on_with_scores_averages_and_collections(
    stage: Any, tmp_path: Path
) -> None:
    """From epoch 20 on every score is worse, so a leader that has forgotten the best would overwrite it."""
    folders = [tmp_path / "plain", tmp_path / "changing"]
    for folder in folders:
        folder.mkdir()
    job = stage.run(BEST, "40", str(folders[0]), workers=1, settings={"auto": True})
    assert job.wait() == 0, job.output()
    job = stage.run(BEST, "40", str(folders[1]), workers=1, settings={"auto": True})
    job.wait_for(lambda s: s["epoch"] >= 22)
    job.resize(2)
    job.members(2)
    job.kill(0)
    job.members(2)
    assert job.wait() == 0, job.output()
    assert "could not follow" not in job.output()
    (best, end), (changed_best, changed_end) = map(_end, folders)
    assert changed_best["epoch"] == best["epoch"] == 19, "the best file is not overwritten by a worse one"
    for name in ("bad", "kinds"):
        assert changed_end[name] == end[name], name
    assert changed_end["recent"] == pytest.approx(end["recent"], abs=1e-2)
    assert torch.allclose(changed_end["errors"], end["errors"], atol=1e-2)
    for name in ("average", "best_average"):
        for key, value in end[name].items():
            assert torch.allclose(changed_end[name][key], value, atol=1e-2), (name, key)
