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

from benchmarks.compare.cli import EXIT_INVALID, EXIT_OK
from benchmarks.compare.series import compare_all, invalid, refusing
from benchmarks.policies.sets import DEFAULT, FIXED, SETS, options_of
from benchmarks.policies.verdict import verdicts

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_WORSE: Final = 1
_PROG: Final = "python -m benchmarks.policies"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 if the default is worse somewhere, 2 for wrong options, 3 if a
    comparison was invalid, 130 for Ctrl-C."""
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
    return refusing(_PROG, lambda: _run(options, more))


def _run(options: argparse.Namespace, more: Sequence[str]) -> int:
    policies = [x for x in options.policies.split(",") if x]
    series = {
        traffic: options_of(traffic, policies, options.shape, is_quick=options.quick, more=more)
        for traffic in ([options.only] if options.only else SETS)
    }
    results = compare_all(_PROG, series, options.out)
    found = [x for traffic, result in results.items() for x in verdicts(traffic, DEFAULT, result)]
    sys.stdout.write("".join(f"{verdict.text(DEFAULT)}\n" for verdict in found))
    if spoilt := invalid(results):
        sys.stdout.write(f"INVALID, for the reasons above: {', '.join(spoilt)}\n")
        return EXIT_INVALID
    return EXIT_WORSE if any(x.word == "worse" for x in found) else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
