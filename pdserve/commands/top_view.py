"""What `pdserve top` shows of an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.commands.status_view import load_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from pdserve.scrape import Interval

_RATES = {
    "requests_per_s": "pdserve_e2e_request_seconds_count",
    "output_tokens_per_s": "pdserve_generation_tokens_total",
    "prompt_tokens_per_s": "pdserve_prompt_tokens_total",
    "refusals_per_s": "pdserve_refusals_total",
    "fallbacks_per_s": "pdserve_fallbacks_total",
    "kv_bytes_per_s": "pdserve_kv_transfer_bytes_total",
}
# What is shown of each phase, in the order in which a request goes through them.
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


def summary(interval: Interval, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, Any]:
    """Rates, quantiles in seconds (null where nothing ended) and the shares that were in time."""
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


class Screen:
    """Owns the terminal while it is entered, where it is `live`; else it prints."""

    def __init__(self, url: str, *, live: bool, console: Console | None = None) -> None:
        self._url = url
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False) if live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(
        self,
        found: dict[str, Any],
        workers: Sequence[dict[str, Any]],
        roles: Sequence[dict[str, Any]] = (),
    ) -> None:
        """One interval; `roles` says what is wanted of the roles that are moved by load."""
        body = Group(
            _headline(self._url, found),
            Text(),
            _latencies(found),
            Text(),
            load_table("workers", workers) if workers else Text("No worker is registered."),
            *(Text(f"roles of {row['model']}: {row['text']}") for row in roles),
        )
        if self._live is None:
            self._console.print(body)
        else:
            self._live.update(body, refresh=True)


def _headline(url: str, found: dict[str, Any]) -> Text:
    slo = found["slo"]
    work = (
        f"{found['requests_per_s']:.1f} requests/s   {found['output_tokens_per_s']:.0f} tokens/s "
        f"out, {found['prompt_tokens_per_s']:.0f} in   KV {found['kv_bytes_per_s'] / 1e6:.1f} MB/s "
        f"  refused {found['refusals_per_s']:.1f}/s   fallbacks {found['fallbacks_per_s']:.1f}/s"
    )
    in_time = (
        f"in time: TTFT within {slo['ttft_s']:g} s {_share(slo['ttft_attained'])}, "
        f"TPOT within {slo['tpot_s']:g} s {_share(slo['tpot_attained'])}"
    )
    lines = (f"pdserve {url}, the last {found['interval_s']:.1f} s", work, in_time)
    return Text("\n".join(lines))


def _latencies(found: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, title="requests that ended; ITL: of all tokens")
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
