"""The matrix for people: on a terminal, and as the README's table."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.table import Table

from benchmarks.report import stdout_console

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    from rich.status import Status

    from benchmarks.chaos.overload import OverloadResult
    from benchmarks.chaos.result import MatrixResult, RowResult
    from benchmarks.chaos.scene import Fault
    from benchmarks.chaos.soak import SoakResult

_SPEAK_EVERY_S = 10.0
_HEADS = ("requests", "failed", "wrong tokens", "leaked blocks", "left", "pause", "whole after")


class Progress:
    """What happens now, on standard error: a line that changes on a terminal, and a line a row
    anywhere."""

    def __init__(self, directory: Path) -> None:
        self._console = Console(stderr=True)
        self._directory = directory
        self._status: Status | None = None
        self._next_s = 0.0

    def __enter__(self) -> Self:
        self._console.print(f"logs in {self._directory}", highlight=False)
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def doing(self, row: str, text: str) -> None:
        """Of one row, or of the whole."""
        if self._status is not None:
            self._status.update(f"{row}: {text}")
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _SPEAK_EVERY_S
            self._console.print(f"{row}: {text}", highlight=False, markup=False)

    def done(self, row: RowResult) -> None:
        """A row is over."""
        verdict = "ok" if row.passed else "FAILED"
        said = "; ".join([*row.notes, *(f"{x} x{n}" for x, n in row.fallbacks.items())])
        line = f"{verdict:6} {row.name}: {row.requests} requests, pause {row.pause_s:.2f} s, {said}"
        self._console.print(line, highlight=False, markup=False)
        for text in (*row.errors, *row.left):
            self._console.print(f"       {text}", highlight=False, markup=False)


def cells(row: RowResult) -> tuple[str, ...]:
    """A row's figures."""
    failed = f"{row.failed}" if not row.excused else f"{row.failed} (+{row.excused} excused)"
    return (
        str(row.requests),
        failed,
        str(row.wrong_tokens),
        str(row.leaked_blocks),
        str(len(row.left)) if row.left else "0",
        f"{row.pause_s:.1f} s",
        f"{row.whole_s:.1f} s",
    )


def render(result: MatrixResult, took_s: float) -> None:
    """Print the matrix."""
    console = stdout_console()
    table = Table("fault", *_HEADS, "")
    for row in result.rows:
        verdict = "ok" if row.passed else ("not hit" if not row.hit else "FAILED")
        table.add_row(row.name, *cells(row), verdict)
    console.print(table)
    for text in result.left:
        console.print(f"left behind: {text}", highlight=False, markup=False)
    passed = sum(row.passed for row in result.rows)
    about = f"{result.engine}, {result.workers}, {took_s:.0f} s"
    console.print(f"{passed} of {len(result.rows)} rows passed ({about})", highlight=False)


def render_soak(result: SoakResult) -> None:
    """Print what became of everything."""
    ended = ", ".join(f"{count} {what}" for what, count in result.ended.items())
    done = ", ".join(f"{what}: {count}" for what, count in sorted(result.done.items()))
    memory = [
        f"{x.name}: private memory {x.private_mib[0]:g} MiB after {x.since_s:.0f} s, "
        f"{x.private_mib[1]:g} after {x.since_s + x.seconds:.0f} s, "
        f"{x.private_mib_per_h:+g} an hour (resident {x.resident_mib_per_h:+g})"
        for x in result.memory
    ]
    short = ", ".join(f"{count} of {name}" for name, count in result.short_lives.items())
    if short:
        memory.append(f"lives too short to tell of their memory: {short}")
    lines = [
        f"{result.requests} requests in {result.seconds:.0f} s: {ended}",
        (
            f"{result.wrong_tokens} wrong tokens in {result.compared} answers, "
            f"{result.leaked_blocks} leaked blocks, longest pause {result.longest_pause_s:.1f} s"
        ),
        f"faults: {done}",
        f"fallbacks: {sum(result.fallbacks.values())}",
    ]
    _say([*lines, *memory, *result.grew, *_ends(result)])


def render_overload(result: OverloadResult) -> None:
    """Print what became of a service that was asked too much."""
    fates = ", ".join(f"{count} {what}" for what, count in result.fates.items())
    after = "not within" if result.normal_s is None else f"{result.normal_s:.1f} s after"
    lines = [
        (
            f"capacity {result.capacity_per_s:g} requests a second; for {result.seconds:g} s "
            f"{result.offered_per_s:g} were sent and {result.served_per_s:g} served"
        ),
        (
            f"in all {fates}; {result.refused_untold} refused without a time to try again, "
            f"{result.wrong_answers} wrong answers, {result.leaked_blocks} leaked blocks"
        ),
        (
            f"first token, median: {1000 * result.calm_ttft_s:.0f} ms before, "
            f"{1000 * result.overload_ttft_s:.0f} ms meanwhile; as before {after} the overload"
        ),
        "memory, MiB before, at most, at the end: "
        + ", ".join(f"{name} {a:g} {b:g} {c:g}" for name, (a, b, c) in result.memory_mib.items()),
    ]
    _say([*lines, *_ends(result)])


def _ends(result: SoakResult | OverloadResult) -> list[str]:
    left = [f"left: {text}" for text in result.left]
    return [*result.errors, *left, "passed" if result.passed else "FAILED"]


def _say(lines: Iterable[str]) -> None:
    console = stdout_console()
    for line in lines:
        console.print(line, highlight=False, markup=False)


def list_faults(faults: Iterable[Fault]) -> None:
    """Names and what they do."""
    for fault in faults:
        note = " (vLLM only)" if fault.needs_vllm else ""
        sys.stdout.write(f"{fault.name:21} {fault.what}{note}\n")


def markdown(result: MatrixResult) -> str:
    """The README's table."""
    lines = [
        f"| fault | {' | '.join(_HEADS)} |",
        f"|---|{'---:|' * len(_HEADS)}",
    ]
    lines += [f"| {row.what} | {' | '.join(cells(row))} |" for row in result.rows]
    return "\n".join(lines) + "\n"
