"""Whether a canary is as good as what it is to replace: a decision without I/O."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of a normal distribution: a true share is below the bound in one of 200 cases.
_Z = 2.58


class Verdict(StrEnum):
    WAIT = "wait"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """A step lasts `step_s` and `min_requests` of the canary at least. No share of bad requests may
    be more than `tolerance` above that of the old revision."""

    step_s: float
    min_requests: int
    tolerance: float


def judge(
    rules: CanaryRules, old: Mapping[str, int], new: Mapping[str, int], elapsed_s: float
) -> tuple[Verdict, str]:
    """Return what to do with a canary after `elapsed_s` of a step, and why. `old` and `new` are
    what was counted in the step (`RevisionFigures.counts`).

    A share must be worse by more than chance: its lower bound is compared, so that a few bad
    requests among few are no reason to go back.
    """
    theirs, ours = _shares(old), _shares(new)
    for name, (bad, of) in ours.items():
        old_bad, old_of = theirs[name]
        if lower_bound(bad, of) > old_bad / max(1, old_of) + rules.tolerance:
            text = f"{bad} of {of} requests {name}, and {old_bad} of {old_of} of the old revision"
            return Verdict.ROLL_BACK, text
    requests = new.get("ended", 0)
    text = f"{requests} of {rules.min_requests} requests, {elapsed_s:.0f} of {rules.step_s:g} s"
    if requests < rules.min_requests or elapsed_s < rules.step_s:
        return Verdict.WAIT, text
    shares = ", ".join(f"{bad} of {of} {name}" for name, (bad, of) in ours.items())
    return Verdict.PROMOTE, f"as good as the old revision: {shares}"


def _shares(counts: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return bad requests and all, by what is bad. An attempt that was retried counts as failed."""
    n = Counter(counts)
    return {
        "failed": (n["failed"] + n["retried"], n["ended"]),
        **{f"above the {x.upper()} target": (n[x] - n[f"{x}_met"], n[x]) for x in ("ttft", "tpot")},
    }


def lower_bound(bad: int, of: int) -> float:
    """Return the lower end of Wilson's interval of the share of bad ones, with the correction for
    continuity (Newcombe 1998, method 4)."""
    if bad <= 0:
        return 0.0
    of, square = max(bad, of), _Z * _Z  # of a request that has not ended, attempts may have failed
    root = math.sqrt(square - 1 / of + 4 * bad * (1 - bad / of) + 4 * bad / of - 2)
    return max(0.0, (2 * bad + square - _Z * root - 1) / (2 * (of + square)))
