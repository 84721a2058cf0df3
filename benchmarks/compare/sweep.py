"""The search for the highest rate at which 90 % of requests meet both limits.

DistServe (Zhong et al., OSDI 2024) compares systems by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Final

from benchmarks.metrics import summarise

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.compare.result import Measurement

ATTAINMENT: Final = 0.9
CLOSE: Final = 1.1  # the search ends when the passed and the failed rate are so close


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate, and the share of its requests that met every limit."""

    rate_per_s: float
    attainment: float

    @property
    def passed(self) -> bool:
        return self.attainment >= ATTAINMENT


def probes_of(measurements: Iterable[Measurement], slo_s: Mapping[str, float]) -> list[Probe]:
    found = []
    for measurement in measurements:
        slo = summarise(measurement.records, slo_s).slo
        assert slo is not None, "the command line refuses a sweep without limits"
        found.append(Probe(measurement.rate_per_s, slo.attainment))
    return found


def bracket(probes: Sequence[Probe]) -> tuple[float | None, float | None]:
    """Return the highest rate below every failure that passed, and the lowest that failed."""
    failed = min((x.rate_per_s for x in probes if not x.passed), default=None)
    below = [x.rate_per_s for x in probes if x.passed and (failed is None or x.rate_per_s < failed)]
    return max(below, default=None), failed


def next_rate(probes: Sequence[Probe], *, first: float, limit: int) -> float | None:
    """Return the rate to try next, or None when the search is over.

    It doubles or halves until one probe passed and one failed, then bisects their ratio.
    """
    if len(probes) >= limit:
        return None
    passed, failed = bracket(probes)
    if passed is None:
        return first if failed is None else failed / 2
    if failed is None:
        return passed * 2
    return None if failed / passed <= CLOSE else sqrt(passed * failed)
