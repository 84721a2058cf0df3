"""Prints how far the simulator is off, beside real processes of this machine:

python -m benchmarks.simulation [--rounds N] [--case NAME]... [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.errors import BenchError
from benchmarks.options import positive_int
from benchmarks.simulation.validation import CASES, PERCENTS, validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulation.validation import Validated


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 where something cannot be measured here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation")
    parser.add_argument("--rounds", type=positive_int, default=5, help="default: 5")
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", choices=names, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if case.name in (options.case or names)]
    err = Console(stderr=True)
    found = []
    try:
        with tempfile.TemporaryDirectory() as directory:
            for case in cases:
                run = validate(case, options.rounds, Path(directory), err.print)
                found.append(asyncio.run(run))
    except BenchError as error:
        err.print(f"error: {error}", markup=False)
        return 2
    if options.json is not None:
        text = json.dumps([x.plain() for x in found], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    _show(found)
    return 0


def _show(found: Sequence[Validated]) -> None:
    table = Table(title="simulated over real, less 1: median of the rounds, and the range")
    table.add_column("case")
    table.add_column("metric")
    for percent in PERCENTS:
        for column in (f"p{percent} real", "simulated", "off by"):
            table.add_column(column, justify="right")
    for validated in found:
        for metric in ("ttft", "tpot"):
            cells = []
            for percent in PERCENTS:
                errors = validated.errors(metric, percent)
                real = median(x.real[metric][percent] for x in validated.rounds)
                simulated = median(x.simulated[metric][percent] for x in validated.rounds)
                spread = f"{median(errors):+.0%} ({min(errors):+.0%} to {max(errors):+.0%})"
                cells += [f"{1e3 * real:.1f}", f"{1e3 * simulated:.1f}", spread]
            table.add_row(validated.case.name, f"{metric}, ms", *cells)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())
