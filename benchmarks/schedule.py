"""When each request is due: the trace's arrivals, un-rounded and sped up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Literal, get_args

from benchmarks.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

TickJitter = Literal["none", "uniform", "even"]
TICK_JITTERS: Final[tuple[str, ...]] = get_args(TickJitter)


def due_times_s(
    arrivals_s: Sequence[float],
    *,
    speedup: float = 1.0,
    tick_s: float | None = None,
    jitter: TickJitter = "uniform",
    seed: int = 0,
) -> list[float]:
    """Seconds from the run's start at which each request is due, in order.

    A log that rounded its arrivals to ticks of ``tick_s`` would send a volley at every tick, and
    the tail of TTFT would measure the rounding. So the requests of one tick are spread over it:
    ``uniform`` draws their places, ``even`` spaces them equally, ``none`` leaves the volley. None
    is moved past the next arrival time, so their order stays. Without ``tick_s`` nothing is moved.
    """
    start_s = arrivals_s[0]
    if tick_s is None or jitter == "none":
        return [(at_s - start_s) / speedup for at_s in arrivals_s]
    places = random.Random(f"tick jitter {seed}")
    due: list[float] = []
    first = 0
    while first < len(arrivals_s):
        at_s = arrivals_s[first]
        after = first
        while after < len(arrivals_s) and arrivals_s[after] == at_s:
            after += 1
        count = after - first
        width_s = tick_s if after == len(arrivals_s) else min(tick_s, arrivals_s[after] - at_s)
        if jitter == "even":
            shares = [index / count for index in range(count)]
        else:
            shares = sorted(places.random() for _ in range(count))
        due.extend((at_s - start_s + share * width_s) / speedup for share in shares)
        first = after
    return due


def speedup_for(due_s: Sequence[float], rate_per_s: float) -> float:
    """By what to divide the gaps between ``due_s`` so that requests come at ``rate_per_s`` on
    average; raises :class:`BenchError` where there are none."""
    duration_s = due_s[-1] - due_s[0]
    if duration_s <= 0:
        raise BenchError("a rate needs two requests at different times; raise the number asked for")
    return rate_per_s * duration_s / (len(due_s) - 1)
