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

    def notes(self) -> list[str]:
        lines = []
        if self.capped:
            lines.append(f"shortened the output of {self.capped} of {self.rows} requests")
        if self.dropped:
            lines.append(f"dropped {self.dropped} of {self.rows} requests that are too long")
        lines.append(
            f"{self.requests} requests, mean {self.mean_input:.1f} input and "
            f"{self.mean_output:.1f} output tokens (whole trace: {self.rows} requests, "
            f"{self.mean_input_before:.1f} and {self.mean_output_before:.1f})"
        )
        return lines


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


class PromptMaker:
    """Makes prompts of token ids that share prefixes exactly as far as the trace says.

    The tokens of a block are a function of the trace's digest, the seed and the block's id
    (SHAKE-256), so all processes make the same. The first two tokens are overwritten by the block's
    number among the blocks seen after the same prefix: prompts that differ in a block differ in
    its first token. State: those numbers. Rows asked for in the same order get the same prompts.
    """

    def __init__(self, digest: str, *, seed: int, vocab_size: int, block_size: int | None) -> None:
        if vocab_size < 16:
            raise BenchError(f"vocab_size is {vocab_size}; prompts need at least 16 token ids")
        # Tokenizers keep special tokens at both ends of the vocabulary.
        margin = min(1000, vocab_size // 8)
        self._low, self._span = margin, vocab_size - 2 * margin
        self._root = f"{digest}/{seed}"
        self._block_size = block_size
        self._children: dict[int, dict[str, tuple[int, int]]] = {}
        self._nodes = 0
        offset = hashlib.sha256(self._root.encode()).digest()[:8]
        self._offset = int.from_bytes(offset, "little") % self._span

    def tokens(self, name: str, row: TraceRequest) -> list[int]:
        """Return the prompt of a row. `name` tells rows without block ids apart."""
        if row.hash_ids is None or self._block_size is None:
            return self._block(0, f"row/{name}", row.input_tokens)[1]
        node = 0
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            left = min(self._block_size, row.input_tokens - len(prompt))
            node, block = self._block(node, f"block/{hash_id}", left)
            prompt += block
        return prompt

    def _block(self, parent: int, key: str, count: int) -> tuple[int, list[int]]:
        siblings = self._children.setdefault(parent, {})
        if key not in siblings:
            self._nodes += 1
            siblings[key] = (self._nodes, len(siblings))
        node, number = siblings[key]
        if number >= self._span**2:
            raise BenchError(f"a vocabulary of {self._span} cannot tell {number} prompts apart")
        raw = hashlib.shake_256(f"{self._root}/{key}".encode()).digest(4 * count)
        words = np.frombuffer(raw, dtype="<u4").astype(np.uint64)
        scaled = (words * np.uint64(self._span)) >> np.uint64(32)
        block: list[int] = (scaled + np.uint64(self._low)).tolist()
        block[0] = self._low + (number + self._offset) % self._span
        if count > 1:
            block[1] = self._low + (number // self._span + self._offset) % self._span
        return node, block
