"""What a trace looks like: rates, burstiness, lengths, and how much of its input is shared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Final

from benchmarks.stats import Distribution, distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trace import Trace

BIN_WIDTHS_S: Final = (1, 10, 60)
TOTAL_TOKEN_LIMITS: Final = (2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Burstiness:
    """Arrivals counted in whole bins of ``width_s``: the fullest and the variance, over the mean.

    ``fano`` (variance over mean) is 1 for a Poisson process.
    """

    width_s: int
    peak_to_mean: float
    fano: float


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """What an unbounded prefix cache would hit, by the trace's own block ids.

    ``token_hit`` is the share of all input tokens; ``block_hit`` that of all blocks;
    ``request_hit`` the share of requests with any hit.
    """

    block_size: int
    distinct_blocks: int
    block_hit: float
    token_hit: float
    request_hit: float


@dataclass(frozen=True, slots=True)
class Description:
    """The statistics of one trace."""

    name: str
    requests: int
    duration_s: float
    requests_per_s: float
    interarrival_cv: float
    zero_interarrivals: float
    tick_s: float | None
    burstiness: tuple[Burstiness, ...]
    input_tokens: Distribution
    output_tokens: Distribution
    single_token_outputs: int
    output_to_input: float
    reuse: PrefixReuse | None
    fits: tuple[tuple[int, float], ...]
    """The share of requests whose input and output together fit each total of tokens."""


def describe(trace: Trace) -> Description:
    """Compute the statistics of ``trace``; shares are fractions of 1.

    Rates and burstiness of a trace whose requests all arrive at once are 0.
    """
    rows = trace.requests
    arrivals = [row.arrival_s for row in rows]
    duration_s = arrivals[-1] - arrivals[0]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    inputs = [row.input_tokens for row in rows]
    outputs = [row.output_tokens for row in rows]
    totals = [row.input_tokens + row.output_tokens for row in rows]
    return Description(
        name=trace.meta.name,
        requests=len(rows),
        duration_s=duration_s,
        requests_per_s=len(rows) / duration_s if duration_s else 0.0,
        interarrival_cv=pstdev(gaps) / fmean(gaps) if duration_s else 0.0,
        zero_interarrivals=sum(gap == 0 for gap in gaps) / len(gaps) if gaps else 0.0,
        tick_s=trace.meta.tick_s,
        burstiness=tuple(
            _burstiness(arrivals, width_s) for width_s in BIN_WIDTHS_S if duration_s >= width_s
        ),
        input_tokens=_require(distribution(inputs)),
        output_tokens=_require(distribution(outputs)),
        single_token_outputs=sum(count == 1 for count in outputs),
        output_to_input=sum(outputs) / sum(inputs),
        reuse=_reuse(trace),
        fits=tuple(
            (limit, sum(total <= limit for total in totals) / len(totals))
            for limit in TOTAL_TOKEN_LIMITS
        ),
    )


def _require(found: Distribution | None) -> Distribution:
    assert found is not None, "a trace has at least one request"
    return found


def _burstiness(arrivals: Sequence[float], width_s: int) -> Burstiness:
    start_s = arrivals[0]
    counts = [0] * math.floor((arrivals[-1] - start_s) / width_s)
    for arrival_s in arrivals:
        index = math.floor((arrival_s - start_s) / width_s)
        if index < len(counts):
            counts[index] += 1
    mean = fmean(counts)
    return Burstiness(
        width_s=width_s,
        peak_to_mean=max(counts) / mean,
        fano=pstdev(counts) ** 2 / mean,
    )


def _reuse(trace: Trace) -> PrefixReuse | None:
    rows, block_size = trace.requests, trace.meta.block_size
    if block_size is None:
        return None
    seen: set[tuple[str | None, int]] = set()
    blocks = hit_blocks = hit_tokens = hit_requests = 0
    for row in rows:
        scope = trace.meta.scope_of(row)
        keys = [(scope, hash_id) for hash_id in row.hash_ids or ()]
        shared = 0
        while shared < len(keys) and keys[shared] in seen:
            shared += 1
        seen.update(keys)
        blocks += len(keys)
        hit_blocks += shared
        # The last block of a request is as long as what is left of its input.
        hit_tokens += min(shared * block_size, row.input_tokens)
        hit_requests += shared > 0
    return PrefixReuse(
        block_size=block_size,
        distinct_blocks=len(seen),
        block_hit=hit_blocks / blocks,
        token_hit=hit_tokens / sum(row.input_tokens for row in rows),
        request_hit=hit_requests / len(rows),
    )
