"""The requests of a trace: which are sent, when, and with which prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.traces import Trace, TraceRequest


def due_times_s(
    arrivals_s: Sequence[float], *, tick_s: float | None = None, seed: int = 0
) -> list[float]:
    """Return the seconds from the start of the run at which each request is due.

    If a log has rounded its times to ticks, a replay would send a burst at each tick, and the tail
    of TTFT would measure the rounding. The requests of one tick are therefore spread over it at
    random, in the same order.
    """
    at_s = np.asarray(arrivals_s) - arrivals_s[0]
    if tick_s is not None:
        ticks, tick_of = np.unique(at_s, return_inverse=True)
        widths_s = np.minimum(tick_s, np.diff(ticks, append=ticks[-1] + tick_s))
        shares = np.random.default_rng(seed).random(len(at_s))
        at_s = np.sort(at_s + shares * widths_s[tick_of])
    due_s: list[float] = at_s.tolist()
    return due_s


def speedup_for(due_s: Sequence[float], rate_per_s: float) -> float:
    """Return the factor that changes `due_s` to a mean rate. Raises BenchError if all times are
    equal."""
    duration_s = due_s[-1] - due_s[0]
    if duration_s <= 0:
        raise BenchError("a rate needs two requests at different times; ask for more requests")
    return rate_per_s * duration_s / (len(due_s) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Changes to a trace to fit a model and a machine, applied in the order of the fields.

    `scale_lengths` multiplies lengths and the size of a prefix block. Longer outputs are capped at
    `max_output_tokens`. Sessions end after `max_turns` turns. Rows over `max_total_tokens` are
    dropped, with all later turns of their session. `skip` rows are skipped (wrapping to the start
    of the trace). The next `limit` rows are sent. Both count session by session, so no session
    starts in its middle.
    """

    scale_lengths: Fraction = Fraction(1)
    max_output_tokens: int | None = None
    max_turns: int | None = None
    max_total_tokens: int | None = None
    skip: int = 0
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Effect of shaping on a trace. Means are in tokens. `*_before`: of the whole trace.
    `shortened`: turns dropped by `max_turns`."""

    rows: int
    requests: int
    capped: int
    dropped: int
    shortened: int
    sessions: int
    mean_input_before: float
    mean_output_before: float
    mean_input: float
    mean_output: float
    block_size: int | None

    def __str__(self) -> str:
        sessions = f" of {self.sessions} sessions" if self.sessions else ""
        shortened = f", turns cut off: {self.shortened}" if self.shortened else ""
        return (
            f"{self.requests} requests{sessions}, mean {self.mean_input:.1f} input and "
            f"{self.mean_output:.1f} output tokens (whole trace: {self.rows} requests, "
            f"{self.mean_input_before:.1f} and {self.mean_output_before:.1f}); outputs shortened: "
            f"{self.capped}, too long and dropped: {self.dropped}{shortened}"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send, each with its row number in the trace (from 0)."""

    rows: tuple[tuple[int, TraceRequest], ...]
    cut: Cut


def shape_workload(trace: Trace, shape: Shape) -> Workload:
    """Apply `shape` to a trace and return the requests to send. Raises BenchError if none are
    left."""
    before, factor = trace.meta.block_size, shape.scale_lengths
    block_size = None if before is None else round(before * factor)
    if block_size == 0:
        raise BenchError(
            f"--scale-lengths {factor} leaves less than one token of a prefix block of {before}; "
            f"use at least 1/{before}"
        )
    cap, total = shape.max_output_tokens, shape.max_total_tokens
    kept, capped, shortened = [], 0, 0
    turns, cut_short = Counter[str](), set[str]()
    first_of: dict[str, int] = {}  # the row in which a session starts
    for number, row in enumerate(trace.requests):
        if row.session:
            turns[row.session] += 1
            if shape.max_turns is not None and turns[row.session] > shape.max_turns:
                shortened += 1
                continue
        scaled = _scale(row, factor, block_size)
        if cap is not None and scaled.output_tokens > cap:
            scaled, capped = replace(scaled, output_tokens=cap), capped + 1
        fits = total is None or scaled.input_tokens + scaled.output_tokens <= total
        if fits and row.session not in cut_short:
            first_of.setdefault(row.session, number)
            kept.append((number, scaled))
        elif row.session:
            cut_short.add(row.session)
    if not kept:
        raise BenchError(
            f"no request of {trace.meta.name} fits {total} tokens; raise --max-total-tokens or "
            "lower --scale-lengths"
        )
    kept.sort(key=lambda x: (first_of[x[1].session] if x[1].session else x[0], x[0]))
    first = shape.skip % max(1, len(kept) - (shape.limit or len(kept)) + 1)
    while first and kept[first][1].session and kept[first][1].session == kept[first - 1][1].session:
        first -= 1
    sent = sorted(kept[first : None if shape.limit is None else first + shape.limit])
    cut = Cut(
        rows=len(trace.requests),
        requests=len(sent),
        capped=capped,
        dropped=len(trace.requests) - len(kept) - shortened,
        shortened=shortened,
        sessions=len({row.session for _, row in sent if row.session}),
        mean_input_before=fmean(row.input_tokens for row in trace.requests),
        mean_output_before=fmean(row.output_tokens for row in trace.requests),
        mean_input=fmean(row.input_tokens for _, row in sent),
        mean_output=fmean(row.output_tokens for _, row in sent),
        block_size=block_size,
    )
    return Workload(tuple(sent), cut)


def _scale(row: TraceRequest, factor: Fraction, block_size: int | None) -> TraceRequest:
    """Return a scaled row. A row with block ids keeps exactly one block per id."""
    input_tokens = max(1, round(row.input_tokens * factor))
    if row.hash_ids is not None and block_size is not None:
        blocks = len(row.hash_ids)
        input_tokens = min(max(input_tokens, (blocks - 1) * block_size + 1), blocks * block_size)
    output_tokens = max(1, round(row.output_tokens * factor))
    kept = min(round(row.kept_tokens * factor), input_tokens - 1)
    return replace(row, input_tokens=input_tokens, output_tokens=output_tokens, kept_tokens=kept)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Generates prompts of token ids that share the prefixes given in the trace.

    The tokens of a block are a function of the trace's digest, the seed and the block's id
    (SHAKE-256), so all processes generate the same prompts.
    """

    digest: str
    seed: int
    vocab_size: int
    block_size: int | None

    def tokens(self, name: str, row: TraceRequest, history: Sequence[int] = ()) -> list[int]:
        """Return the prompt of a row. `name` makes prompts of rows without block ids distinct.
        `history`: prompt and answer of the previous turn."""
        if row.hash_ids is None or self.block_size is None:
            kept = list(history[: row.kept_tokens])
            return kept + self._draw(f"row/{name}", row.input_tokens - len(kept))
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            left = min(self.block_size, row.input_tokens - len(prompt))
            prompt += self._draw(f"block/{hash_id}", left)
        return prompt

    def _draw(self, key: str, count: int) -> list[int]:
        # Avoid special tokens, which tokenizers have at both ends of the vocabulary.
        margin = min(1000, self.vocab_size // 8)
        span = max(1, self.vocab_size - 2 * margin)
        raw = hashlib.shake_256(f"{self.digest}/{self.seed}/{key}".encode()).digest(4 * count)
        words = np.frombuffer(raw, dtype="<u4").astype(np.uint64)
        tokens: list[int] = (((words * np.uint64(span)) >> np.uint64(32)) + margin).tolist()
        return tokens
