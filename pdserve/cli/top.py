"""`pdserve top`: requests by phase, goodput, cost, workers and KV flow as they change."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.cli.options import (
    DEFAULT_URL,
    add_command,
    add_milliseconds,
    add_seconds,
    add_service_options,
    http_tls_from,
    say,
    table_of,
)
from pdserve.config import SloConfig

if TYPE_CHECKING:
    import argparse
    import ssl
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Group
    from rich.table import Table

    from pdserve.cli.options import Subparsers

    # By name and upper bound or kind ("" for all), summed over the other labels.
    Counts = dict[tuple[str, str], float]

_RATES = {
    "requests_per_s": "pdserve_e2e_request_seconds_count",
    "output_tokens_per_s": "pdserve_generation_tokens_total",
    "prompt_tokens_per_s": "pdserve_prompt_tokens_total",
    "refusals_per_s": "pdserve_refusals_total",
    "fallbacks_per_s": "pdserve_fallbacks_total",
    "kv_bytes_per_s": "pdserve_kv_transfer_bytes_total",
}
_GAUGES = {"running": "pdserve_requests_running", "queued": "pdserve_requests_queued"}
# Kinds of engine time; the first two are for answers.
_KINDS = ("prefill", "decode", "waste", "idle")
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
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def register(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "top",
        _run,
        "watch requests by phase, goodput, cost, workers and KV flow",
        "Read the router's metrics and its workers' state every few seconds and show what changed, "
        "until q or Ctrl-C. Exit code 1 if the router does not answer.",
    )
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="HTTP address of the router (default: %(default)s)"
    )
    slo = SloConfig()
    add_milliseconds(parser, "--slo-ttft", slo.ttft_s, "target for TTFT")
    add_milliseconds(parser, "--slo-tpot", slo.tpot_s, "target for TPOT")
    add_seconds(parser, "--interval", 2.0, "time between two readings")
    parser.add_argument("--once", action="store_true", help="show one interval, then end")
    add_service_options(parser, as_json="print a JSON line an interval")


def _run(args: argparse.Namespace) -> int:
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(args))
    return 0


async def _watch(args: argparse.Namespace) -> None:
    from rich.live import Live

    from pdserve.cli.console import open_console
    from pdserve.cli.status import collect

    tls = http_tls_from(args)
    console = open_console()
    is_live = not (args.json or args.once)
    live = Live(console=console, screen=True, auto_refresh=False) if is_live else None
    timeout_s = max(1.0, args.interval)
    rows = (await collect(args, timeout_s))["workers"]
    before, began = await _read(args.url, tls), time.monotonic()
    with live or nullcontext(), _quit_key(is_live) as is_quit:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(is_quit.wait(), args.interval)
                return
            after, ended = await _read(args.url, tls), time.monotonic()
            state = await collect(args, timeout_s)
            found = summary(growth(before, after), ended - began, args.slo_ttft, args.slo_tpot)
            found |= state | {"kv_flow": kv_flow(rows, state["workers"], ended - began)}
            found |= {name: after.get((gauge, ""), 0.0) for name, gauge in _GAUGES.items()}
            before, began, rows = after, ended, state["workers"]
            if args.json:
                say(msgspec.json.encode(found).decode())  # null for a bound of infinity
            elif live is None:
                console.print(view(args.url, found))
            else:
                live.update(view(args.url, found), refresh=True)
            if args.once:
                return


@contextmanager
def _quit_key(is_live: bool) -> Iterator[asyncio.Event]:
    """Yield an event that the key q sets, if standard input is a terminal."""
    pressed = asyncio.Event()
    if not (is_live and sys.stdin.isatty()):
        yield pressed
        return
    import termios
    import tty

    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)

    def read_keys() -> None:
        keys = os.read(number, 64)
        if not keys or b"q" in keys:
            pressed.set()
            loop.remove_reader(number)

    tty.setcbreak(number)
    loop.add_reader(number, read_keys)
    try:
        yield pressed
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


async def _read(url: str, tls: ssl.SSLContext | bool) -> Counts:
    import aiohttp

    from pdserve.errors import Unavailable

    timeout = aiohttp.ClientTimeout(total=5.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/metrics", raise_for_status=True, ssl=tls) as answer,
        ):
            return read(await answer.text())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(f"no router at {url}: {error or 'no answer within 5 s'}") from error


def read(text: str) -> Counts:
    """Return counters, histograms and _GAUGES in the Prometheus text format; counters with a `kind`
    also by that. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    counts: Counts = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if name in _GAUGES.values() or name.endswith(("_total", "_count", "_sum", "_bucket")):
                counts[name, sample.labels.get("le", "")] += sample.value
                if kind := sample.labels.get("kind"):
                    counts[name, kind] += sample.value
    return counts


def growth(before: Counts, after: Counts) -> Counts:
    """Return the increases. If a count decreased, the router has restarted and all counts start at
    0."""
    grown = {
        key: count - before.get(key, 0.0)
        for key, count in after.items()
        if key[0] not in _GAUGES.values()
    }
    return after if min(grown.values(), default=0.0) < 0 else grown


def summary(grown: Counts, seconds: float, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, Any]:
    """Return rates, means and bounds of quantiles in seconds (None if nothing ended), and SLO
    attainment."""
    return {
        "interval_s": seconds,
        **{rate: grown.get((name, ""), 0.0) / seconds for rate, name in _RATES.items()},
        "latency_s": {
            phase: {"mean": mean(grown, name)}
            | {text: quantile(grown, name, share) for text, share in _QUANTILES.items()}
            for phase, name in _PHASES.items()
        },
        "slo": {
            "ttft_s": slo_ttft_s,
            "ttft_attained": attainment(grown, _PHASES["TTFT"], slo_ttft_s),
            "tpot_s": slo_tpot_s,
            "tpot_attained": attainment(grown, _PHASES["TPOT"], slo_tpot_s),
        },
        "engine_s": {
            kind: grown.get(("pdserve_engine_seconds_total", kind), 0.0) for kind in _KINDS
        },
        "cost_per_million_tokens": costs(grown),
    }


def costs(grown: Counts) -> dict[str, float | None]:
    """Return the cost of a million prompt tokens, of output tokens, and of output tokens including
    all cost of workers in the interval. None without prices, or without tokens."""

    def million(kind: str, tokens: str) -> float | None:
        cost = grown.get(("pdserve_cost_total", kind))
        count = grown.get((f"pdserve_{tokens}_tokens_total", ""))
        return 1e6 * cost / count if cost and count else None

    return {
        "prompt": million("prefill", "prompt"),
        "generated": million("decode", "generation"),
        "all": million("", "generation"),
    }


def kv_flow(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], seconds: float
) -> list[dict[str, Any]]:
    """Return for each worker the KV sent and received per second, the failed transfers in the
    interval, and the current pinned blocks and links."""
    known = {row["instance_id"]: row["kv"]["totals"] for row in before if row["kv"]}
    rows = []
    for row in after:
        if not row["kv"]:
            continue
        totals, was = row["kv"]["totals"], known.get(row["instance_id"], {})
        sent, received, failed = (
            totals.get(name, 0) - was.get(name, 0)
            for name in ("pushed_bytes", "received_bytes", "failures")
        )
        rows.append(
            {
                "worker": row["worker_id"],
                "sent_bytes_per_s": sent / seconds,
                "received_bytes_per_s": received / seconds,
                "failed": failed,
                "pinned_blocks": row["kv"]["ledger"]["pinned_blocks"],
                "links": row["kv"]["links"],
            }
        )
    return rows


def mean(grown: Counts, name: str) -> float | None:
    count = grown.get((f"{name}_count", ""))
    return grown[f"{name}_sum", ""] / count if count else None


def quantile(grown: Counts, name: str, share: float) -> float | None:
    """Return the lowest bucket bound that `share` of the observations do not exceed; infinity above
    all bounds. None without observations."""
    bounds, counts, total = _histogram(grown, name)
    if not total:
        return None
    pairs = zip(bounds, counts, strict=True)
    return next((bound for bound, count in pairs if count >= share * total), math.inf)


def attainment(grown: Counts, name: str, limit: float) -> float | None:
    """Return the share of observations known to be at most `limit`, up to the next lower bucket
    bound. None without observations."""
    bounds, counts, total = _histogram(grown, name)
    return counts[bisect_right(bounds, limit) - 1] / total if total else None


def _histogram(grown: Counts, name: str) -> tuple[list[float], list[float], float]:
    """Return finite bounds from 0 on, the number of observations up to each, and their total."""
    found = {float(le): x for (family, le), x in grown.items() if family == f"{name}_bucket"}
    total = found.pop(float("inf"), 0.0)
    bounds = sorted(found)
    return [0.0, *bounds], [0.0, *(found[bound] for bound in bounds)], total


def view(url: str, found: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.text import Text

    from pdserve.cli.status import load_table

    slo, phases, workers = found["slo"], found["latency_s"], found["workers"]
    head = (
        f"pdserve {url}, the last {found['interval_s']:.1f} s\n"
        f"{found['requests_per_s']:.1f} requests/s   {found['running']:.0f} running, "
        f"{found['queued']:.0f} queued   "
        f"{found['output_tokens_per_s']:.0f} tokens/s out, "
        f"{found['prompt_tokens_per_s']:.0f} in   KV {found['kv_bytes_per_s'] / 1e6:.1f} MB/s   "
        f"rejected {found['refusals_per_s']:.1f}/s   retries {found['fallbacks_per_s']:.1f}/s\n"
        f"SLO: TTFT within {slo['ttft_s'] * 1e3:g} ms {_share(slo['ttft_attained'])}, "
        f"TPOT within {slo['tpot_s'] * 1e3:g} ms {_share(slo['tpot_attained'])}\n"
        f"engines: {_uses(found['engine_s'])}\n"
    )
    cost = found["cost_per_million_tokens"]
    if any(cost.values()):
        texts = ("prompt", "generated", "generated with waste and idle time")
        parts = (f"{text} {x:.3g}" for text, x in zip(texts, cost.values(), strict=True) if x)
        head += f"cost of a million tokens: {', '.join(parts)}\n"
    cells = [(name, *(_latency(q, s) for q, s in x.items())) for name, x in phases.items()]
    title = "requests that ended (ITL: tokens)"
    latencies = table_of(title, ("phase",), ("mean", *_QUANTILES), cells)
    return Group(
        Text(head),
        latencies,
        Text(),
        load_table("workers", workers) if workers else Text("no worker is registered"),
        *([Text(), _kv_table(found["kv_flow"])] if found["kv_flow"] else ()),
        *(
            Text(f"KV between {x['prefill_worker']} and {x['decode_worker']} failed: not paired")
            for x in found["ejected_pairs"]
        ),
        *(Text(f"roles of {row['model']}: {row['text']}") for row in found["roles"]),
        *(Text(f"started on demand: {x['model']}: {x['text']}") for x in found["on_demand"]),
    )


def _uses(engine_s: dict[str, float]) -> str:
    total = sum(engine_s.values())
    return ", ".join(
        f"{kind} {_share(x / total if total else None)}" for kind, x in engine_s.items()
    )


def _kv_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = [
        (
            row["worker"],
            ", ".join(f"{count} {name}" for name, count in sorted(row["links"].items())) or "none",
            *(f"{row[f'{way}_bytes_per_s'] / 1e6:.1f}" for way in ("sent", "received")),
            f"{row['failed']:.0f}",
            row["pinned_blocks"],
        )
        for row in rows
    ]
    figures = ("sent, MB/s", "received, MB/s", "failed", "pinned blocks")
    return table_of("KV flow", ("worker", "links"), figures, cells)


def _latency(statistic: str, seconds: float | None) -> str | None:
    if seconds is None or math.isinf(seconds):
        return None if seconds is None else "over all"
    text = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    return text if statistic == "mean" else f"≤ {text}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
