"""`python -m benchmarks.policies [--only TRAFFIC] [--quick] [options of pdserve bench compare ...]`

Compares the default placement policy with round robin, always-remote (least_loaded) and
always-local on the shipped traces and on all of them mixed, and says of each whether the default is
worse than the best fixed choice by more than noise. Options that it does not know go to every
comparison, after its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from benchmarks.compare.cli import EXIT_INVALID, EXIT_OK, add_compare, drive, prepare
from benchmarks.compare.files import write_outputs
from benchmarks.compare.summary import summarise_compare
from benchmarks.compare.table import render_compare
from benchmarks.errors import BenchError
from benchmarks.policies.sets import DEFAULT, FIXED, SETS, options_of
from benchmarks.policies.verdict import verdicts
from benchmarks.report import stdout_console
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.compare.result import CompareResult

EXIT_WORSE: Final = 1
EXIT_BAD_INPUT: Final = 2
_PROG: Final = "python -m benchmarks.policies"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if the default is worse somewhere, 2 for wrong options, 3 if a
    comparison was invalid."""
    parser = argparse.ArgumentParser(prog=_PROG, description=__doc__)
    policies = ",".join((DEFAULT, *FIXED))
    parser.add_argument("--only", choices=list(SETS), help="this traffic alone")
    parser.add_argument("--policies", default=policies, metavar="POLICY,...", help="(%(default)s)")
    parser.add_argument(
        "--shape", default="1P1D", metavar="ARM", help="the workers of each arm (%(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="scripted engines and few requests: proves nothing"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/policies"), metavar="DIR", help="(%(default)s)"
    )
    options, more = parser.parse_known_args(argv)
    try:
        return _run(options, more)
    except (BenchError, ConfigError) as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return EXIT_BAD_INPUT


def _run(options: argparse.Namespace, more: Sequence[str]) -> int:
    results = {}
    for traffic in [options.only] if options.only else SETS:
        results[traffic] = _compare(traffic, options, more)
    found = [x for traffic, result in results.items() for x in verdicts(traffic, DEFAULT, result)]
    sys.stdout.write("".join(f"{verdict.text(DEFAULT)}\n" for verdict in found))
    invalid = [k for k, x in results.items() if summarise_compare(x).validity.invalid]
    if invalid:
        sys.stdout.write(f"INVALID, for the reasons above: {', '.join(invalid)}\n")
        return EXIT_INVALID
    return EXIT_WORSE if any(x.word == "worse" for x in found) else EXIT_OK


def _compare(traffic: str, options: argparse.Namespace, more: Sequence[str]) -> CompareResult:
    parser = argparse.ArgumentParser(prog=_PROG)
    add_compare(parser.add_subparsers())
    policies = [x for x in options.policies.split(",") if x]
    args = options_of(traffic, policies, options.shape, is_quick=options.quick, more=more)
    settings, plans = prepare(parser.parse_args(["compare", *args]))
    sys.stderr.write(f"{traffic}\n")
    directory = options.out / traffic
    result = drive(settings, plans, Console(stderr=True), directory)
    render_compare(result, summarise_compare(result), stdout_console())
    for path in write_outputs(result, directory):
        sys.stderr.write(f"{path}\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
