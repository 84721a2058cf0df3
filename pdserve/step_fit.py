"""The least-squares fit of the costs of engine steps, from sums of pdserve/step_moments.py. Routers
predict with it, and workers share out their steps by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdserve.step_moments import FEATURES

if TYPE_CHECKING:
    from pdserve.step_moments import Moments

RIDGE = 1e-4  # keeps features that never varied apart from each other


def matrix_of(moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of products of features, and of features and seconds."""
    sums = np.array(moments.sums).reshape(FEATURES + 1, -1)
    return sums[:FEATURES, :FEATURES], sums[:FEATURES, FEATURES]


def fit_costs(xx: np.ndarray, xy: np.ndarray) -> tuple[float, ...]:
    """Return the non-negative least-squares solution for the sums `xx` and `xy`. The most
    negative coefficient is removed until there is none."""
    found = np.zeros(len(xy))
    active = np.flatnonzero(np.diag(xx) > 1e-12)
    while active.size:
        matrix = xx[np.ix_(active, active)]
        matrix = matrix + RIDGE * np.diag(np.diag(matrix))
        solved = np.linalg.solve(matrix, xy[active])
        if solved.min() >= 0:
            found[active] = solved
            break
        active = np.delete(active, solved.argmin())
    return tuple(found.tolist())
