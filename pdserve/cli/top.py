"""`pdserve top`: rates, latencies and workers as they change."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.cli.options import (
    DEFAULT_URL,
    UNKNOWN,
    add_command,
    add_seconds,
    add_service_options,
    http_tls_from,
    say,
    table_of,
)

if TYPE_CHECKING:
    import argparse
    import ssl

    from rich.console import Group
    from rich.table import Table

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


def register(commands: Subparsers) -> None:
    parser = add_command(
        *(commands, "top", _run, "watch rates, latencies, SLO attainment and workers"),
        "Read the router's metrics and its workers' state every few seconds and show what changed, "
        "until Ctrl-C. Exit code 1 if the router does not answer.",
    )
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="HTTP address of the router (default: %(default)s)"
    )
    add_seconds(parser, "--slo-ttft", 2.0, "target for TTFT")
    add_seconds(parser, "--slo-tpot", 0.2, "target for TPOT")
    add_seconds(parser, "--interval", 2.0, "time between two readings")
    parser.add_argument("--once", action="store_true", help="show one interval, then end")
    add_service_options(parser, as_json="print a JSON line an interval")


def _run(args: argparse.Namespace) -> int:
    try:
        asyncio.run(_watch(args))
    except KeyboardInterrupt:
        return 0
    return 0


async def _watch(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    from pdserve.cli.status import collect

    tls = http_tls_from(args)
    console = Console(highlight=False)
    is_live = not (args.json or args.once)
    live = Live(console=console, screen=True, auto_refresh=False) if is_live else None
    before = await _read(args.url, tls)
    with live or nullcontext():
        while True:
            await asyncio.sleep(args.interval)
            after = await _read(args.url, tls)
            state = await collect(args, max(1.0, args.interval))
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
    phases = found["latency_s"]
    table = table_of("requests that ended; ITL: all tokens", ("ms",), tuple(phases))
    for quantile in next(iter(phases.values())):
        cells = [values[quantile] for values in phases.values()]
        table.add_row(quantile, *(UNKNOWN if x is None else f"{x * 1e3:.3g}" for x in cells))
    return table


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


# Two readings of /metrics


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters by name, and histogram buckets (upper bound to count) by name, summed over labels.
    `at` is the time in seconds."""

    at: float
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


def read(text: str, at: float) -> Reading:
    """Parse the Prometheus text format. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            bound = sample.labels.get("le")
            if bound is None:
                values[sample.name] += sample.value
            else:
                buckets[sample.name.removesuffix("_bucket")][float(bound)] += sample.value
    return Reading(at, dict(values), {name: dict(found) for name, found in buckets.items()})


@dataclass(frozen=True, slots=True)
class Interval:
    """From `before` to `after`. Quantiles are interpolated within a bucket, as in Prometheus. A
    counter that fell belongs to a restarted router and counts from zero."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        return self.after.at - self.before.at

    def rate(self, name: str) -> float:
        """Return the increase of a counter per second."""
        after, before = (x.values.get(name, 0.0) for x in (self.after, self.before))
        gained = after if after < before else after - before
        return gained / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, name: str, share: float) -> float | None:
        """Return the value below which `share` of the observations lie, or None without any. Values
        above the last bound count as that bound."""
        import numpy as np

        bounds, counts = self._cumulative(name)
        if not counts[-1]:
            return None
        at = int(np.searchsorted(counts, share * counts[-1]))
        if math.isinf(bounds[at]):
            return bounds[at - 1]
        return float(
            np.interp(share * counts[-1], counts[at - 1 : at + 1], bounds[at - 1 : at + 1])
        )

    def attainment(self, name: str, limit: float) -> float | None:
        """Return the share of observations that are at most `limit`, or None without any."""
        import numpy as np

        bounds, counts = self._cumulative(name)
        if not counts[-1]:
            return None
        finite = [i for i, bound in enumerate(bounds) if not math.isinf(bound)]
        below = np.interp(limit, [bounds[i] for i in finite], [counts[i] for i in finite])
        return float(below / counts[-1])

    def _cumulative(self, name: str) -> tuple[list[float], list[float]]:
        """Return upper bounds and the number of observations up to each, from 0 on."""
        after, before = self.after.buckets.get(name, {}), self.before.buckets.get(name, {})
        if after.get(math.inf, 0.0) < before.get(math.inf, 0.0):
            before = {}
        steps = sorted((bound, count - before.get(bound, 0.0)) for bound, count in after.items())
        return [0.0, *(b for b, _ in steps)], [0.0, *(c for _, c in steps)]
