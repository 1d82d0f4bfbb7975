"""Interpolation of scattered measurements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.perf.profiles import Linear3D


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_scattered_points_are_interpolated_as_scipy_does(seed: int) -> None:
    from scipy.interpolate import LinearNDInterpolator

    rng = np.random.default_rng(seed)
    points, values = rng.random((60, 3)) * [16, 64, 500], rng.random((60, 2))
    ours, theirs = Linear3D(points, values), LinearNDInterpolator(points, values)
    for point in rng.random((40, 3)) * [18, 70, 550]:
        expected, found = theirs(point[None])[0], ours(*point)
        if found is None:
            assert np.isnan(expected).all()
        else:
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_grid_is_exact_at_its_points_and_bounded_between() -> None:
    grid = np.array([(x, y, z) for x in (1, 2, 4) for y in (1, 4, 8) for z in (10, 20)], dtype=np.float64)
    values = np.array([[p[0] * 2 + p[1], p[2] ** 2] for p in grid])
    table = Linear3D(grid, values)
    for point, value in zip(grid, values):
        assert table(*point) == pytest.approx(value)
    between = table(3.0, 6.0, 15.0)
    assert between is not None
    assert between[0] == pytest.approx(12.0)  # linear data stay linear
    assert 100 < between[1] < 400
    assert table(5.0, 1.0, 10.0) is None
    assert table(1.0, 1.0, 9.0) is None
