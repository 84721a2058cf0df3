"""A trace cut, scaled and timed as a replay would have it, for clients that do none of that."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from benchmarks.schedule import due_times_s, speedup_for
from benchmarks.workload import shape_workload

if TYPE_CHECKING:
    from benchmarks.trace import Trace, TraceRequest
    from benchmarks.workload import Shape


def shape_trace(
    trace: Trace, shape: Shape, *, rate_per_s: float | None = None, unique_blocks: int | None = None
) -> Trace:
    """The requests that ``shape`` leaves, at the times at which they would be due.

    ``unique_blocks`` gives rows without prefix ids some of so many tokens that no other row has:
    clients that make prompts of the ids alone can then make one. Raises :class:`BenchError`.
    """
    workload = shape_workload(trace, shape)
    arrivals = [row.arrival_s for row in workload.requests]
    due_s = due_times_s(arrivals, tick_s=trace.meta.tick_s)
    if rate_per_s is not None:
        speedup = speedup_for(due_s, rate_per_s)
        due_s = [at_s / speedup for at_s in due_s]
    rows = [
        replace(row, arrival_s=at_s) for row, at_s in zip(workload.requests, due_s, strict=True)
    ]
    block_size = workload.block_size
    if unique_blocks is not None and block_size is None:
        rows, block_size = _with_ids(rows, unique_blocks), unique_blocks
    meta = replace(trace.meta, block_size=block_size, tick_s=None)
    return replace(trace, meta=meta, requests=tuple(rows))


def _with_ids(rows: list[TraceRequest], block_size: int) -> list[TraceRequest]:
    following = 0
    found = []
    for row in rows:
        count = ceil(row.input_tokens / block_size)
        found.append(replace(row, hash_ids=tuple(range(following, following + count))))
        following += count
    return found
