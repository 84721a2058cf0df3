"""Progress on standard error: one changing line on a terminal, else a line every ten seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console

if TYPE_CHECKING:
    from rich.status import Status

EVERY_S: Final = 10.0


class Progress:
    """What a benchmark does now. State: the current step, and the requests of one replay."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._spinner: Status | None = None
        self._step = ""
        self._said: set[str] = set()
        self._next_s = time.monotonic() + EVERY_S
        self._total = self._sent = self._ended = self._failed = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Drawing holds the interpreter lock; drawn more often it would delay requests.
            self._spinner = self._console.status("", refresh_per_second=4)
            self._spinner.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def say(self, text: str, *, once: bool = False) -> None:
        """Print a line that stays; with `once` unless it was printed before."""
        if not (once and text in self._said):
            self._said.add(text)
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, text: str, requests: int = 0) -> None:
        """A new step begins, with a replay of so many requests."""
        self._step, self._total = text, requests
        self._sent = self._ended = self._failed = 0
        self._show()

    def begin(self, requests: int) -> None:
        self.step(self._step, requests)

    def sent(self) -> None:
        self._sent += 1
        self._show()

    def ended(self, *, is_ok: bool) -> None:
        self._ended += 1
        self._failed += not is_ok
        self._show()

    def _show(self) -> None:
        text = self._step
        if self._total:
            running = f"{self._sent - self._ended} running, {self._ended} of {self._total} ended"
            text += f"{': ' if text else ''}{running}"
            text += f", {self._failed} failed" if self._failed else ""
        if self._spinner is not None:
            self._spinner.update(text)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            self.say(text)
