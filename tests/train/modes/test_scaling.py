"""Learning-rate rules at their fixed points, limits and borders."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.train.modes.noise import RULES, BatchState, adascale, legw, linear, rule, square_root

scales = st.floats(1.0, 1e4)


@pytest.mark.parametrize("name", sorted(RULES))
@given(epochs=st.floats(0.0, 1e3), warmup=st.floats(0.0, 50.0), adaptive=st.booleans())
def test_every_rule_leaves_the_tuned_batch_alone(
    name: str, epochs: float, warmup: float, adaptive: bool
) -> None:
    state = BatchState(
        scale=1.0, gain=1.0, epochs_done=epochs, warmup_epochs=warmup, adaptive_optimizer=adaptive
    )
    assert rule(name)(state) == pytest.approx(1.0)


@given(scale=scales, share=st.floats(0.0, 1.0))
def test_adascale_lies_between_constant_and_linear(scale: float, share: float) -> None:
    gain = 1.0 + share * (scale - 1.0)
    factor = adascale(BatchState(scale=scale, gain=gain))
    assert 1.0 <= factor <= linear(BatchState(scale=scale)) * (1 + 1e-12)


def test_adascale_takes_the_root_for_optimizers_that_normalise() -> None:
    assert adascale(BatchState(scale=16, gain=9.0)) == 9.0
    assert adascale(BatchState(scale=16, gain=9.0, adaptive_optimizer=True)) == 3.0


def test_linear_and_square_root() -> None:
    assert linear(BatchState(scale=8)) == 8
    assert square_root(BatchState(scale=9)) == 3


@given(scale=scales, warmup=st.floats(0.1, 20.0), epochs=st.floats(0.0, 100.0))
def test_legw_times_the_users_ramp_is_the_stretched_ramp(scale: float, warmup: float, epochs: float) -> None:
    factor = legw(BatchState(scale=scale, epochs_done=epochs, warmup_epochs=warmup))
    users = min(1.0, epochs / warmup)
    assert factor * users == pytest.approx(math.sqrt(scale) * min(1.0, epochs / (warmup * scale)), abs=1e-9)


def test_legw_is_finite_at_the_first_step() -> None:
    assert legw(BatchState(scale=4, epochs_done=0, warmup_epochs=5)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("scale", 0.0), ("scale", math.nan), ("gain", -1.0), ("epochs_done", -0.1), ("warmup_epochs", math.inf)],
)
def test_bad_fields_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        BatchState(**{"scale": 1.0, field: value})


def test_unknown_rule_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="adascale, constant, legw, linear, square_root"):
        rule("cosine")
