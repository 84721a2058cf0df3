"""Several traces as one: each at the same rate, merged by time. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.errors import BenchError
from benchmarks.schedule import due_times_s, speedup_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.trace import Trace, TraceRequest


def mixed_rows(traces: Sequence[Trace]) -> tuple[TraceRequest, ...]:
    """Rows of all, a request a second of each on average over that trace, until one of them ends.

    Arrivals that a log rounded are spread over their tick first, alike at every call. Prefix ids of
    different traces stay apart. Raises :class:`BenchError` where ids are of blocks of different
    sizes, or of sessions.
    """
    sizes = {trace.meta.block_size for trace in traces} - {None}
    if len(sizes) > 1:
        raise BenchError(f"traces with prefix blocks of {sorted(map(str, sizes))} cannot be mixed")
    if any(trace.meta.hash_scope == "session" for trace in traces):
        raise BenchError("a trace whose prefix ids belong to sessions cannot be mixed")
    merged: list[TraceRequest] = []
    ends, first_id = [], 0
    for trace in traces:
        due = due_times_s([row.arrival_s for row in trace.requests], tick_s=trace.meta.tick_s)
        speedup = speedup_for(due, 1.0)
        rows = zip(due, trace.requests, strict=True)
        merged += [_moved(row, at_s / speedup, first_id) for at_s, row in rows]
        ends.append(merged[-1].arrival_s)
        first_id += 1 + max((x for row in trace.requests for x in row.hash_ids or ()), default=-1)
    merged.sort(key=lambda row: row.arrival_s)
    return tuple(row for row in merged if row.arrival_s <= min(ends))


def _moved(row: TraceRequest, at_s: float, first_id: int) -> TraceRequest:
    ids = None if row.hash_ids is None else tuple(first_id + x for x in row.hash_ids)
    return replace(row, arrival_s=round(at_s, 7), hash_ids=ids)
