"""Whether prefill apart from decode helps now, against the same workers all aggregated."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.cost.replay import Pool, replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.cost.objective import Slo
    from router.cost.outcome import Outcome
    from router.cost.replay import Served

WINDOW_S = 300.0
MAX_OUTCOMES = 512
MIN_OUTCOMES = 20
# Where models and measurement differ by more of the requests than this, the models prove nothing.
MAX_DISAGREEMENT = 0.15
# Goodputs closer than this share are alike.
ALIKE = 0.02


@dataclass(frozen=True, slots=True)
class Reading:
    """What the meter says of one model. `text` says it in words.

    Goodput is the share of requests that kept both SLOs. `measured` is what they saw; `modelled`
    what the cost models make of the same requests on the workers as they are, `aggregated` on as
    many aggregated ones. `ratio` is modelled over aggregated, None where it is not known.
    `stall_s` is by how much a token would have been later for others' prompts, aggregated.
    """

    text: str
    requests: int = 0
    ratio: float | None = None
    measured: float | None = None
    modelled: float | None = None
    aggregated: float | None = None
    stall_s: float = 0.0


class Window:
    """State: the latest outcomes of one model."""

    def __init__(self) -> None:
        self._outcomes: deque[Outcome] = deque(maxlen=MAX_OUTCOMES)

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def recent(self, now: float) -> list[Outcome]:
        """By placement, those of the last WINDOW_S."""
        recent = [x for x in self._outcomes if now - x.placed_at <= WINDOW_S]
        return sorted(recent, key=lambda x: x.placed_at)


def read(
    outcomes: Sequence[Outcome], prefill: Pool | None, decode: Pool | None, slo: Slo
) -> Reading:
    """Of recent outcomes, in order of placement, on these workers."""
    count = len(outcomes)
    if prefill is None or decode is None:
        return Reading("There is no prefill worker apart from a decode worker.", count)
    if count < MIN_OUTCOMES:
        return Reading(f"Not known yet: {count} of {MIN_OUTCOMES} requests were answered.", count)
    everyone = Pool(decode.model, prefill.workers + decode.workers)
    apart, together = replay(outcomes, decode, prefill), replay(outcomes, everyone)
    if not decode.model.knows_decode or apart is None or together is None:
        return Reading("Not known yet: too little was measured of prefill and decode.", count)
    measured = statistics.fmean(_keeps(x.ttft_s, x.tpot_s, slo) for x in outcomes)
    modelled, aggregated = _goodput(apart, slo), _goodput(together, slo)
    stall_s = statistics.fmean(x.stall_s for x in together)
    if abs(measured - modelled) > MAX_DISAGREEMENT:
        text = (
            f"Not known: {measured:.0%} of the requests kept the SLOs, and the cost models would "
            f"have it {modelled:.0%}."
        )
        return Reading(text, count, None, measured, modelled, aggregated, stall_s)
    ratio = modelled / aggregated if aggregated else None
    text = _words(apart, together, slo, modelled, aggregated)
    return Reading(text, count, ratio, measured, modelled, aggregated, stall_s)


def _keeps(ttft_s: float, tpot_s: float | None, slo: Slo) -> bool:
    return ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)


def _goodput(served: Sequence[Served], slo: Slo) -> float:
    return statistics.fmean(_keeps(x.ttft_s, x.tpot_s, slo) for x in served)


def _words(
    apart: Sequence[Served],
    together: Sequence[Served],
    slo: Slo,
    modelled: float,
    aggregated: float,
) -> str:
    share = f"{modelled:.0%} of the requests keep the SLOs, aggregated {aggregated:.0%}"
    if abs(modelled - aggregated) <= ALIKE * max(modelled, aggregated):
        verdict = f"P/D makes no difference to goodput now ({share})"
    elif modelled > aggregated:
        verdict = f"P/D helps now ({share})"
    else:
        verdict = f"P/D costs goodput now ({share})"
    stall_ms = 1e3 * statistics.fmean(x.stall_s for x in together)
    sooner_ms = 1e3 * statistics.fmean(
        a.ttft_s - t.ttft_s for a, t in zip(apart, together, strict=True)
    )
    return (
        f"{verdict}: aggregated, prefill would have delayed running decodes by {stall_ms:.1f} ms a "
        f"token (limit {1e3 * slo.tpot_s:.0f} ms), and first tokens would have come "
        f"{abs(sooner_ms):.0f} ms {'sooner' if sooner_ms >= 0 else 'later'}."
    )
