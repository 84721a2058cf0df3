"""Least squares from moments, with coefficients that cannot be negative. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of each diagonal element: keeps features that never varied apart from each other's cost.
RIDGE = 1e-4
_TINY = 1e-12


def fit(xx: Sequence[Sequence[float]], xy: Sequence[float]) -> tuple[float, ...]:
    """The `b` that minimises the squared error of x·b, where no cost is below nothing: as long as
    one is, the worst is taken out (to 0) and the rest is fitted anew.

    `xx` is the symmetric matrix of the sums of products, `xy` the sums of features times target. A
    feature that was never other than 0 costs 0.
    """
    if len(xy) == 2:
        return _fit_two(xx, xy)
    active = [i for i in range(len(xy)) if xx[i][i] > _TINY]
    while active:
        matrix = [[xx[i][j] for j in active] for i in active]
        for k in range(len(active)):
            matrix[k][k] *= 1.0 + RIDGE
        found = _solve(matrix, [xy[i] for i in active])
        worst = min(range(len(active)), key=lambda k: found[k])
        if found[worst] >= 0:
            by_index = dict(zip(active, found, strict=True))
            return tuple(by_index.get(i, 0.0) for i in range(len(xy)))
        del active[worst]
    return (0.0,) * len(xy)


def _fit_two(xx: Sequence[Sequence[float]], xy: Sequence[float]) -> tuple[float, float]:
    """The same, written out: each answer has lines fitted anew."""
    (a, b), (_, d) = xx
    p, q = xy
    a, d = a * (1.0 + RIDGE) if a > _TINY else 0.0, d * (1.0 + RIDGE) if d > _TINY else 0.0
    first, second = 0.0, 0.0
    if a and d:
        second = (q - b * p / a) / max(d - b * b / a, _TINY * d)
        first = (p - b * second) / a
        if first >= 0.0 and second >= 0.0:
            return first, second
    # One of the two is left: where both were there, not the worse.
    is_first = a > 0.0 and (not d or first > second)
    if is_first:
        return max(0.0, p / a), 0.0
    return 0.0, max(0.0, q / d) if d else 0.0


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Cholesky, of a positive definite matrix of a handful of rows."""
    n = len(right)
    low = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(low[i][k] * low[j][k] for k in range(j))
            if i == j:
                low[i][i] = max(rest, _TINY * matrix[i][i] or _TINY) ** 0.5
            else:
                low[i][j] = rest / low[j][j]
    y = [0.0] * n
    for i in range(n):
        y[i] = (right[i] - sum(low[i][k] * y[k] for k in range(i))) / low[i][i]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (y[i] - sum(low[k][i] * x[k] for k in range(i + 1, n))) / low[i][i]
    return x
