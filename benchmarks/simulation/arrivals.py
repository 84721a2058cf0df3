"""What arrives: requests of traces at given times, or of users who wait for their answers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from benchmarks.errors import BenchError
from benchmarks.schedule import due_times_s, speedup_for
from benchmarks.trace import load_trace
from benchmarks.workload import Shape, shape_workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.trace import Trace
    from benchmarks.workload import Workload

ARRIVALS: Final = ("trace", "poisson")
_MAX_REQUESTS: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, due at `at_s`; `prefix` names the blocks of its prompt where they are known. Its
    deadline is `within_s` later; 0 is the router's."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    tenant: str = ""
    within_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for. Several `traces` come mixed, each at an equal share of the rate. Without
    `rate_per_s` a trace keeps its own. Arrivals end at `duration_s`; where the traces end sooner
    they begin again."""

    traces: tuple[str, ...] = ("chat",)
    rate_per_s: float | None = None
    duration_s: float = 60.0
    arrivals: str = "trace"
    shape: Shape = field(default_factory=Shape)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """In order of time. `block_tokens` is the size of the blocks that prefixes name, 0 where none
    does; `notes` say what was done to the traces."""

    requests: tuple[Arrival, ...]
    block_tokens: int
    notes: tuple[str, ...]


def arrivals_of(load: Load, part: int = 0) -> Arrivals:
    """The requests of a load. Blocks are named differently for each `part`. Raises BenchError,
    TraceError."""
    if load.arrivals not in ARRIVALS:
        raise BenchError(f"arrivals are one of {', '.join(ARRIVALS)}, not {load.arrivals!r}")
    found: list[Arrival] = []
    notes: list[str] = []
    sizes: set[int] = set()
    for place, name in enumerate(load.traces):
        trace = load_trace(name)
        work = shape_workload(trace, load.shape)
        rate = None if load.rate_per_s is None else load.rate_per_s / len(load.traces)
        found += _of_trace(trace, work, rate, load, (part << 8) + place)
        notes += [f"{trace.meta.name}: {line}" for line in work.cut.notes()]
        if work.block_size:
            sizes.add(work.block_size)
    if len(sizes) > 1:
        raise BenchError("traces with prefix blocks of different sizes cannot be mixed")
    if not found:
        raise BenchError("no request arrives in that time; raise the duration or the rate")
    found.sort(key=lambda x: x.at_s)
    return Arrivals(tuple(found), sizes.pop() if sizes else 0, tuple(notes))


def one_after_another(loads: Sequence[Load]) -> Arrivals:
    """Each load begins when the one before it is over. Blocks of one are none of another's."""
    parts = [arrivals_of(load, number) for number, load in enumerate(loads)]
    sizes = {part.block_tokens for part in parts if part.block_tokens}
    if len(sizes) > 1:
        raise BenchError("traces with prefix blocks of different sizes cannot follow each other")
    found, begins_s = list[Arrival](), 0.0
    for load, part in zip(loads, parts, strict=True):
        found += [replace(x, at_s=x.at_s + begins_s) for x in part.requests]
        begins_s += load.duration_s
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return Arrivals(tuple(found), max(sizes, default=0), tuple(notes))


def _of_trace(
    trace: Trace, work: Workload, rate_per_s: float | None, load: Load, place: int
) -> Iterator[Arrival]:
    rows = work.requests
    times = _times(trace, [row.arrival_s for row in rows], rate_per_s, load)
    names: dict[tuple[str | None, int], int] = {}
    for number, at_s in enumerate(times):
        row = rows[number % len(rows)]
        scope = trace.meta.scope_of(row)
        prefix = tuple(
            names.setdefault((scope, x), (len(names) << 16) + place) for x in row.hash_ids or ()
        )
        yield Arrival(at_s, row.input_tokens, row.output_tokens, prefix)


def _times(
    trace: Trace, arrivals_s: Sequence[float], rate_per_s: float | None, load: Load
) -> Iterator[float]:
    if load.arrivals == "poisson":
        due = list(due_times_s(arrivals_s, tick_s=trace.meta.tick_s, seed=load.seed))
        rate = rate_per_s or 1 / speedup_for(due, 1.0)
        yield from _poisson(rate, load)
        return
    due = due_times_s(arrivals_s, tick_s=trace.meta.tick_s, seed=load.seed)
    stretch = 1.0
    if rate_per_s is not None:
        # Traffic comes and goes: the rate is that of the part that is served.
        wanted = max(2, math.ceil(rate_per_s * load.duration_s))
        stretch = 1 / speedup_for(due[:wanted], rate_per_s)
    # As long as the mean gap lies between the last of one turn and the first of the next.
    turn_s = (due[-1] - due[0]) * (len(due) / max(1, len(due) - 1))
    if turn_s <= 0:
        raise BenchError("a trace needs two requests at different times")
    for number in range(_MAX_REQUESTS):
        turn, place = divmod(number, len(due))
        at_s = (turn * turn_s + due[place] - due[0]) * stretch
        if at_s >= load.duration_s:
            return
        yield at_s
    raise BenchError(f"more than {_MAX_REQUESTS} requests; lower the rate or the duration")


def _poisson(rate_per_s: float, load: Load) -> Iterator[float]:
    draw, at_s = random.Random(f"arrivals {load.seed}"), 0.0
    for _ in range(_MAX_REQUESTS):
        at_s += draw.expovariate(rate_per_s)
        if at_s >= load.duration_s:
            return
        yield at_s
    raise BenchError(f"more than {_MAX_REQUESTS} requests; lower the rate or the duration")
