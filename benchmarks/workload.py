"""Which requests of a trace are replayed, and how long they are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a trace is cut to fit a model and a machine; applied in the order of the fields.

    ``scale_lengths`` multiplies input and output lengths and the prefix block; outputs longer than
    ``max_output_tokens`` are cut; rows of more than ``max_total_tokens`` are dropped; ``skip`` of
    what is left are passed over (from its start again where it ends sooner); the next ``limit`` are
    replayed.
    """

    scale_lengths: Fraction = Fraction(1)
    max_output_tokens: int | None = None
    max_total_tokens: int | None = None
    skip: int = 0
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What shaping did to a trace; means are in tokens, ``*_before`` those of the whole trace."""

    rows: int
    requests: int
    capped: int
    dropped: int
    mean_input_before: float
    mean_output_before: float
    mean_input: float
    mean_output: float

    def notes(self) -> list[str]:
        """What a reader must know of it, in sentences."""
        lines = []
        if self.capped:
            lines.append(f"cut the output of {self.capped} of {self.rows} requests")
        if self.dropped:
            lines.append(f"dropped {self.dropped} of {self.rows} requests that are too long")
        lines.append(
            f"{self.requests} requests of {self.mean_input:.1f} input and {self.mean_output:.1f} "
            f"output tokens on average (the trace: {self.rows} of {self.mean_input_before:.1f} and "
            f"{self.mean_output_before:.1f})"
        )
        return lines


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to replay, each with its row number in the trace (from 0)."""

    rows: tuple[tuple[int, TraceRequest], ...]
    block_size: int | None
    cut: Cut

    @property
    def requests(self) -> list[TraceRequest]:
        """The requests alone, in the order of their arrival."""
        return [row for _, row in self.rows]


def shape_workload(trace: Trace, shape: Shape) -> Workload:
    """Apply ``shape`` to ``trace``.

    Raises :class:`BenchError` where nothing is left, or where scaling would leave no token to a
    prefix block.
    """
    block_size = _scaled_block(trace, shape.scale_lengths)
    scaled = [
        _scale(row, shape.scale_lengths, trace.meta.block_size, block_size)
        for row in trace.requests
    ]
    cap = shape.max_output_tokens
    fitted = [row if cap is None else _cap_output(row, cap) for row in scaled]
    total = shape.max_total_tokens
    kept = [
        (number, row)
        for number, row in enumerate(fitted)
        if total is None or row.input_tokens + row.output_tokens <= total
    ]
    if not kept:
        raise BenchError(
            f"no request of {trace.meta.name} fits {total} tokens; raise --max-total-tokens, or "
            "lower --scale-lengths"
        )
    first = _first(len(kept), shape)
    replayed = kept[first : None if shape.limit is None else first + shape.limit]
    requests = [row for _, row in replayed]
    return Workload(
        rows=tuple(replayed),
        block_size=block_size,
        cut=Cut(
            rows=len(trace.requests),
            requests=len(requests),
            capped=sum(before != after for before, after in zip(scaled, fitted, strict=True)),
            dropped=len(fitted) - len(kept),
            mean_input_before=_mean_input(trace.requests),
            mean_output_before=_mean_output(trace.requests),
            mean_input=_mean_input(requests),
            mean_output=_mean_output(requests),
        ),
    )


def _first(kept: int, shape: Shape) -> int:
    """Where to begin, so that ``limit`` requests follow in the order of their arrival."""
    return shape.skip % max(1, kept - (shape.limit or kept) + 1)


def _scaled_block(trace: Trace, factor: Fraction) -> int | None:
    before = trace.meta.block_size
    if before is None:
        return None
    after = round(before * factor)
    if after < 1:
        raise BenchError(
            f"--scale-lengths {factor} leaves less than a token of a {before}-token prefix block; "
            f"use at least 1/{before}"
        )
    return after


def _scale(
    row: TraceRequest, factor: Fraction, block_before: int | None, block_after: int | None
) -> TraceRequest:
    """Scale one row; a row with block ids keeps exactly as many blocks as it has ids."""
    output_tokens = max(1, round(row.output_tokens * factor))
    if row.hash_ids is None or block_before is None or block_after is None:
        input_tokens = max(1, round(row.input_tokens * factor))
    else:
        full = ceil(row.input_tokens / block_before) - 1
        last = row.input_tokens - full * block_before
        input_tokens = full * block_after + max(
            1, round(Fraction(last * block_after, block_before))
        )
    return replace(row, input_tokens=input_tokens, output_tokens=output_tokens)


def _cap_output(row: TraceRequest, cap: int) -> TraceRequest:
    return replace(row, output_tokens=min(row.output_tokens, cap))


def _mean_input(rows: Sequence[TraceRequest]) -> float:
    return sum(row.input_tokens for row in rows) / len(rows)


def _mean_output(rows: Sequence[TraceRequest]) -> float:
    return sum(row.output_tokens for row in rows) / len(rows)
