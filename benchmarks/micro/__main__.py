"""`python -m benchmarks.micro kv|router|unloaded [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchError
from benchmarks.progress import Progress
from benchmarks.report.tables import line, stdout_console
from benchmarks.runner import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ("kv", "router", "unloaded")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 if something cannot be measured here."""
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
    args = parser.parse_args(argv)
    try:
        with Progress() as progress:
            rows, notes = args.run(args, progress)
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    _print(rows, notes, as_json=args.json)
    return 0


def _print(rows: list[dict[str, Any]], notes: list[str], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"rows": rows, "notes": notes}) + "\n")
        return
    console = stdout_console()
    columns = list(rows[0]) if rows else []
    cells = [list(row.values()) for row in rows]
    print_table(console, columns, cells, caption="medians over the rounds")
    for note in notes:
        line(console, note)


if __name__ == "__main__":
    sys.exit(main())
