"""Piecewise linear interpolation of scattered points in three dimensions, on their Delaunay tetrahedra.

The answers are those of scipy's LinearNDInterpolator, with two differences. First, measurements lie on a
grid, where the tetrahedra on the two sides of a face may split that face along different diagonals. There
scipy's answer depends on the path of its search; ours is the mean of both. Second, scipy inverts thousands of
tiny matrices with LAPACK at its first call, which takes half a second where threads compete for cores; a 3x3
inverse written out costs nothing.
"""

from __future__ import annotations

import numpy as np

from swell.domain import FloatArray, IntArray

_SLACK = 1e-9
"""A point this far outside a tetrahedron (in barycentric coordinates) still counts as on its surface."""


class Linear3D:
    """Values at points in space, interpolated linearly inside their convex hull."""

    def __init__(self, points: FloatArray, values: FloatArray) -> None:
        """`points` is n x 3, `values` n x any number of columns."""
        from scipy.spatial import Delaunay

        corners = Delaunay(points).simplices
        origin = points[corners[:, 3]]
        a, b, c = (points[corners[:, i]] - origin for i in range(3))
        volume = np.einsum("ij,ij->i", a, np.cross(b, c))
        solid = np.abs(volume) > 1e-12 * np.ptp(points, axis=0).prod()
        corners, origin, volume = corners[solid], origin[solid], volume[solid]
        a, b, c = a[solid], b[solid], c[solid]
        # Rows of the inverse of the matrix with columns a, b, c: a point's share of each corner.
        inverse = np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], axis=1)
        self._inverse: FloatArray = inverse / volume[:, None, None]
        self._origin = origin
        self._corners = corners
        self._values = values
        spans = points[corners]
        slack = _SLACK * np.ptp(points, axis=0)
        self._low, self._high = spans.min(axis=1) - slack, spans.max(axis=1) + slack
        self._at_x: dict[float, IntArray] = {}

    def __call__(self, x: float, y: float, z: float) -> FloatArray | None:
        """The values at a point, None outside the hull."""
        at_x = self._at_x.get(x)
        if at_x is None:
            at_x = self._at_x[x] = np.flatnonzero((self._low[:, 0] <= x) & (x <= self._high[:, 0]))
        point = np.array([x, y, z], dtype=np.float64)
        near = at_x[((self._low[at_x, 1:] <= point[1:]) & (point[1:] <= self._high[at_x, 1:])).all(axis=1)]
        shares = np.einsum("nij,nj->ni", self._inverse[near], point - self._origin[near])
        shares = np.concatenate([shares, 1.0 - shares.sum(axis=1, keepdims=True)], axis=1)
        inside = shares.min(axis=1) >= -_SLACK
        if not inside.any():
            return None
        values = self._values[self._corners[near[inside]]]
        found: FloatArray = np.einsum("nc,ncv->nv", shares[inside], values).mean(axis=0)
        return found
