"""`pdserve top`: rates, latencies and workers as they change."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pdserve.cli.options import (
    DEFAULT_URL,
    add_dial_options,
    add_grpc_option,
    dialer_from,
    formatter,
    http_tls_from,
    say,
)

if TYPE_CHECKING:
    import ssl

    from rich.console import Group
    from rich.table import Table

    from pdserve.cli.metrics import Interval, Reading
    from pdserve.cli.options import Subparsers

_RATES = {
    "requests_per_s": "pdserve_e2e_request_seconds_count",
    "output_tokens_per_s": "pdserve_generation_tokens_total",
    "prompt_tokens_per_s": "pdserve_prompt_tokens_total",
    "refusals_per_s": "pdserve_refusals_total",
    "fallbacks_per_s": "pdserve_fallbacks_total",
    "kv_bytes_per_s": "pdserve_kv_transfer_bytes_total",
}
# In the order in which a request goes through them.
_PHASES = {
    "TTFT": "pdserve_time_to_first_token_seconds",
    "TPOT": "pdserve_time_per_output_token_seconds",
    "ITL": "pdserve_inter_token_latency_seconds",
    "E2E": "pdserve_e2e_request_seconds",
    "queue": "pdserve_request_queue_seconds",
    "prefill": "pdserve_request_prefill_seconds",
    "transfer": "pdserve_kv_transfer_seconds",
    "exposed": "pdserve_kv_transfer_exposed_seconds",
    "decode": "pdserve_request_decode_seconds",
}
_QUANTILES = (0.5, 0.9, 0.99)


def register(commands: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "top",
        help="watch rates, latencies, SLO attainment and workers",
        description="Read the router's metrics and its workers' state every few seconds and show "
        "what changed, until Ctrl-C. Exit code 1 if the router does not answer.",
        formatter_class=formatter,
    )
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="HTTP address of the router (default: %(default)s)"
    )
    add_grpc_option(parser)
    for flag, default in (("ttft", 2.0), ("tpot", 0.2)):
        parser.add_argument(
            f"--slo-{flag}",
            type=_seconds,
            default=default,
            metavar="SECONDS",
            help=f"target for {flag.upper()} (default: %(default)g)",
        )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="time between two readings (default: %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="show one interval, then end")
    parser.add_argument("--json", action="store_true", help="print a JSON line an interval")
    add_dial_options(parser)
    parser.set_defaults(handler=_run)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text}")
    return value


def _run(args: argparse.Namespace) -> int:
    try:
        asyncio.run(_watch(args))
    except KeyboardInterrupt:
        return 0
    return 0


async def _watch(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    from pdserve.cli.metrics import Interval
    from pdserve.cli.status import collect

    dialer, tls = dialer_from(args), http_tls_from(args)
    console = Console(highlight=False)
    is_live = not (args.json or args.once)
    live = Live(console=console, screen=True, auto_refresh=False) if is_live else None
    before = await _read(args.url, tls)
    with live or nullcontext():
        while True:
            await asyncio.sleep(args.interval)
            after = await _read(args.url, tls)
            state = await collect(dialer, args.grpc, timeout_s=max(1.0, args.interval))
            found = summary(Interval(before, after), args.slo_ttft, args.slo_tpot) | state
            before = after
            if args.json:
                say(json.dumps(found))
            elif live is None:
                console.print(view(args.url, found))
            else:
                live.update(view(args.url, found), refresh=True)
            if args.once:
                return


async def _read(url: str, tls: ssl.SSLContext | bool) -> Reading:
    import aiohttp

    from pdserve.cli.metrics import read
    from pdserve.errors import Unavailable

    timeout = aiohttp.ClientTimeout(total=5.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/metrics", raise_for_status=True, ssl=tls) as answer,
        ):
            return read(await answer.text(), time.monotonic())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(f"no router at {url}: {error or 'no answer within 5 s'}") from error


def summary(interval: Interval, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, Any]:
    """Return rates, quantiles in seconds (None if nothing ended) and SLO attainment."""
    return {
        "interval_s": interval.seconds,
        **{name: interval.rate(counter) for name, counter in _RATES.items()},
        "latency_s": {
            phase: {f"p{q * 100:g}": interval.quantile(name, q) for q in _QUANTILES}
            for phase, name in _PHASES.items()
        },
        "slo": {
            "ttft_s": slo_ttft_s,
            "ttft_attained": interval.attainment(_PHASES["TTFT"], slo_ttft_s),
            "tpot_s": slo_tpot_s,
            "tpot_attained": interval.attainment(_PHASES["TPOT"], slo_tpot_s),
        },
    }


def view(url: str, found: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.text import Text

    from pdserve.cli.status import load_table

    slo, workers = found["slo"], found["workers"]
    rates = {name: found[f"{name}_per_s"] for name in ("requests", "refusals", "fallbacks")}
    tokens, prompts = found["output_tokens_per_s"], found["prompt_tokens_per_s"]
    lines = (
        f"pdserve {url}, the last {found['interval_s']:.1f} s",
        (
            f"{rates['requests']:.1f} requests/s   {tokens:.0f} tokens/s out, {prompts:.0f} in   "
            f"KV {found['kv_bytes_per_s'] / 1e6:.1f} MB/s   rejected {rates['refusals']:.1f}/s   "
            f"retries {rates['fallbacks']:.1f}/s"
        ),
        (
            f"SLO: TTFT within {slo['ttft_s']:g} s {_share(slo['ttft_attained'])}, "
            f"TPOT within {slo['tpot_s']:g} s {_share(slo['tpot_attained'])}"
        ),
    )
    return Group(
        Text("\n".join(lines)),
        Text(),
        _latencies(found),
        Text(),
        load_table("workers", workers) if workers else Text("no worker is registered"),
        *(Text(f"roles of {row['model']}: {row['text']}") for row in found["roles"]),
    )


def _latencies(found: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="requests that ended; ITL: all tokens")
    table.title_justify = "left"
    table.add_column("ms")
    for phase in found["latency_s"]:
        table.add_column(phase, justify="right")
    for quantile in next(iter(found["latency_s"].values())):
        cells = [values[quantile] for values in found["latency_s"].values()]
        table.add_row(quantile, *("-" if x is None else f"{x * 1e3:.3g}" for x in cells))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
