"""`pdserve explain`: why a request was placed on its workers."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING

from pdserve import wire
from pdserve.cli.options import (
    add_command,
    add_seconds,
    add_service_options,
    channel_to,
    place_of,
    say,
    table_of,
)
from pdserve.observe.explanation import (
    cached,
    chosen,
    details,
    outcome,
    predicted,
    said,
    scores,
    total,
)
from pdserve.v1 import admin_pb2 as a
from pdserve.v1.admin_pb2_grpc import AdminStub

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from pdserve.cli.options import Subparsers

MOST_SHOWN = 24
MOST_REASONS = 4


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "explain",
        _run,
        "show why a request was placed on its workers",
        "Show the placement decisions of a request: the workers as the router saw them, their "
        "scores, why others were not chosen, and why the request was placed again. Exit code 1 if "
        "the router does not know the request, or does not answer.",
    )
    parser.add_argument("request_id", metavar="REQUEST_ID", help="id of the answer")
    add_seconds(parser, "--timeout", 30.0, "timeout of the call")
    add_service_options(parser, as_json="print JSON")


async def _run(args: argparse.Namespace) -> int:
    from pdserve.cli.console import open_console

    request = a.ExplainRequest(request_id=args.request_id)
    async with channel_to(args) as (channel, metadata):
        found = await AdminStub(channel).Explain(request, timeout=args.timeout, metadata=metadata)
    if args.json:
        say(json.dumps(wire.json_object(found)))
    else:
        show(found, open_console())
    return 0


def show(request: a.ExplainedRequest, console: Console) -> None:
    """Print the decisions of one request."""
    from rich.markup import escape

    def line(text: str) -> None:
        console.print(f"   {escape(text)}", soft_wrap=True)

    console.print(f"[bold]{escape(request.request_id)}[/]")
    for verdict in request.guards:
        line(said(verdict))
    for choice in request.choices:
        line(chosen(choice))
    for number, decision in enumerate(request.decisions, 1):
        when = datetime.fromtimestamp(decision.unix_time_s).astimezone()
        policy = f"{escape(decision.policy)}: " if decision.policy else ""
        where = f"{policy}[bold]{escape(outcome(decision))}[/]"
        console.print(f"\n{number}. {when:%H:%M:%S.%f} {where}", soft_wrap=True)
        for text in details(decision):
            line(text)
        used = (decision.decode, decision.prefill)
        ranked = list(decision.candidates)
        if len(ranked) > MOST_SHOWN:
            ranked.sort(
                key=lambda c: (c.worker_id not in used, bool(c.why_not), -(total(c) or 0.0))
            )
        shown, others = ranked[:MOST_SHOWN], ranked[MOST_SHOWN:]
        cells = [_cells(c, decision) for c in shown]
        numbers = ("prompt", "blocks", "run+wait", "cached", "total")
        names = ("worker", "role", *(["where"] if _has_places(decision) else []))
        table = table_of("", names, numbers, cells, notes="scores, or why not")
        for row, candidate in zip(table.rows, shown, strict=True):
            row.style = "bold" if candidate.worker_id in used else None
        if shown:
            console.print(table)
        if others:
            counts = Counter(c.why_not or "lower score" for c in others).most_common(MOST_REASONS)
            line(f"and {len(others)} more: {', '.join(f'{n} {why}' for why, n in counts)}")
        for prediction in decision.predictions:
            line(predicted(prediction))


def _has_places(decision: a.PlacementDecision) -> bool:
    return any(c.topology for c in decision.candidates)


def _cells(candidate: a.PlacementCandidate, decision: a.PlacementDecision) -> tuple[object, ...]:
    load, score = candidate.load, total(candidate)
    return (
        candidate.worker_id,
        wire.role_from_pb(candidate.role).value,
        *([place_of(candidate.topology)] if _has_places(decision) else []),
        candidate.outstanding_tokens,
        f"{candidate.reserved_blocks}/{candidate.total_blocks}",
        f"{load.num_running_reqs}+{load.num_waiting_reqs}" if candidate.HasField("load") else None,
        cached(candidate) if decision.asked_prefix else None,
        None if score is None else f"{score:.3f}",
        scores(candidate),
    )
