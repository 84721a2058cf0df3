"""Policies beside each other: the same requests, by each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulation.run import Setup, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.simulation.arrivals import Arrivals
    from benchmarks.simulation.summary import Summary


@dataclass(frozen=True, slots=True)
class Compared:
    """What each policy did with one trace, in the order in which they were named."""

    trace: str
    summaries: tuple[Summary, ...]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"trace": self.trace, "policies": [x.plain() for x in self.summaries]}


def compare(
    setup: Setup,
    policies: Sequence[str],
    loads: Sequence[tuple[str, Arrivals]],
    tell: Callable[[str], None],
) -> list[Compared]:
    """Every policy on every load."""
    found = []
    for trace, arrivals in loads:
        summaries = []
        for policy in policies:
            config = replace(setup.settings.config, policy=policy)
            settings = replace(setup.settings, config=config)
            finished = simulate(replace(setup, settings=settings), arrivals)
            summaries.append(finished.summary)
            tell(f"{trace}, {policy}: {finished.summary.attainment:.1%}")
        found.append(Compared(trace, tuple(summaries)))
    return found


def show(found: Sequence[Compared]) -> None:
    """Print a table."""
    out = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    columns = ("trace", "policy", "kept", "goodput/s", "TTFT p50", "p90", "p99", "TPOT p50", "p99")
    for column in (*columns, "local"):
        table.add_column(column, justify="left" if column in ("trace", "policy") else "right")
    for compared in found:
        for number, summary in enumerate(compared.summaries):
            table.add_row("" if number else compared.trace, *_row(summary))
    out.print(table)
    out.print("kept: share of the requests within both SLOs; times in ms")


def _row(summary: Summary) -> list[str]:
    ttft, tpot = summary.ttft, summary.tpot
    firsts = [] if ttft is None else [ttft.p50, ttft.p90, ttft.p99]
    gaps = [] if tpot is None else [tpot.p50, tpot.p99]
    return [
        summary.policy,
        f"{summary.attainment:.1%}",
        f"{summary.goodput_per_s:.2f}",
        *(f"{1e3 * x:.0f}" for x in firsts or [0.0] * 3),
        *(f"{1e3 * x:.1f}" for x in gaps or [0.0] * 2),
        f"{summary.local_share:.0%}",
    ]
