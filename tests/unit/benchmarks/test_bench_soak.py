"""Which growth a soak calls a leak, and which processes it judges."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.soak.run import Samples, SoakResult
from benchmarks.soak.slopes import MIB, growth

if TYPE_CHECKING:
    from collections.abc import Callable

TIMES_S = [5.0 * n for n in range(540)]  # 45 minutes
HOUR_S = 3600.0


def noisy(level: Callable[[float], float], spread: float) -> list[float]:
    dice = random.Random(7)
    return [level(at) + dice.uniform(-spread, spread) for at in TIMES_S]


def leaks(measure: str, values: list[float]) -> bool:
    found = growth("router", measure, TIMES_S, values)
    assert found is not None
    return found.leaks


@pytest.mark.parametrize(
    ("measure", "values"),
    [
        ("memory", noisy(lambda at: 100 * MIB + 5 * MIB * at / HOUR_S, 3 * MIB)),
        # Freed in part now and then: a saw whose floor rises.
        ("memory", noisy(lambda at: 100 * MIB + 6 * MIB * at / HOUR_S + at % 60 * 1e5, 0)),
        ("descriptors", [40.0 + at // 200 for at in TIMES_S]),
        ("tasks", noisy(lambda at: 50 + at / 100, 8)),
        ("series", [300.0 + at // 20 for at in TIMES_S]),
        ("disk", noisy(lambda at: 20 * MIB + 5 * MIB * at / HOUR_S, MIB / 2)),
    ],
)
def test_a_planted_leak_is_found(measure: str, values: list[float]) -> None:
    assert leaks(measure, values)


@pytest.mark.parametrize(
    ("measure", "values"),
    [
        ("memory", noisy(lambda _: 100 * MIB, 10 * MIB)),
        # Below the limit of 1 % an hour.
        ("memory", noisy(lambda at: 400 * MIB + 3 * MIB * at / HOUR_S, 0)),
        # Above it, but no more than noise.
        ("memory", noisy(lambda at: 30 * MIB + 2 * MIB * at / HOUR_S, 0)),
        # A buffer that is made once.
        ("memory", noisy(lambda at: (100 if at < 1500 else 150) * MIB, MIB)),
        # A cache that fills.
        ("memory", noisy(lambda at: 100 * MIB + 20 * MIB * min(at / 1200, 1), MIB / 4)),
        ("memory", noisy(lambda at: 100 * MIB - 9 * MIB * at / HOUR_S, 0)),
        ("descriptors", noisy(lambda _: 40, 6)),
        ("threads", [12.0] * len(TIMES_S)),
    ],
)
def test_noise_steps_and_growth_that_fades_are_no_leak(measure: str, values: list[float]) -> None:
    assert not leaks(measure, values)


def test_too_few_samples_are_not_judged() -> None:
    assert growth("router", "memory", TIMES_S[:7], [float(n) for n in range(7)]) is None


def test_only_processes_that_live_through_the_measured_time_are_judged() -> None:
    samples = Samples()
    for n in range(20):
        found = {("router", 1, "threads"): 9.0}
        if n < 10:
            found["decode-1", 2, "threads"] = 9.0
        else:
            found["decode-1", 3, "threads"] = 9.0
        samples.add(5.0 * n, found)
    assert [(x.process, x.samples) for x in samples.slopes()] == [("router (1)", 20)]


@pytest.mark.parametrize(
    ("ends", "leak", "passed"),
    [
        ({"ok": 2000, "failed": 2}, False, True),
        ({"ok": 2000, "failed": 3}, False, False),
        ({"ok": 2000}, True, False),
    ],
)
def test_a_soak_fails_by_a_leak_or_by_lost_requests(
    ends: dict[str, int], leak: bool, passed: bool
) -> None:
    values = [float(at if leak else 1) for at in TIMES_S]
    slopes: list[Any] = [growth("router", "tasks", TIMES_S, values)]
    result = SoakResult(60.0, {"stream": ends}, [], 3, 1, slopes)
    assert result.passed is passed
    assert result.to_json()["passed"] is passed
