"""What a simulation showed, in figures. Times in seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchError
from benchmarks.stats import PERCENTILES, Distribution, distribution
from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.simulation.flight import Outcome
    from benchmarks.simulation.retries import Retries
    from benchmarks.simulation.roles import FlipMade
    from benchmarks.simulation.run import Setup
    from benchmarks.simulation.service import Service


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Workers of one role while requests came: how many there were in the end, the share of their
    time in which they computed, requests that they decoded at a time on average, prompt tokens
    computed in a second."""

    workers: int
    busy_share: float
    mean_batch: float
    prompt_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`attainment` is the share of all requests that were answered within both SLOs, and
    `goodput_per_s` how many those were a second. Latencies are of answered requests. `itl` are
    percentiles over all gaps between tokens, right to half a percent. `local_share` is the share of
    answers whose prompt was computed by the worker that decoded. `came_again` are retries of
    refused requests, of which `refused_again` were refused once more; `flips` workers that changed
    their role, and `moved` answers that went on elsewhere for it."""

    workers: str
    policy: str
    slo_ttft_s: float
    slo_tpot_s: float
    requests: int
    answered: int
    refused: Mapping[str, int]
    horizon_s: float
    rate_per_s: float
    attainment: float
    goodput_per_s: float
    output_tokens_per_s: float
    ttft: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    admission: Distribution | None
    itl: Mapping[str, float] | None
    local_share: float
    cached_share: float
    pools: Mapping[str, PoolUse]
    came_again: int = 0
    refused_again: int = 0
    flips: Sequence[FlipMade] = ()
    moved: int = 0

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(
    setup: Setup,
    service: Service,
    outcomes: Sequence[Outcome],
    horizon_s: float,
    *,
    since_s: float = 0.0,
    retries: Retries | None = None,
) -> Summary:
    """Of a simulation that has ended, and the requests that came from `since_s` to `horizon_s`. The
    pools' use counts from the start."""
    if not outcomes:
        raise BenchError("no request came in that time; raise the duration or the rate")
    config = setup.settings.config
    slo = config.slo
    good = [x for x in outcomes if not x.error]
    kept = sum(x.keeps(slo.ttft_s, slo.tpot_s) for x in outcomes)
    span_s = max(horizon_s - since_s, 1e-9)
    last_s = max((x.last_s for x in good), default=horizon_s) - since_s
    tpots = [gap for x in good if (gap := x.tpot_s) is not None]
    prompt_tokens = sum(x.prompt_tokens for x in good)
    return Summary(
        workers=str(setup.workers),
        policy=config.policy,
        slo_ttft_s=slo.ttft_s,
        slo_tpot_s=slo.tpot_s,
        requests=len(outcomes),
        answered=len(good),
        refused=dict(sorted(Counter(x.error for x in outcomes if x.error).items())),
        horizon_s=span_s,
        rate_per_s=len(outcomes) / span_s,
        attainment=kept / len(outcomes),
        goodput_per_s=kept / last_s,
        output_tokens_per_s=sum(x.output_tokens for x in good) / last_s,
        ttft=distribution([x.ttft_s for x in good]),
        tpot=distribution(tpots),
        e2e=distribution([x.last_s - x.arrived_s for x in good]),
        admission=distribution([x.admission_s for x in good]),
        itl=_percentiles(service),
        local_share=sum(x.prefill_worker == x.decode_worker for x in good) / max(1, len(good)),
        cached_share=sum(x.cached_tokens for x in good) / max(1, prompt_tokens),
        pools=_pools(service, max(horizon_s, 1e-9)),
        came_again=0 if retries is None else retries.made,
        refused_again=0 if retries is None else retries.refused.total(),
        flips=tuple(service.roles.made),
        moved=sum(bool(x.moves) for x in outcomes),
    )


def _percentiles(service: Service) -> dict[str, float] | None:
    found = {f"p{percent}": service.gaps.percentile(percent) for percent in PERCENTILES}
    known = {name: value for name, value in found.items() if value is not None}
    return known or None


def _pools(service: Service, span_s: float) -> dict[str, PoolUse]:
    pools = {}
    for role in Role:
        shifts = [x for x in service.shifts if x.role is role]
        time_s = sum(x.seconds(span_s) for x in shifts)
        if time_s:
            engines = [x.engine for x in shifts]
            pools[role.value] = PoolUse(
                sum(m.info.role is role for m in service.members.values()),
                sum(x.busy_s for x in engines) / time_s,
                sum(x.batch_s for x in engines) / time_s,
                sum(x.computed_tokens for x in engines) / span_s,
            )
    return pools
