"""Prints how fast KV blocks move between two processes of this machine:

    python -m benchmarks.kv_transfer [--rounds N] [--layers N] [--json] [--quick]

Each row is one case; all ways take turns, so that what else the machine does strikes them alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.errors import BenchError
from benchmarks.kv_transfer.cases import COPIES, PEER_COPIES, Case
from benchmarks.kv_transfer.pair import CEILING, FLOORS, PEERS, Measured, Pair, ratio
from benchmarks.kv_transfer.peers import missing
from kv_transfer.copying import copy_in_python, copy_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNTS = (1, 16, 256, 4096)
SIZES_KIB = (16, 64, 256)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where something cannot be measured here."""
    options = _parser().parse_args(arguments)
    err = Console(stderr=True)
    counts, sizes = ((1, 16), (16,)) if options.quick else (COUNTS, SIZES_KIB)
    memory_bytes = (24 if options.quick else options.memory_mib) << 20
    gone = {peer: why for peer in PEERS if (why := missing(peer)) is not None}
    copies = COPIES + PEER_COPIES * (len(PEERS) - len(gone))
    cache_bytes = memory_bytes // copies // 4096 * 4096
    wanted = [Case(count, kib << 10) for kib in sizes for count in counts]
    cases = [case for case in wanted if case.bytes <= cache_bytes]
    notes = [
        f"{case.count} blocks of {case.block_bytes >> 10} KiB are left out: {copies} copies of them"
        f" need more than {memory_bytes >> 20} MiB (--memory-mib)"
        for case in wanted
        if case not in cases
    ]
    notes += [f"{peer}: {why}" for peer, why in gone.items()]
    if copy_pages is copy_in_python:
        notes.append("kv_transfer/_copy.c was not built: shm copies in Python")
    ways = [way for way in CEILING if way not in gone]
    rows: list[list[Measured]] = []
    try:
        with Pair(cache_bytes, options.layers) as pair:
            for row in pair.measure(cases, ways, 1 if options.quick else options.rounds):
                rows.append(row)
                last = row[0].case
                err.print(f"measured {last.count} blocks of {last.block_bytes >> 10} KiB")
    except BenchError as error:
        err.print(f"error: {error}", markup=False)
        return 2
    if options.json:
        text = json.dumps({"layers": options.layers, "rows": _plain(rows), "notes": notes})
        sys.stdout.write(text + "\n")
    else:
        _print(Console(width=None if sys.stdout.isatty() else 140), ways, rows, notes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_transfer")
    parser.add_argument("--rounds", type=_positive, default=5, help="of each case (default: 5)")
    parser.add_argument(
        "--layers", type=_positive, default=1, help="pages that a block is cut into (default: 1)"
    )
    parser.add_argument(
        "--memory-mib", type=_positive, default=2048, help="of all caches (default: 2048)"
    )
    parser.add_argument("--json", action="store_true", help="print every time, not a table")
    parser.add_argument("--quick", action="store_true", help="the smallest cases, one round")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _against(row: list[Measured], way: Measured) -> float:
    return ratio(way, next(other for other in row if other.way == CEILING[way.way]))


def _plain(rows: list[list[Measured]]) -> list[dict[str, object]]:
    return [
        {
            "blocks": way.case.count,
            "block_bytes": way.case.block_bytes,
            "way": way.way,
            "seconds": way.seconds,
            "gb_per_s": way.gb_per_s,
            "ceiling": CEILING[way.way],
            "ratio": _against(row, way),
        }
        for row in rows
        for way in row
    ]


def _print(
    out: Console, ways: Sequence[str], rows: list[list[Measured]], notes: Sequence[str]
) -> None:
    table = Table(title="GB/s in the median round, and the ratio to memcpy or loopback")
    for name in ("blocks", "KiB", *ways):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        case = row[0].case
        cells = [
            f"{way.gb_per_s:.2f}"
            if way.way in FLOORS
            else f"{way.gb_per_s:.2f} ({_against(row, way):.2f})"
            for way in row
        ]
        table.add_row(str(case.count), str(case.block_bytes >> 10), *cells)
    out.print(table)
    for note in notes:
        out.print(note, markup=False)


if __name__ == "__main__":
    sys.exit(main())
