"""The modelled service that the sizes are compared on, and what is asked of it.

A prompt token takes 1 ms, a step 10 ms and 0.025 ms for each token of context of the requests that
decode, of at most 16: of no machine, but in the ratios of one, and slow, so that a large pool is
busy with few requests.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from benchmarks.simulation.arrivals import Arrival, Arrivals
from benchmarks.simulation.capacity import Lengths, saturation
from benchmarks.simulation.router_meter import RouterMeter
from benchmarks.simulation.run import Setup, simulate
from benchmarks.simulation.service import RouterSettings, Workers
from benchmarks.simulation.service_model import EngineModel, ServiceModel
from benchmarks.simulation.users import pairs_around
from benchmarks.stats import distribution
from pdserve.config import RouterConfig, SloConfig
from pdserve.types import Role
from router.cost.step_model import StepModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.simulation.flight import Outcome
    from router.admission.tenants import Tenant

PROMPT_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 32
SLO: Final = SloConfig(ttft_s=2.0, tpot_s=0.1, refuse_beyond=1.0)
_ENGINE: Final = EngineModel(
    StepModel((0.01, 1.0, 0.0, 0.0, 0.25), 100.0, 100.0, 2048, 0.0, 512), 16, 4000, 16
)
_MODEL: Final = ServiceModel(dict.fromkeys(Role, _ENGINE), transfer_base_s=0.005, overhead_s=0.001)
_PAIRS: Final = pairs_around(PROMPT_TOKENS, OUTPUT_TOKENS, 4096, 0)


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers in the ratio in which both phases are busy alike, and the requests a second that they
    can do at most, by arithmetic."""

    workers: Workers
    capacity_per_s: float


def pool_of(count: int) -> Pool:
    """Of so many workers."""
    one = saturation(_ENGINE, _ENGINE, Lengths(_PAIRS), SLO.tpot_s)
    share = one.decode_per_s / (one.decode_per_s + one.prefill_per_s)
    prefill = min(count - 1, max(1, round(count * share)))
    decode = count - prefill
    capacity = min(prefill * one.prefill_per_s, decode * one.decode_per_s)
    return Pool(Workers(prefill, decode), capacity)


def arrivals(
    rate_per_s: float, duration_s: float, change: Callable[[int, Arrival], Arrival] | None = None
) -> Arrivals:
    """Requests at random times, with deadlines that allow what the SLOs do. `change` is given each
    with its number."""
    draw = random.Random(f"scale {rate_per_s}")
    rows, at_s = list[Arrival](), 0.0
    while (at_s := at_s + draw.expovariate(rate_per_s)) < duration_s:
        prompt, output = _PAIRS[len(rows) % len(_PAIRS)]
        within_s = SLO.ttft_s + output * SLO.tpot_s
        row = Arrival(at_s, prompt, output, within_s=within_s)
        rows.append(row if change is None else change(len(rows), row))
    return Arrivals(tuple(rows), 0, ())


@dataclass(frozen=True, slots=True)
class Ran:
    """One simulation. Shares and latencies are of the requests that came after `warm_s`: `kept`
    both SLOs, `late` were let in and did not. Rates are of the first tokens between `warm_s` and
    the last arrival: `goodput_per_s` of answers within both SLOs, `in_time_per_s` of all by their
    deadlines. `decisions_per_s` are requests placed by one core;
    `try_us` is what one look for a place cost, of which `tries` were made. `busiest` is the work of
    the busiest prefill worker over the mean's."""

    policy: str
    asked_per_s: float
    goodput_per_s: float
    in_time_per_s: float
    kept: float
    refused: float
    reasons: Mapping[str, int]
    late: float
    ttft_p50_s: float
    ttft_p99_s: float
    decisions_per_s: float
    try_us: float
    tries: int
    requests: int
    cached: float
    busiest: float


def run(
    pool: Pool,
    asked: Arrivals,
    policy: str,
    warm_s: float,
    *,
    tenants: tuple[Tenant, ...] = (),
    max_queued: int | None = None,
    only: Callable[[Arrival], bool] = lambda row: True,
) -> Ran:
    """Simulate by a policy; counted are those of `only`."""
    config = RouterConfig(policy=policy, slo=SLO)
    if max_queued is not None:
        config = replace(config, max_queued_requests=max_queued)
    meter = RouterMeter()
    settings = RouterSettings(config, tenants=tenants)
    finished = simulate(Setup(_MODEL, pool.workers, settings, meter=meter), asked)
    assert not finished.leftovers, finished.leftovers
    rows = zip(asked.requests, finished.outcomes, strict=True)
    ours = [x for row, x in rows if only(row)]
    return _summed(policy, ours, warm_s, asked.requests[-1].at_s, meter)


def _summed(
    policy: str, ours: list[Outcome], warm_s: float, end_s: float, meter: RouterMeter
) -> Ran:
    found = [x for x in ours if x.arrived_s >= warm_s]
    answered = [x for x in ours if not x.error and warm_s <= x.first_s < end_s]
    span_s = end_s - warm_s
    kept = [x for x in found if x.keeps(SLO.ttft_s, SLO.tpot_s)]
    refused = [x for x in found if x.error and x.error != "deadline_exceeded"]
    good = [x for x in found if not x.error]
    first = distribution([x.ttft_s for x in good])
    work: dict[str, int] = {}
    for x in good:
        tokens = x.prompt_tokens - x.cached_tokens
        work[x.prefill_worker] = work.get(x.prefill_worker, 0) + tokens
    return Ran(
        policy=policy,
        asked_per_s=len(found) / span_s,
        goodput_per_s=sum(x.keeps(SLO.ttft_s, SLO.tpot_s) for x in answered) / span_s,
        in_time_per_s=len(answered) / span_s,
        kept=len(kept) / max(1, len(found)),
        refused=len(refused) / max(1, len(found)),
        reasons=dict(Counter(str(x.error) for x in found if x.error)),
        late=(len(found) - len(kept) - len(refused)) / max(1, len(found)),
        ttft_p50_s=0.0 if first is None else first.p50,
        ttft_p99_s=0.0 if first is None else first.p99,
        decisions_per_s=meter.per_second,
        try_us=1e6 * meter.tries_s / max(1, meter.tries),
        tries=meter.tries,
        requests=len(ours),
        cached=sum(x.cached_tokens for x in good) / max(1, sum(x.prompt_tokens for x in good)),
        busiest=max(work.values(), default=0) * len(work) / max(1, sum(work.values())),
    )
