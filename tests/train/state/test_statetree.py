"""Training state survives the trip through JSON and raw tensors with its types."""

import json
import math
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swell.train.state.statetree import UnsupportedState, describe, join, split

keys = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text(max_size=2)),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
    st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])]),
    st.sets(st.integers(), max_size=3),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=20,
)


def _trip(state: Any) -> Any:
    document, tensors = split(state)
    return join(json.loads(json.dumps(document, allow_nan=False)), tensors)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(x, b[k]) for k, x in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    return bool(a == b)


@given(trees)
def test_any_tree_comes_back_with_its_types(tree: Any) -> None:
    assert _same(_trip(tree), tree)


@given(st.dictionaries(st.sampled_from(["$", "v", "$v", "key"]), leaves))
def test_keys_that_look_like_our_tags_are_safe(tree: dict[str, Any]) -> None:
    assert _same(_trip(tree), tree)


def test_floats_that_json_lacks() -> None:
    back = _trip([math.nan, math.inf, -math.inf, -0.0])
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, back[3]) == -1
    number = _trip([complex(math.nan, -math.inf)])[0]
    assert math.isnan(number.real) and number.imag == -math.inf


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.float32, np.bool_, np.float64])
def test_numpy_arrays_and_scalars(dtype: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = _trip({"array": array, "scalar": array[1, 1]})
    assert back["array"].dtype == array.dtype
    assert np.array_equal(back["array"], array)
    assert type(back["scalar"]) is type(array[1, 1])
    assert back["scalar"] == array[1, 1]


def test_tensors_are_named_by_their_path_and_not_copied() -> None:
    weight = torch.randn(3, 2)
    document, tensors = split(
        {"model": {"0.weight": weight}, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}}
    )
    assert list(tensors) == ["model.0.weight", "optimizer.state.0.step"]
    assert tensors["model.0.weight"].data_ptr() == weight.data_ptr()
    assert describe(document)["model.0.weight"] == (torch.float32, (3, 2))
    assert describe(document)["optimizer.state.0.step"] == (torch.float32, ())


def test_two_tensors_under_one_dotted_path_stay_apart() -> None:
    state = {0: torch.tensor(1), "0": torch.tensor(2), "a.b": torch.tensor(3), "a": {"b": torch.tensor(4)}}
    back = _trip(state)
    assert [int(back[0]), int(back["0"]), int(back["a.b"]), int(back["a"]["b"])] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[3],
        ),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_optimizers_and_schedulers_go_on_exactly_as_before(kind: Any, schedule: Any) -> None:
    def build() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = kind(model.parameters(), lr=0.05)
        return model, optimizer, schedule(optimizer)

    def run(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
        for i in steps:
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), float(i))).square().mean()
            loss.backward()
            optimizer.step()
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss.item())
            else:
                scheduler.step()

    whole = build()
    run(*whole, range(8))
    first, second = build(), build()
    run(*first, range(4))
    for old, new, state in zip(first, second, _trip([part.state_dict() for part in first])):
        assert type(old) is type(new)
        new.load_state_dict(state)
    run(*second, range(4, 8))
    for key, value in whole[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[key])
    assert second[1].param_groups[0]["lr"] == whole[1].param_groups[0]["lr"]


def test_random_states_of_python_numpy_and_torch() -> None:
    states = {
        "python": random.getstate(),
        "numpy": np.random.default_rng(1).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    legacy = np.random.RandomState(3).get_state()
    back = _trip({**states, "legacy": legacy})
    random.setstate(back["python"])
    torch.set_rng_state(back["torch"])
    fresh = np.random.default_rng(2)
    fresh.bit_generator.state = back["numpy"]
    assert fresh.random() == np.random.default_rng(1).random()
    old = np.random.RandomState()
    old.set_state(back["legacy"])
    assert old.rand() == np.random.RandomState(3).rand()


@pytest.mark.parametrize("bad", [object(), lambda: 0, Path("x"), np.array([object()])])
def test_what_needs_pickle_is_refused_with_its_path(bad: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"user\.things\.1: got"):
        split({"user": {"things": [1, bad]}})


def test_sparse_tensors_are_refused_with_their_path() -> None:
    with pytest.raises(UnsupportedState, match=r"grad: got a tensor of layout"):
        split({"grad": torch.eye(2).to_sparse()})
