"""`pdserve replay-decisions`: what another policy would have decided."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.config import POLICIES

if TYPE_CHECKING:
    import argparse

    from pdserve.commands.options import Subparsers

SHOWN = 20
_NOTES = {
    "recomputes": "on one worker, for want of a pair or after a failure: no policy decides them",
    "without_cached": "were made again without what was cached: it was not asked then",
    "without_prediction": "were made again without a prediction: it was not made then",
}


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "replay-decisions",
        help="make recorded placement decisions again by another policy",
        description="Give another policy what the router's policy was given for each decision "
        "that `pdserve explain --all --save FILE` has written, and show where the two differ. "
        "Each decision stands by itself: what would have followed from another is not followed.",
    )
    parser.add_argument("file", metavar="FILE", help="the decisions; - reads standard input")
    parser.add_argument("--policy", required=True, choices=POLICIES, help="who decides again")
    parser.add_argument("--json", action="store_true", help="print JSON, with every difference")
    parser.set_defaults(handler=_run)


def _run(args: argparse.Namespace) -> int:
    from pdserve.errors import PdserveError
    from router.decisions.export import read_lines
    from router.decisions.replay import replay
    from router.placement.policies.by_name import POLICIES as BY_NAME

    if args.file == "-":
        found = replay(read_lines(sys.stdin, "standard input"), args.policy, BY_NAME[args.policy])
    else:
        try:
            with Path(args.file).open(encoding="utf-8") as lines:
                found = replay(read_lines(lines, args.file), args.policy, BY_NAME[args.policy])
        except (OSError, UnicodeDecodeError) as error:
            raise PdserveError(f"cannot read {args.file}: {error}") from error
    if args.json:
        sys.stdout.write(json.dumps(found.plain(), indent=2) + "\n")
    else:
        _show(found.plain())
    return 0


def _words(outcome: dict[str, Any]) -> str:
    """Where a request went: a pair, one worker, or nowhere."""
    if outcome["decode"] is None:
        return "refused" if outcome["refused"] else "waits"
    if outcome["prefill"] is None:
        return f"{outcome['decode']} alone"
    return f"{outcome['prefill']} → {outcome['decode']}"


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    out, policy, differences = Console(highlight=False), found["policy"], found["differences"]
    out.print(f"{found['same']} of {found['decisions']} decisions are the same by {policy}")
    for name, what in _NOTES.items():
        if found[name]:
            out.print(f"{found[name]} {what}")
    if not differences:
        return
    table = Table(box=None, pad_edge=False, title="where they differ", title_justify="left")
    for name in ("request", "recorded", policy):
        table.add_column(name, overflow="fold")
    for difference in differences[:SHOWN]:
        words = [_words(difference[name]) for name in ("recorded", "replayed")]
        table.add_row(*map(escape, (difference["request_id"], *words)))
    out.print(table)
    if len(differences) > SHOWN:
        out.print(f"and {len(differences) - SHOWN} more; --json has all")
    recorded, replayed = found["recorded_by_worker"], found["replayed_by_worker"]
    shares = Table(box=None, pad_edge=False, title="phases by worker", title_justify="left")
    shares.add_column("worker")
    for name in ("recorded", policy):
        shares.add_column(name, justify="right")
    for worker_id in sorted(recorded | replayed):
        counts = (recorded.get(worker_id, 0), replayed.get(worker_id, 0))
        shares.add_row(escape(worker_id), *map(str, counts))
    out.print(shares)
