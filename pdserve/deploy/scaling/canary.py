"""Comparison of a canary with the revision that it replaces. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# z-score of a one-sided 99.5 % bound: the true share is below the bound in one of 200 cases.
_Z = 2.58


class CanaryVerdict(StrEnum):
    WAIT = "wait"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """Rules for promotion. A step lasts at least `step_s`, and until the canary has ended
    `min_requests`. The canary's share of bad requests may exceed the old revision's by at most
    `tolerance`."""

    step_s: float
    min_requests: int
    tolerance: float


def judge(
    rules: CanaryRules, old: Mapping[str, int], new: Mapping[str, int], elapsed_s: float
) -> tuple[CanaryVerdict, str]:
    """Return the verdict on a canary after `elapsed_s` of a step, and the reason. `old` and `new`
    are the counts within the step (`RevisionFigures.counts`).

    The lower bound of the canary's share is compared, so that a few bad requests among few do not
    cause a rollback by chance.
    """
    theirs, ours = _shares(old), _shares(new)
    for name, (bad, of) in ours.items():
        old_bad, old_of = theirs[name]
        if lower_bound(bad, of) > old_bad / max(1, old_of) + rules.tolerance:
            text = f"{bad} of {of} requests {name}, and {old_bad} of {old_of} of the old revision"
            return CanaryVerdict.ROLL_BACK, text
    requests = new.get("ended", 0)
    text = f"{requests} of {rules.min_requests} requests, {elapsed_s:.0f} of {rules.step_s:g} s"
    if requests < rules.min_requests or elapsed_s < rules.step_s:
        return CanaryVerdict.WAIT, text
    shares = ", ".join(f"{bad} of {of} {name}" for name, (bad, of) in ours.items())
    return CanaryVerdict.PROMOTE, f"as good as the old revision: {shares}"


def _shares(counts: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return (bad requests, all requests) by criterion. A retried attempt counts as failed."""
    n = Counter(counts)
    return {
        "failed": (n["failed"] + n["retried"], n["ended"]),
        **{f"above the {x.upper()} target": (n[x] - n[f"{x}_met"], n[x]) for x in ("ttft", "tpot")},
    }


def lower_bound(bad: int, of: int) -> float:
    """Return the lower end of Wilson's interval for the share `bad / of`, with continuity
    correction (Newcombe 1998, method 4)."""
    if bad <= 0:
        return 0.0
    of, square = max(bad, of), _Z * _Z  # attempts may have failed of requests that have not ended
    root = math.sqrt(square - 1 / of + 4 * bad * (1 - bad / of) + 4 * bad / of - 2)
    return max(0.0, (2 * bad + square - _Z * root - 1) / (2 * (of + square)))
