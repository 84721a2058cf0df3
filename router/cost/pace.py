"""What a recent request took of each phase, on average. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.cost.outcome import Outcome

# With fewer nothing is said.
MIN_OUTCOMES = 8


@dataclass(frozen=True, slots=True)
class Pace:
    """`prompt_tokens` are those that were computed, in `prefill_s`; `first_s` is from placement to
    the first token, `decode_s` from there to the last."""

    prompt_tokens: float
    prefill_s: float
    decode_s: float
    first_s: float

    @property
    def decoding_share(self) -> float:
        """Of a request's time on its decode worker, the part in which it decodes."""
        return self.decode_s / max(self.first_s + self.decode_s, 1e-9)


def pace_of(outcomes: Sequence[Outcome]) -> Pace | None:
    """None of too few."""
    if len(outcomes) < MIN_OUTCOMES:
        return None
    return Pace(
        fmean(x.prompt_tokens - x.cached_tokens for x in outcomes),
        fmean(x.prefill_s for x in outcomes),
        fmean((x.tpot_s or 0.0) * (x.output_tokens - 1) for x in outcomes),
        fmean(x.ttft_s for x in outcomes),
    )
