"""Recent requests once more, through modelled workers: when first tokens would have come, and how
far apart the others. Pure; times in seconds.

A worker computes prompts one after another, in the order of arrival; whoever decodes there
meanwhile waits for each. What a decoding step takes follows from the mean batch (Little's law). It
is an estimate of means and of queues, not a simulation of steps.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.cost.step_model import Batch, prompt_work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.cost.outcome import Outcome
    from router.cost.step_model import StepModel

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Pool:
    """So many workers alike."""

    model: StepModel
    workers: int


@dataclass(frozen=True, slots=True)
class Served:
    """What one request would have seen; `stall_s` is the part of `tpot_s` that others' prompts
    add. None and 0 where it had one token."""

    ttft_s: float
    tpot_s: float | None
    stall_s: float = 0.0


class _Worker:
    """When it is free for the next prompt, and when it computed which."""

    def __init__(self) -> None:
        self.free_at = float("-inf")
        self.starts: list[float] = []
        self.spans: list[tuple[float, float, float]] = []

    def compute(self, arrived: float, seconds: float, share: float) -> float:
        """The first token's time; `share` of the seconds is due to the prompt alone."""
        start = max(arrived, self.free_at)
        self.free_at = start + seconds
        self.starts.append(start)
        self.spans.append((start, self.free_at, share))
        return self.free_at

    def stalled(self, begin: float, end: float) -> float:
        """Seconds by which those who decode from `begin` to `end` wait for prompts."""
        stalled = 0.0
        for start, stop, share in self.spans[max(0, bisect_right(self.starts, begin) - 1) :]:
            if start >= end:
                break
            stalled += share * max(0.0, min(stop, end) - max(start, begin))
        return stalled


def replay(
    outcomes: Sequence[Outcome], decode: Pool, prefill: Pool | None = None
) -> list[Served] | None:
    """`outcomes` in order of placement, served by `decode` alone, or with prefill apart for those
    that had it apart. None where the models do not know enough."""
    batch = _mean_batch(outcomes, decode)
    itl_s = decode.model.decode_step_s(batch)
    decoders = [_Worker() for _ in range(decode.workers)]
    prefillers = [_Worker() for _ in range(prefill.workers if prefill else 0)]
    firsts: list[tuple[_Worker, float]] = []
    for i, outcome in enumerate(outcomes):
        apart = prefill is not None and not outcome.is_local
        pool = prefill if prefill is not None and apart else decode
        work = prompt_work(outcome.prompt_tokens, outcome.cached_tokens)
        seconds = pool.model.prefill_s(work, Batch() if apart else batch)
        if seconds is None:
            return None
        worker = min(prefillers if apart else decoders, key=lambda x: x.free_at)
        share = pool.model.prompt_s(work) / seconds if seconds else 0.0
        first = worker.compute(outcome.placed_at, seconds, share)
        firsts.append((decoders[i % decode.workers] if apart else worker, first))
    served = []
    for outcome, (worker, first) in zip(outcomes, firsts, strict=True):
        ttft_s, gaps = first - outcome.placed_at, outcome.output_tokens - 1
        if not gaps:
            served.append(Served(ttft_s, None))
            continue
        stall_s = worker.stalled(first, first + gaps * itl_s) / gaps
        served.append(Served(ttft_s, itl_s + stall_s, stall_s))
    return served


def _mean_batch(outcomes: Sequence[Outcome], decode: Pool) -> Batch:
    """What a worker decodes at a time, on average: arrival rate times time in decoding."""
    span_s = max(1e-3, outcomes[-1].placed_at - outcomes[0].placed_at)
    tokens = sum(x.output_tokens - 1 for x in outcomes)
    context = sum(x.prompt_tokens + x.output_tokens / 2 for x in outcomes) / len(outcomes)
    reqs = 1.0
    for _ in range(_ROUNDS):
        batch = Batch(max(1, round(reqs)), round(max(1.0, reqs) * context))
        each = tokens * decode.model.decode_step_s(batch) / (span_s * decode.workers)
        reqs = min(each, len(outcomes) / decode.workers)
    return Batch(max(1, round(reqs)), round(max(1.0, reqs) * context))
