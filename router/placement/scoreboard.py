"""A scoreboard: candidates with what each scorer says of them and the weighted sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.placement.scorers import Scorer
    from router.placement.values import Candidate, Demand


@dataclass(frozen=True, slots=True)
class Weighted:
    """Scorers with weights that sum to 1. With none, all candidates score alike."""

    scorers: tuple[tuple[Scorer, float], ...] = ()

    def __post_init__(self) -> None:
        total = sum(weight for _, weight in self.scorers)
        assert not self.scorers or abs(total - 1) < 1e-9, f"weights sum to {total}"


@dataclass(frozen=True, slots=True, eq=False)
class Scoreboard:
    """`columns` hold, scorer by scorer, one figure a candidate; `totals` their weighted sum."""

    weighted: Weighted
    candidates: Sequence[Candidate]
    columns: tuple[list[float], ...]
    totals: dict[Candidate, float]


def score(
    candidates: Sequence[Candidate], weighted: Weighted, demand: Demand, cached: Mapping[str, int]
) -> Scoreboard:
    """All scorers on all candidates."""
    columns = tuple(scorer(candidates, demand, cached) for scorer, _ in weighted.scorers)
    if not columns:
        return Scoreboard(weighted, candidates, (), dict.fromkeys(candidates, 1.0))
    weights = [weight for _, weight in weighted.scorers]
    sums = [sum(map(float.__mul__, weights, row)) for row in zip(*columns, strict=True)]
    return Scoreboard(weighted, candidates, columns, dict(zip(candidates, sums, strict=True)))
