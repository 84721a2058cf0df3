"""The four questions that are put to a pool of a size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from benchmarks.simulation.scale.pool import PROMPT_TOKENS, arrivals, run
from router.admission.tenants import Tenant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.simulation.arrivals import Arrival, Arrivals
    from benchmarks.simulation.scale.pool import Pool, Ran

LOAD: Final = 0.8
POLICIES: Final = ("slo_aware", "round_robin", "least_loaded")
RAMP: Final = (0.5, 1.0, 1.5, 2.0)
TENANTS: Final = 10
GREED: Final = 10
# Seconds of work that a long queue holds.
QUEUE_S: Final = 5.0
BLOCK_TOKENS: Final = 64
# Of the requests that share nothing with all the others so many share a beginning.
TURNS: Final = 8


def policies(pool: Pool, duration_s: float = 5.0, warm_s: float = 2.5) -> Iterator[tuple[str, Ran]]:
    """The same requests by each policy."""
    asked = arrivals(LOAD * pool.capacity_per_s, duration_s)
    for policy in POLICIES:
        yield f"{LOAD:g} x", run(pool, asked, policy, warm_s)


def ramp(
    pool: Pool, duration_s: float = 10.0, warm_s: float = 6.0, *, max_queued: int | None = None
) -> Iterator[tuple[str, Ran]]:
    """More and more requests, up to twice what can be done. Nobody comes again who was refused; it
    takes the router some seconds to learn that, in which it keeps places for them."""
    for load in RAMP:
        asked = arrivals(load * pool.capacity_per_s, duration_s)
        yield f"{load:g} x", run(pool, asked, "slo_aware", warm_s, max_queued=max_queued)


def greedy(pool: Pool, duration_s: float = 7.0, warm_s: float = 4.0) -> Iterator[tuple[str, Ran]]:
    """Ten tenants of one weight, of whom nine ask for 0.8 of their shares, and one for ten times
    its own. Counted are the nine: as one crowd with the tenth, told apart, with a queue that
    does not fill, and with a cap on the requests that each may have open: its share of the seats.
    """
    others = LOAD * (TENANTS - 1) / TENANTS
    load = others + GREED / TENANTS
    every = round(1000 * others / load)

    def named(index: int, row: Arrival) -> Arrival:
        # Evenly mixed, by a pattern that does not run along with the lengths.
        is_other = index * 619 % 1000 < every
        return replace(row, tenant=f"t{1 + index % (TENANTS - 1)}" if is_other else "greedy")

    asked = arrivals(load * pool.capacity_per_s, duration_s, named)
    crowd = replace(asked, requests=tuple(replace(x, tenant="") for x in asked.requests))
    ours = {x.at_s for x in asked.requests if x.tenant != "greedy"}
    names = ("greedy", *(f"t{1 + i}" for i in range(TENANTS - 1)))
    seats = pool.workers.decode * 16 // TENANTS
    apart = tuple(Tenant(name) for name in names)
    capped = tuple(Tenant(name, max_concurrent_requests=seats) for name in names)
    calm = replace(asked, requests=tuple(x for x in asked.requests if x.at_s in ours))

    def is_ours(row: Arrival) -> bool:
        return row.at_s in ours

    long = round(QUEUE_S * pool.capacity_per_s)
    for what, rows, tenants, queue in (
        ("the nine alone", calm, apart, None),
        ("as one crowd", crowd, (), None),
        ("by weights", asked, apart, None),
        ("weights, long queue", asked, apart, long),
        ("weights and caps", asked, capped, None),
    ):
        ran = run(pool, rows, "slo_aware", warm_s, tenants=tenants, max_queued=queue, only=is_ours)
        yield what, ran


def hot_prefix(
    pool: Pool, duration_s: float = 5.0, warm_s: float = 2.5
) -> Iterator[tuple[str, Ran]]:
    """Half of the requests begin with the same 384 tokens; of the others every eight share."""
    asked = _sharing(LOAD * pool.capacity_per_s, duration_s)
    for policy in ("slo_aware", "prefix_aware", "least_loaded"):
        yield "half share one", run(pool, asked, policy, warm_s)


def _sharing(rate_per_s: float, duration_s: float) -> Arrivals:
    blocks = PROMPT_TOKENS * 3 // 4 // BLOCK_TOKENS
    groups = max(1, int(rate_per_s * duration_s / 2 / TURNS))

    def shared(index: int, row: Arrival) -> Arrival:
        group = 0 if index % 2 else 1 + index // 2 % groups
        prefix = tuple(range(group * blocks, (group + 1) * blocks))
        tokens = max(row.prompt_tokens, blocks * BLOCK_TOKENS + 1)
        return replace(row, prefix=prefix, prompt_tokens=tokens)

    return replace(arrivals(rate_per_s, duration_s, shared), block_tokens=BLOCK_TOKENS)
