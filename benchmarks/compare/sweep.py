"""The search for the highest rate at which an arm still keeps its limits: decisions, no I/O.

DistServe (Zhong et al., OSDI 2024) compares systems by the highest rate at which 90 % of requests
meet both limits. From the first rate the search doubles or halves until one probe passed and one
failed, then bisects the ratio between them until they are close or the probes are used up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTAINMENT: Final = 0.9
CLOSE: Final = 1.1
_FIRST_FACTOR: Final = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate that was tried, and the share of its requests that met every limit."""

    rate_per_s: float
    attainment: float

    @property
    def passed(self) -> bool:
        """Whether enough requests met the limits."""
        return self.attainment >= ATTAINMENT


@dataclass(frozen=True, slots=True)
class Bracket:
    """What probes say together. ``passed`` is the highest rate below every failed one that passed,
    ``failed`` the lowest that failed; either is None if there is none."""

    passed: float | None
    failed: float | None


def bracket(probes: Sequence[Probe]) -> Bracket:
    """A pass at a rate above one that failed counts as luck, not as capacity."""
    failed = min((probe.rate_per_s for probe in probes if not probe.passed), default=None)
    below = [
        probe.rate_per_s
        for probe in probes
        if probe.passed and (failed is None or probe.rate_per_s < failed)
    ]
    return Bracket(max(below, default=None), failed)


def next_rate(probes: Sequence[Probe], *, first: float, limit: int) -> float | None:
    """The rate to try next; None when the search is over: ``limit`` probes, or both ends known to
    within a tenth."""
    if len(probes) >= limit:
        return None
    if not probes:
        return first
    found = bracket(probes)
    if found.failed is None:
        assert found.passed is not None
        return found.passed * _FIRST_FACTOR
    if found.passed is None:
        return found.failed / _FIRST_FACTOR
    if found.failed / found.passed <= CLOSE:
        return None
    return sqrt(found.passed * found.failed)
