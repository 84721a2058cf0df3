"""`python -m benchmarks.micro NAME [--json]`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from importlib import import_module

from benchmarks.errors import BAD_INPUT, FAILED, BenchError, MeasurementFailed
from benchmarks.progress import Progress
from benchmarks.report.tables import print_line, print_table

NAMES = (
    "batch",
    "console",
    "fleet",
    "gpu_chunks",
    "gpu_copies",
    "kv",
    "long_prompts",
    "loop",
    "model_choice",
    "router",
    "tiers",
    "unloaded",
    "weights",
)


def main() -> int:
    """Return the exit status: 0, 1 if the measured part does not work, or 2 if it cannot be
    measured here."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in NAMES:
        module = import_module(f"benchmarks.micro.{name}")
        about = str(module.__doc__)
        command = commands.add_parser(
            name,
            help=about.splitlines()[0],
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--rounds", type=int, default=5, metavar="N", help="(5)")
        command.add_argument("--json", action="store_true", help="print rows as JSON")
        module.add_options(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    try:
        with Progress() as progress:
            rows, notes = asyncio.run(args.run(args, progress))
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return FAILED if isinstance(error, MeasurementFailed) else BAD_INPUT
    except KeyboardInterrupt:
        return 130
    if args.json:
        sys.stdout.write(json.dumps({"rows": rows, "notes": notes}) + "\n")
        return 0
    columns = list(rows[0]) if rows else []
    print_table(columns, [[row.get(x) for x in columns] for row in rows])
    for note in ("medians over the rounds", *notes):
        print_line(note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
