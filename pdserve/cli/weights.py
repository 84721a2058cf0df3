"""`pdserve weights`: split new requests over the revisions of a model's workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import json

from pdserve.cli.options import (
    add_command,
    add_service_options,
    dialer_from,
    percent,
    say,
    table_of,
)
from pdserve.config import refuse

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.options import Subparsers
    from pdserve.deploy.revisions import RevisionFigures


def register(commands: Subparsers) -> None:
    parser = add_command(
        *(commands, "weights", _run, "split new requests over revisions of a model, for a canary"),
        "Split new requests of a model by weight over the revisions of its workers "
        "(`worker.revision`), and show how the requests of each revision went. Without weights and "
        "--clear, only show that. Every router keeps weights of its own until it ends: name all of "
        "them, or dns:NAME:PORT for each address of a name.",
    )
    parser.add_argument("model", metavar="MODEL", help="the served model")
    parser.add_argument(
        *("weights",),
        nargs="*",
        metavar="REVISION=WEIGHT",
        help="such as r1=95 r2=5; a revision that is not named gets no new requests",
    )
    parser.add_argument(
        "--clear", action="store_true", help="make all workers of the model one pool again"
    )
    add_service_options(parser, several=True, as_json="print the revisions as JSON")


async def _run(args: argparse.Namespace) -> int:
    from pdserve.deploy.revisions import list_revisions, set_weights
    from pdserve.discovery import Discovery

    weights = _weights(args.weights)
    if weights and args.clear:
        refuse("--clear", "takes no weights")
    dialer, routers = dialer_from(args), await Discovery(tuple(args.grpc.split(","))).addresses()
    if weights or args.clear:
        found = await set_weights(dialer, routers, args.model, weights)
    else:
        found = await list_revisions(dialer, routers, args.model)
    if args.json:
        say(json.encode(found).decode())
    else:
        _show(args.model, found)
    return 0


def _weights(texts: list[str]) -> dict[str, float]:
    """Raises ConfigError for what is not REVISION=WEIGHT, or comes twice."""
    weights: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not equals or not 0 <= weight < float("inf"):
            refuse("REVISION=WEIGHT", f"must be a revision and a number from 0, not {text!r}")
        if name in weights:
            refuse("REVISION=WEIGHT", f"names {name!r} twice")
        weights[name] = weight
    return weights


def _show(model: str, found: dict[str, RevisionFigures]) -> None:
    from pdserve.cli.console import open_console

    def part(met: int, of: int) -> str | None:
        return percent(met / of) if of else None

    rows = [
        (
            name or "(none)",
            " ".join(f"{n} {role}" for role, n in sorted(x.ready.items())) or "no ready worker",
            "/".join(sorted({"pool" if y is None else percent(y) for y in x.shares})),
            x.requests,
            x.failed,
            x.retried,
            *(part(x.met[target], x.judged[target]) for target in ("ttft", "tpot")),
        )
        for name, x in sorted(found.items())
    ]
    numbers = ("share", "requests", "failed", "retried", "TTFT met", "TPOT met")
    caption = "of the requests since the revision got a weight; retried: attempts that failed"
    title = f"revisions of {model}"
    open_console().print(table_of(title, ("revision", "ready"), numbers, rows, caption=caption))
