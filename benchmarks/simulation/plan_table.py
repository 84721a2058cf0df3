"""A plan as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.simulation.plan import first_guess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.simulation.plan import Answer, Question


def show(question: Question, found: Sequence[Answer]) -> None:
    """Print what one worker can do, and each plan."""
    out = Console(highlight=False, soft_wrap=True)
    _, _, one = first_guess(question)
    slo, lengths = question.settings.config.slo, question.lengths
    asked = (
        f"{question.users} users who think for {question.think_s:g} s"
        if question.users
        else f"{question.rate_per_s:g} requests a second"
    )
    out.print(
        f"{asked}, {lengths.prompt:.0f} tokens in and {lengths.output:.0f} out on average; "
        f"{question.target:.1%} within TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s:g} s"
    )
    out.print(
        f"one worker saturates at: prefill {one.prefill_per_s:.2f} requests a second, decode "
        f"{one.decode_per_s:.2f} ({one.batch} at a time, {1e3 * one.step_s:.1f} ms a token), both "
        f"{one.aggregated_per_s:.2f}"
    )
    table = Table(box=None, pad_edge=False)
    columns = ("workers", "all", "kept", "requests/s", "TTFT p50", "p99", "TPOT p50", "p99 ms")
    for column in (*columns, "busy", "cost/h", "per 1M out", "per 1M tokens"):
        table.add_column(column, justify="left" if column == "workers" else "right")
    for answer in found:
        table.add_row(*_row(answer))
    out.print(table)


def _row(answer: Answer) -> list[str]:
    summary, workers = answer.summary, answer.workers
    assert summary.ttft is not None, "a plan answers"
    tpot = summary.tpot
    busy = "/".join(f"{use.busy_share:.0%}" for use in summary.pools.values())
    return [
        str(workers),
        str(sum(workers.by_role.values())),
        f"{summary.attainment:.1%}",
        f"{summary.rate_per_s:.1f}",
        f"{1e3 * summary.ttft.p50:.0f}",
        f"{1e3 * summary.ttft.p99:.0f}",
        "" if tpot is None else f"{1e3 * tpot.p50:.1f}",
        "" if tpot is None else f"{1e3 * tpot.p99:.1f}",
        busy,
        f"{answer.cost_per_hour:g}",
        f"{answer.per_million_output:.3g}",
        f"{answer.per_million:.3g}",
    ]
