"""Progress on standard error: one changing line on a terminal, else a line every ten seconds."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console

if TYPE_CHECKING:
    from rich.status import Status as Spinner

    from benchmarks.records import Status

EVERY_S: Final = 10.0


class Progress:
    """What a benchmark does now. State: the current step, and the requests of one replay."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._spinner: Spinner | None = None
        self._step = ""
        self._said: set[str] = set()
        self._next_s = time.monotonic() + EVERY_S
        self._total = self._sent = 0
        self._ended: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Drawing holds the interpreter lock; drawn more often it would delay requests.
            self._spinner = self._console.status("", refresh_per_second=4)
            self._spinner.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def say_once(self, text: str) -> None:
        """Print a line unless it was printed before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def step(self, text: str) -> None:
        """A new step begins."""
        self._step, self._total = text, 0
        self._show()

    def begin(self, requests: int) -> None:
        """A replay of so many requests begins."""
        self._total, self._sent = requests, 0
        self._ended.clear()

    def sent(self) -> None:
        self._sent += 1
        self._show()

    def ended(self, status: Status) -> None:
        self._ended[status] += 1
        self._show()

    def _show(self) -> None:
        text = self._step
        if self._total:
            ended = self._ended.total()
            text += f"{': ' if text else ''}{self._sent - ended} running, {ended} of {self._total}"
            bad = ended - self._ended["ok"]
            text += f" ended, {bad} failed" if bad else " ended"
        if self._spinner is not None:
            self._spinner.update(text)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            self.say(text)
