"""Simulates the router over large pools:

    python -m benchmarks.simulation.scale [--workers 1000,10000] [--json] [--quick]

For each size: the policies at 0.8 of what the workers can do, a ramp to twice that, a greedy
tenant, a prefix that half of the requests share; of more than 2,000 workers the policies alone, for
a time in which no answer of a full service ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from benchmarks.simulation.scale import parts
from benchmarks.simulation.scale.pool import pool_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulation.scale.pool import Ran

PARTS: Final = {
    "policies": parts.policies,
    "ramp": parts.ramp,
    "greedy tenant": parts.greedy,
    "hot prefix": parts.hot_prefix,
}
# Seconds that requests come for, and after which they count, where the pool is too large for all.
_SHORT: Final = (1.2, 0.6)
_WHOLE_UP_TO: Final = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.scale")
    parser.add_argument("--workers", type=_counts, default=(1000, 10_000), metavar="N,...")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--quick", action="store_true", help="300 workers alone")
    options = parser.parse_args(arguments)
    found = []
    for count in (300,) if options.quick else options.workers:
        pool = pool_of(count)
        is_small = count <= _WHOLE_UP_TO
        span = () if is_small else _SHORT
        for part in options.part or list(PARTS)[: 4 if is_small else 1]:
            for case, ran in PARTS[part](pool, *span):
                found.append((count, part, case, ran))
                sys.stderr.write(f"{count} {part} {case}: {json.dumps(asdict(ran))}\n")
    if options.json:
        rows = [{"workers": n, "part": part, "case": c, **asdict(x)} for n, part, c, x in found]
        sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n")
    else:
        _show(found)
    return 0


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 2:
        raise argparse.ArgumentTypeError("a pool has one worker for each phase")
    return counts


def _show(found: Sequence[tuple[int, str, str, Ran]]) -> None:
    table = Table(title="simulated; requests a second, ms, and requests placed by a core")
    columns = (
        "workers",
        "part",
        "case",
        "policy",
        "asked",
        "goodput",
        "in time",
        "kept",
        "refused",
    )
    for column in (*columns, "late", "TTFT p50", "p99", "cached", "busiest", "a core", "µs"):
        table.add_column(column, no_wrap=True)
    for count, part, case, ran in found:
        cells = [f"{count:,}", part, case, ran.policy]
        cells += [f"{ran.asked_per_s:,.0f}", f"{ran.goodput_per_s:,.0f}"]
        cells += [f"{ran.in_time_per_s:,.0f}"]
        cells += [f"{x:.1%}" for x in (ran.kept, ran.refused, ran.late)]
        cells += [f"{1e3 * ran.ttft_p50_s:.0f}", f"{1e3 * ran.ttft_p99_s:.0f}"]
        cells += [f"{ran.cached:.0%}", f"{ran.busiest:.1f}"]
        cells += [f"{ran.decisions_per_s:,.0f}", f"{ran.try_us:.0f}"]
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    sys.exit(main())
