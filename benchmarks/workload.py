"""Which requests of a trace are sent, how long they are, and their prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from benchmarks.traces import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a trace is cut to fit a model and a machine; applied in the order of the fields.

    `scale_lengths` multiplies lengths and the prefix block; longer outputs are cut to
    `max_output_tokens`; rows over `max_total_tokens` are dropped; `skip` rows are passed over
    (wrapping to the start of the trace); the next `limit` are sent.
    """

    scale_lengths: Fraction = Fraction(1)
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None
    skip: int = 0
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What shaping did to a trace. Means are in tokens; `*_before` are of the whole trace."""

    rows: int
    requests: int
    capped: int
    dropped: int
    mean_input_before: float
    mean_output_before: float
    mean_input: float
    mean_output: float
    block_size: int | None

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, mean {self.mean_input:.1f} input and "
            f"{self.mean_output:.1f} output tokens (whole trace: {self.rows} requests, "
            f"{self.mean_input_before:.1f} and {self.mean_output_before:.1f}); outputs shortened: "
            f"{self.capped}, too long and dropped: {self.dropped}"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send, each with its row number in the trace (from 0)."""

    rows: tuple[tuple[int, TraceRequest], ...]
    cut: Cut


def shape_workload(trace: Trace, shape: Shape) -> Workload:
    """Apply `shape` to a trace. Raises BenchError if nothing is left."""
    before, factor = trace.meta.block_size, shape.scale_lengths
    block_size = None if before is None else round(before * factor)
    if block_size == 0:
        raise BenchError(
            f"--scale-lengths {factor} leaves less than one token of a prefix block of {before}; "
            f"use at least 1/{before}"
        )
    cap, total = shape.max_output_tokens, shape.max_total_tokens
    kept, capped = [], 0
    for number, row in enumerate(trace.requests):
        scaled = _scale(row, factor, before, block_size)
        if cap is not None and scaled.output_tokens > cap:
            scaled, capped = replace(scaled, output_tokens=cap), capped + 1
        if total is None or scaled.input_tokens + scaled.output_tokens <= total:
            kept.append((number, scaled))
    if not kept:
        raise BenchError(
            f"no request of {trace.meta.name} fits {total} tokens; raise --max-total-tokens or "
            "lower --scale-lengths"
        )
    first = shape.skip % max(1, len(kept) - (shape.limit or len(kept)) + 1)
    sent = kept[first : None if shape.limit is None else first + shape.limit]
    cut = Cut(
        rows=len(trace.requests),
        requests=len(sent),
        capped=capped,
        dropped=len(trace.requests) - len(kept),
        mean_input_before=fmean(row.input_tokens for row in trace.requests),
        mean_output_before=fmean(row.output_tokens for row in trace.requests),
        mean_input=fmean(row.input_tokens for _, row in sent),
        mean_output=fmean(row.output_tokens for _, row in sent),
        block_size=block_size,
    )
    return Workload(tuple(sent), cut)


def _scale(
    row: TraceRequest, factor: Fraction, before: int | None, after: int | None
) -> TraceRequest:
    """Scale one row. A row with block ids keeps exactly as many blocks as it has ids."""
    if row.hash_ids is None or before is None or after is None:
        input_tokens = max(1, round(row.input_tokens * factor))
    else:
        full = ceil(row.input_tokens / before) - 1
        last = row.input_tokens - full * before
        input_tokens = full * after + max(1, round(Fraction(last * after, before)))
    output_tokens = max(1, round(row.output_tokens * factor))
    return replace(row, input_tokens=input_tokens, output_tokens=output_tokens)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of token ids that share prefixes as far as the trace says.

    The tokens of a block are a function of the trace's digest, the seed and the block's id
    (SHAKE-256), so all processes make the same.
    """

    digest: str
    seed: int
    vocab_size: int
    block_size: int | None

    def tokens(self, name: str, row: TraceRequest) -> list[int]:
        """Return the prompt of a row. `name` tells rows without block ids apart."""
        if row.hash_ids is None or self.block_size is None:
            return self._draw(f"row/{name}", row.input_tokens)
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            left = min(self.block_size, row.input_tokens - len(prompt))
            prompt += self._draw(f"block/{hash_id}", left)
        return prompt

    def _draw(self, key: str, count: int) -> list[int]:
        # Tokenizers keep special tokens at both ends of the vocabulary.
        margin = min(1000, self.vocab_size // 8)
        span = max(1, self.vocab_size - 2 * margin)
        raw = hashlib.shake_256(f"{self.digest}/{self.seed}/{key}".encode()).digest(4 * count)
        words = np.frombuffer(raw, dtype="<u4").astype(np.uint64)
        tokens: list[int] = (((words * np.uint64(span)) >> np.uint64(32)) + margin).tolist()
        return tokens
