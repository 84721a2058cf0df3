"""Prints what placing one request costs the router:

    python -m benchmarks.placement [--workers 4,100,1000] [--rounds N] [--json] [--quick]

Each row is one thing on one size of pool; all take turns within a run.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.placement import policies, recording
from benchmarks.placement.timing import timed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.placement.timing import Timed

# What is measured: the cases of each, for a number of workers.
MEASURED = (policies.cases, recording.cases)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0."""
    options = _parser().parse_args(arguments)
    workers, rounds = ((4,), 1) if options.quick else (options.workers, options.rounds)
    cases = [case for count in workers for cases in MEASURED for case in cases(count)]
    rows = list(timed(cases, rounds))
    if options.json:
        sys.stdout.write(json.dumps({"rows": [_plain(row) for row in rows]}) + "\n")
    else:
        _print(Console(width=None if sys.stdout.isatty() else 100), rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement")
    parser.add_argument(
        "--workers",
        type=_counts,
        default=(4, 100, 1000),
        metavar="N,...",
        help="sizes of the pool (default: 4,100,1000)",
    )
    parser.add_argument("--rounds", type=_positive, default=9, help="of each case (default: 9)")
    parser.add_argument("--json", action="store_true", help="print every round, not a table")
    parser.add_argument("--quick", action="store_true", help="four workers, one round")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(_positive(part) for part in text.split(","))
    if min(counts) < 2:
        raise argparse.ArgumentTypeError("a pool has one worker for each phase")
    return counts


def _plain(row: Timed) -> dict[str, object]:
    return {
        "name": row.name,
        "workers": row.workers,
        "median_us": row.median_us,
        "fastest_us": row.fastest_us,
        "rounds_us": row.rounds_us,
    }


def _print(out: Console, rows: Sequence[Timed]) -> None:
    table = Table(title="µs, in the median round and in the fastest")
    table.add_column("what", no_wrap=True)
    for name in ("workers", "median", "fastest"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = (f"{row.workers:,}", f"{row.median_us:,.1f}", f"{row.fastest_us:,.1f}")
        table.add_row(row.name, *cells)
    out.print(table)


if __name__ == "__main__":
    sys.exit(main())
