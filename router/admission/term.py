"""By when a request must be granted, to keep what was promised of it. Pure.

Two things can be promised: the whole answer by a deadline, and the first token within the SLO. What
was measured says how long before that a request must be granted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded, Refusal, Unavailable
from pdserve.lean import lean

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from router.admission.drain import DrainPredictor
    from router.admission.limits import AdmissionLimits, Bid

# Among requests of one priority, one goes before another that came so many times its own predicted
# prefill earlier.
STRETCH = 4.0
# Seconds a prompt token, until prefills were measured: the order needs their ratios alone.
_ASSUMED_PREFILL_S = 0.001


@lean
@dataclass(frozen=True, slots=True)
class Term:
    """`latest_start` is infinite where nothing was promised. `due` is when its turn is, in the
    queue's order: STRETCH times its prefill after it came, or its latest start where that is
    sooner."""

    latest_start: float
    due: float
    reason: Refusal = Refusal.DEADLINE_UNREACHABLE


def term_of(bid: Bid, came: float, limits: AdmissionLimits, drain: DrainPredictor) -> Term:
    """Of a request that `came` then. The SLO counts as soon as prefills were measured."""
    measured_s = drain.prefill_s(bid.model, bid.prompt_tokens)
    prefill_s = measured_s or 0.0
    latest, reason = math.inf, Refusal.DEADLINE_UNREACHABLE
    if bid.deadline is not None:
        answer_s = drain.answer_s(bid.model, bid.max_tokens) or 0.0
        latest = bid.deadline - answer_s - prefill_s
    if bid.has_slo and limits.ttft_s and measured_s is not None:
        # However long a prompt, it may wait for as long as it takes by itself.
        alone_s = drain.prompt_s(bid.model, bid.prompt_tokens)
        promised = came + max(limits.ttft_s - prefill_s, alone_s)
        if promised < latest:
            latest, reason = promised, Refusal.SLO_UNREACHABLE
    order_s = bid.prompt_tokens * _ASSUMED_PREFILL_S if measured_s is None else measured_s
    return Term(latest, min(came + STRETCH * order_s, latest), reason)


def refusal(term: Term, late_s: float, retry_after_s: float) -> PdserveError:
    """Of a request that would be granted so much too late."""
    again = f"; try again in {retry_after_s:.0f} s"
    if term.reason is Refusal.SLO_UNREACHABLE:
        return Overloaded(
            f"the first token is predicted {late_s:.2f} s later than is promised{again}",
            retry_after_s=retry_after_s,
            reason=term.reason,
        )
    return Unavailable(
        f"the answer is predicted {late_s:.2f} s after its deadline{again}",
        retry_after_s=retry_after_s,
        reason=term.reason,
    )
