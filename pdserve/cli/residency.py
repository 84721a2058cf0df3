"""`pdserve residency`: where the data of a tenant's requests was."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli.options import add_command, add_seconds, say, table_of
from pdserve.config import refuse

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from pdserve.cli.options import Subparsers

_DAY_S = 86400.0


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "residency",
        _run,
        "list where the data of a tenant's requests was",
        "Read ledgers of routers (router.residency.ledger) and list for each kind of data from "
        "which region to which it went, how often, and with how many bytes.",
    )
    parser.add_argument("ledger", nargs="+", metavar="LEDGER", help="file of a router")
    parser.add_argument("--tenant", default="", help="name of the tenant; default: all tenants")
    add_seconds(parser, "--since", _DAY_S, "how far back to look")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace) -> int:
    from pdserve.cli.console import open_console

    since = time.time() - args.since
    rows = summary(args.ledger, args.tenant, since)
    if args.json:
        say(json.dumps(rows))
        return 0
    texts, numbers = ("data", "from", "to"), ("times", "bytes", "of unknown size")
    open_console().print(table_of("", texts, numbers, [[*x.values()] for x in rows]))
    return 0


def _lines(path: Path, tenant: str, since: float) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    line = json.loads(text)
                    at = datetime.fromisoformat(line["time"]).timestamp()
                except (ValueError, KeyError, TypeError):
                    refuse(str(path), f"line {number} is not of a ledger")
                if at >= since and tenant in ("", line["tenant"]):
                    yield line
    except OSError as error:
        refuse(str(path), f"cannot be read: {error.strerror}")


def summary(ledgers: Iterable[str | Path], tenant: str, since: float) -> list[dict[str, Any]]:
    """Return a row for each kind of data and pair of regions, sorted. `tenant`: "" for all.
    `since`: Unix time. Raises ConfigError for a file that is no ledger."""
    counts, sizes, unknown = Counter[tuple[str, ...]](), Counter[tuple[str, ...]](), Counter[Any]()
    for line in (x for path in ledgers for x in _lines(Path(path), tenant, since)):
        key = (line["data"], line["from_region"] or "none", line["to_region"] or "none")
        counts[key] += 1
        sizes[key] += line["bytes"] or 0
        unknown[key] += line["bytes"] is None
    return [
        {
            "data": kind,
            "from": source,
            "to": target,
            "times": counts[kind, source, target],
            "bytes": sizes[kind, source, target],
            "unknown": unknown[kind, source, target],
        }
        for kind, source, target in sorted(counts)
    ]
