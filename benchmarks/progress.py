"""What a person at a terminal sees while a replay runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.records import Status
    from benchmarks.targets import ServedModel
    from benchmarks.workload import Workload


class ReplayProgress:
    """A bar on a terminal, and a line about what is replayed anywhere.

    State: how many requests were sent and how many failed. A context manager; the bar is gone when
    it ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
            # Drawing holds the interpreter; more often than this it would show in the lag.
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("preparing", total=None, detail="")
        self._sent = 0
        self._ended = 0
        self._failed = 0

    def __enter__(self) -> ReplayProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def prepared(self, workload: Workload, model: ServedModel) -> None:
        """Say what will be sent."""
        for line in workload.cut.notes():
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._bar.update(self._task, description=model.name, total=workload.cut.requests)

    def sent(self) -> None:
        """Count a request sent."""
        self._sent += 1
        self._show()

    def finished(self, status: Status) -> None:
        """Count a request ended."""
        self._ended += 1
        self._failed += status != "ok"
        self._show()

    def _show(self) -> None:
        detail = f"{self._sent - self._ended} running"
        if self._failed:
            detail += f", {self._failed} failed"
        self._bar.update(self._task, completed=self._ended, detail=detail)
