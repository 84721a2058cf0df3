"""A simulation's summary as people read it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.simulation.arrivals import Arrivals
    from benchmarks.simulation.run import Finished, Setup
    from benchmarks.simulation.summary import Summary
    from benchmarks.stats import Distribution

QUIET_S = 2.0


class Ticker:
    """Says on standard error how far a simulation is, once it takes longer than two seconds, and
    how fast it was. A context manager."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = time.monotonic()
        self._told = (0, 0)
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def tell(self, ended: int, asked: int) -> None:
        """Of so many requests so many have ended."""
        seconds = time.monotonic() - self._begun
        self._told = (ended, asked)
        if seconds > QUIET_S and self._is_terminal:
            sys.stderr.write(f"\r{self._what}: {ended} of {asked} requests, {seconds:.0f} s ")
            sys.stderr.flush()

    def __exit__(self, *exc: object) -> None:
        seconds = time.monotonic() - self._begun
        if seconds > QUIET_S and self._told[1] and exc[0] is None:
            start = "\r" if self._is_terminal else ""
            rate = self._told[1] / seconds
            sys.stderr.write(
                f"{start}{self._what}: {self._told[1]} requests in {seconds:.1f} s, "
                f"{rate:.0f} a second\n"
            )


def warnings(setup: Setup, arrivals: Arrivals, finished: Finished) -> list[str]:
    """What a reader must know of the result."""
    found = []
    longest = max(x.prompt_tokens for x in arrivals.requests)
    measured = setup.model.longest_prompt
    if measured and longest > measured:
        found.append(
            f"prompts of up to {longest} tokens are extrapolated: the profile has measured up to "
            f"{measured}"
        )
    found += [f"WRONG, left behind: {what}" for what in finished.leftovers]
    return found


def show(summary: Summary, notes: list[str]) -> None:
    """Print tables, then the notes."""
    out = Console(highlight=False, soft_wrap=True)
    refused = ", ".join(f"{count} {name}" for name, count in summary.refused.items()) or "none"
    out.print(
        f"{summary.workers}, {summary.policy}: {summary.requests} requests in "
        f"{summary.horizon_s:.0f} s ({summary.rate_per_s:.2f} a second), {summary.answered} "
        f"answered; refused: {refused}"
    )
    out.print(
        f"{summary.attainment:.1%} within TTFT {summary.slo_ttft_s:g} s and TPOT "
        f"{summary.slo_tpot_s:g} s: {summary.goodput_per_s:.2f} a second of goodput; "
        f"{summary.output_tokens_per_s:.0f} tokens a second; {summary.local_share:.0%} prefilled "
        f"where they decode; {summary.cached_share:.0%} of prompt tokens cached"
    )
    if summary.came_again:
        out.print(
            f"{summary.came_again} came again when they were told, of whom "
            f"{summary.refused_again} were refused once more"
        )
    out.print(_latencies(summary))
    out.print(_pools(summary))
    if summary.flips:
        out.print(_flips(summary))
        out.print(f"{summary.moved} answers went on elsewhere for it")
    for note in notes:
        out.print(note, markup=False)


def _latencies(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("ms", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    rows = {
        "TTFT": summary.ttft,
        "of it in the router": summary.admission,
        "TPOT": summary.tpot,
        "whole answer": summary.e2e,
    }
    for name, found in rows.items():
        if found is not None:
            table.add_row(name, *_milliseconds(found))
    if summary.itl is not None:
        table.add_row("gaps (ITL)", *(f"{1e3 * x:.1f}" for x in summary.itl.values()), "")
    return table


def _milliseconds(found: Distribution) -> list[str]:
    return [f"{1e3 * x:.1f}" for x in (found.p50, found.p90, found.p95, found.p99, found.max)]


def _pools(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("pool", "workers", "busy", "mean batch", "prompt tokens/s"):
        table.add_column(column, justify="left" if column == "pool" else "right")
    for role, use in summary.pools.items():
        table.add_row(
            role,
            str(use.workers),
            f"{use.busy_share:.0%}",
            f"{use.mean_batch:.1f}",
            f"{use.prompt_tokens_per_s:.0f}",
        )
    return table


def _flips(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("role changed at, s", "worker", "to", "drained, s", "in all, s", "moved"):
        table.add_column(column, justify="left" if column in ("worker", "to") else "right")
    for flip in summary.flips:
        seconds = (f"{flip.drain_s:.2f}", f"{flip.total_s:.2f}")
        table.add_row(f"{flip.at_s:.1f}", flip.worker, flip.role, *seconds, str(flip.moved))
    return table
