"""What a person at a terminal sees while a replay runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.records import Status
    from benchmarks.targets import ServedModel
    from benchmarks.workload import Workload


@dataclass(slots=True)
class Tally:
    """Requests of one replay so far."""

    sent: int = 0
    ended: int = 0
    failed: int = 0

    def end(self, status: Status) -> None:
        """One more has ended."""
        self.ended += 1
        self.failed += status != "ok"

    def __str__(self) -> str:
        running = f"{self.sent - self.ended} running"
        return f"{running}, {self.failed} failed" if self.failed else running


class ReplayProgress:
    """A bar on a terminal, and a line about what is replayed anywhere. A context manager; the bar
    is gone when it ends.
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
        self._tally = Tally()

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
        self._tally.sent += 1
        self._show()

    def finished(self, status: Status) -> None:
        """Count a request ended."""
        self._tally.end(status)
        self._show()

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._tally.ended, detail=str(self._tally))
