"""`python -m benchmarks.standard [--only SET] [options of pdserve bench compare ...]`

Runs the standard set, keeps the run under benchmarks/results and refreshes the README's table from
it. Options that it does not know go to every comparison, after the set's own. A run that is invalid
is not kept; its reports are still written.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from benchmarks.compare.cli import EXIT_INVALID, EXIT_OK, add_compare, drive, prepare
from benchmarks.compare.files import write_outputs
from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.table import render_compare
from benchmarks.errors import BenchError
from benchmarks.report import stdout_console
from benchmarks.standard.readme import with_table
from benchmarks.standard.sets import ROOT, SETS, StandardResult, newest, write_standard
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.result import CompareResult

EXIT_BAD_INPUT: Final = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 2 for wrong options, 3 if a comparison was invalid."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", choices=list(SETS), help="one set; nothing is kept")
    parser.add_argument("--no-keep", action="store_true", help="keep nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options, more = parser.parse_known_args(argv)
    try:
        return _run(options, more)
    except (BenchError, ConfigError) as error:
        sys.stderr.write(f"make bench: {error}\n")
        return EXIT_BAD_INPUT


def _run(options: argparse.Namespace, more: Sequence[str]) -> int:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    names = [options.only] if options.only else list(SETS)
    reports = options.root / "build" / "bench"
    results = {name: _compare(name, more, reports / name) for name in names}
    if any(summarise_compare(result).validity.invalid for result in results.values()):
        sys.stderr.write("not kept: the run is invalid, for the reasons above\n")
        return EXIT_INVALID
    if not options.only and not options.no_keep:
        kept = options.root / "benchmarks" / "results"
        path = write_standard(StandardResult(created, results), kept)
        sys.stderr.write(f"kept as {path.relative_to(options.root)}\n")
        refresh_readme(options.root)
    return EXIT_OK


def refresh_readme(root: Path) -> None:
    """Make the README's table that of the newest run. Raises :class:`BenchError`."""
    path = root / "README.md"
    readme = path.read_text(encoding="utf-8")
    path.write_text(with_table(readme, newest(root / "benchmarks" / "results")), encoding="utf-8")


def _compare(name: str, more: Sequence[str], directory: Path) -> CompareResult:
    parser = argparse.ArgumentParser(prog="make bench")
    commands = parser.add_subparsers()
    add_compare(commands)
    settings, plans = prepare(parser.parse_args(["compare", *SETS[name], *more]))
    sys.stderr.write(f"{name}\n")
    result = drive(settings, plans, Console(stderr=True), directory)
    render_compare(result, summarise_compare(result), stdout_console())
    for path in write_outputs(result, directory):
        sys.stderr.write(f"{path}\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
