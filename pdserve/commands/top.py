"""`pdserve top`: the service as it works, in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from pdserve.commands.options import (
    DEFAULT_GRPC,
    DEFAULT_URL,
    add_dial_options,
    dialer_from,
    http_tls_from,
)

if TYPE_CHECKING:
    import ssl

    from pdserve.commands.options import Subparsers
    from pdserve.scrape import Reading

_MIN_INTERVAL_S = 0.1


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "top",
        help="watch rates, latencies, SLO attainment and workers as they change",
        description="Read the router's metrics and its workers' state every few seconds and show "
        "what happened in between, until Ctrl-C. Exit code 1 if the router cannot be reached.",
    )
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="the router's HTTP address (default: %(default)s)"
    )
    parser.add_argument(
        "--grpc",
        default=DEFAULT_GRPC,
        metavar="HOST:PORT",
        help="the router's gRPC address (default: %(default)s)",
    )
    for flag, name, default in (("ttft", "first token", 2.0), ("tpot", "later token", 0.2)):
        parser.add_argument(
            f"--slo-{flag}",
            type=_above(0.0),
            default=default,
            metavar="SECONDS",
            help=f"a {name} within this is in time (default: %(default)g)",
        )
    parser.add_argument(
        "--interval",
        type=_above(_MIN_INTERVAL_S),
        default=2.0,
        metavar="SECONDS",
        help="time between two looks (default: %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="look at one interval, then end")
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON for each interval"
    )
    add_dial_options(parser)
    parser.set_defaults(handler=_run)


def _above(least: float) -> Any:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value < float("inf") or not value:
            raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above {least:g}")
        return value

    return number


def _run(args: argparse.Namespace) -> int:
    try:
        asyncio.run(_watch(args))
    except KeyboardInterrupt:
        return 0
    return 0


async def _watch(args: argparse.Namespace) -> None:
    from pdserve.commands.status import collect
    from pdserve.commands.top_view import Screen, summary
    from pdserve.scrape import Interval

    dialer, tls = dialer_from(args), http_tls_from(args)
    before = await _read(args.url, tls)
    with Screen(args.url, live=not (args.json or args.once)) as screen:
        while True:
            await asyncio.sleep(args.interval)
            after = await _read(args.url, tls)
            state = await collect(dialer, args.grpc, timeout_s=max(1.0, args.interval))
            found = summary(Interval(before, after), args.slo_ttft, args.slo_tpot)
            before = after
            if args.json:
                sys.stdout.write(json.dumps({**found, **state}) + "\n")
                sys.stdout.flush()
            else:
                screen.show(found, state["workers"], state["roles"])
            if args.once:
                return


async def _read(url: str, tls: ssl.SSLContext | bool) -> Reading:
    """Raises Unavailable where the router does not answer."""
    import aiohttp

    from pdserve.errors import Unavailable
    from pdserve.scrape import read

    timeout = aiohttp.ClientTimeout(total=5.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/metrics", raise_for_status=True, ssl=tls) as answer,
        ):
            return read(await answer.text(), time.monotonic())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(f"no router answers at {url}: {error or 'no answer in 5 s'}") from error
