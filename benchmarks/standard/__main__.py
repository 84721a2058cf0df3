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

from benchmarks.compare.cli import EXIT_INVALID, EXIT_OK
from benchmarks.compare.series import compare_all, invalid, refusing
from benchmarks.standard.readme import with_table
from benchmarks.standard.sets import ROOT, SETS, StandardResult, newest, write_standard

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROG: Final = "make bench"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 2 for wrong options, 3 if a comparison was invalid."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    parser.add_argument("--only", choices=list(SETS), help="one set; nothing is kept")
    parser.add_argument("--no-keep", action="store_true", help="keep nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options, more = parser.parse_known_args(argv)
    return refusing(_PROG, lambda: _run(options, more))


def _run(options: argparse.Namespace, more: Sequence[str]) -> int:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    names = [options.only] if options.only else list(SETS)
    series = {name: [*SETS[name], *more] for name in names}
    results = compare_all(_PROG, series, options.root / "build" / "bench")
    if invalid(results):
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


if __name__ == "__main__":
    sys.exit(main())
