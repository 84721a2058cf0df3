"""When a canary goes on, waits or goes back."""

from __future__ import annotations

import pytest

from pdserve.deploy.scaling.canary import CanaryRules, CanaryVerdict, judge, lower_bound

RULES = CanaryRules(step_s=300.0, min_requests=100, tolerance=0.02)
LATE = "above the TTFT target"


def tally(ended: int, failed: int = 0, retried: int = 0, late: int = 0) -> dict[str, int]:
    counts = {"ended": ended, "failed": failed, "retried": retried}
    return counts | {"ttft": ended, "ttft_met": ended - late}


@pytest.mark.parametrize(
    ("old", "new", "elapsed_s", "verdict", "reason"),
    [
        (tally(1000), tally(100), 300.0, CanaryVerdict.PROMOTE, "0 of 100 failed"),
        (tally(1000), tally(99), 900.0, CanaryVerdict.WAIT, "99 of 100 requests"),
        (tally(1000), tally(500), 299.0, CanaryVerdict.WAIT, "299 of 300 s"),
        # One bad request of few may be chance; many are not, and nobody waits for the rest.
        (tally(1000), tally(3, failed=1), 5.0, CanaryVerdict.WAIT, "3 of 100"),
        (
            tally(1000),
            tally(10, failed=3, retried=2),
            5.0,
            CanaryVerdict.ROLL_BACK,
            "5 of 10 requests failed",
        ),
        (
            tally(1000),
            tally(100, late=30),
            5.0,
            CanaryVerdict.ROLL_BACK,
            f"30 of 100 requests {LATE}",
        ),
        # What the old revision does as badly is not the canary's fault.
        (tally(1000, late=300), tally(100, late=30), 300.0, CanaryVerdict.PROMOTE, "30 of 100"),
        (
            tally(1000, failed=10),
            tally(1000, failed=25),
            300.0,
            CanaryVerdict.PROMOTE,
            "25 of 1000",
        ),
        # Within the tolerance and chance.
        (tally(1000), tally(100, failed=2), 300.0, CanaryVerdict.PROMOTE, "2 of 100 failed"),
        # More attempts may fail than requests end.
        (tally(1000), tally(10, retried=20), 1.0, CanaryVerdict.ROLL_BACK, "20 of 10"),
        # Nothing to compare with: the canary has to be good.
        (tally(0), tally(50, failed=10), 1.0, CanaryVerdict.ROLL_BACK, "0 of 0"),
    ],
)
def test_a_canary_is_compared_with_the_old_revision(
    old: dict[str, int], new: dict[str, int], elapsed_s: float, verdict: CanaryVerdict, reason: str
) -> None:
    found, text = judge(RULES, old, new, elapsed_s)
    assert found is verdict, text
    assert reason in text


def test_the_bound_is_below_the_share_and_comes_near_with_more_requests() -> None:
    bounds = [lower_bound(n // 10, n) for n in (10, 100, 1000, 100000)]
    assert bounds == sorted(bounds)
    assert 0.0 < bounds[0] < 0.02
    assert 0.09 < bounds[-1] < 0.1
