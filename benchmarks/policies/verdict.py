"""Whether a policy is ever worse than the best fixed choice by more than noise. Pure.

What is compared is how many of the same requests kept every limit (goodput without the seconds, in
which the last answer of a short round would weigh too much). A policy is worse than another, or
better, where the whole 95 % interval of their ratio lies on that side of 1. An interval that holds
1 proves neither: its width says how much could be hidden, so every line has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from benchmarks.bootstrap import Estimate, pooled_ratio
from benchmarks.metrics import summarise

if TYPE_CHECKING:
    from benchmarks.compare.result import CompareResult

Word = Literal["better", "no worse", "worse", "not known"]
_WORDS: Final = {
    "better": "better than {} by more than noise",
    "no worse": "not worse than {} by more than noise",
    "worse": "WORSE than {} by more than noise",
    "not known": "not known: too few rounds, or one in which no request of {} kept them",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one policy beside another: the ratio of requests within limits. ``is_best`` is whether the
    other had the most of those that are fixed."""

    traffic: str
    other: str
    ratio: Estimate | None
    is_best: bool

    @property
    def word(self) -> Word:
        """What the interval proves."""
        found = self.ratio
        if found is None or found.low is None or found.high is None:
            return "not known"
        if found.high < 1.0:
            return "worse"
        return "better" if found.low > 1.0 else "no worse"

    def text(self, policy: str) -> str:
        """One line."""
        other = f"{self.other}, the best fixed choice," if self.is_best else self.other
        said = f"{self.traffic}: {policy} is {_WORDS[self.word].format(other)}"
        found = self.ratio
        if found is None or found.low is None or found.high is None:
            return said
        return f"{said}: {found.value:.3f} [{found.low:.3f}, {found.high:.3f}] of its requests"


def verdicts(traffic: str, policy: str, result: CompareResult) -> list[Verdict]:
    """``policy`` beside each other arm, the best of them first."""
    kept = {arm.name: _kept(result, arm.name) for arm in result.arms}
    own = kept.pop(policy)
    names = sorted(kept, key=lambda name: -sum(kept[name]))
    found = []
    for name in names:
        pairs = list(zip(own, kept[name], strict=True))
        ratio = pooled_ratio(pairs, f"{traffic}/{name}")
        found.append(Verdict(traffic, name, ratio, name == names[0]))
    return found


def _kept(result: CompareResult, arm: str) -> list[float]:
    """In each round, how many requests kept every limit."""
    found = [(m, summarise(m.records, result.slo_s).slo) for m in result.of(arm, "round")]
    return [len(m.records) * slo.attainment for m, slo in found if slo is not None]
