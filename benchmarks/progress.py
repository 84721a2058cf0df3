"""Progress on standard error: a status line on a terminal, or else a line every ten seconds."""

from __future__ import annotations

import time
from typing import Final, Self

from rich.console import Console

EVERY_S: Final = 10.0


class Progress:
    """Shows the current step of a benchmark, and how many requests of its replay have ended."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        # Drawing holds the GIL, so a higher refresh rate would delay requests.
        self._spinner = self._console.status("", refresh_per_second=4)
        self._step = ""
        self._said: set[str] = set()
        self._next_s = time.monotonic() + EVERY_S
        self._total = self._ended = self._failed = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._spinner.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._spinner.stop()

    def say(self, text: str, *, once: bool = False) -> None:
        """Print a permanent line. With `once`, skip it if it was printed before."""
        if not (once and text in self._said):
            self._said.add(text)
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, text: str) -> None:
        self._step = text
        self.requests(0)

    def requests(self, count: int) -> None:
        """Start the progress of a replay with `count` requests."""
        self._total, self._ended, self._failed = count, 0, 0
        self._show()

    def ended(self, *, is_ok: bool) -> None:
        self._ended += 1
        self._failed += not is_ok
        self._show()

    def _show(self) -> None:
        text = self._step
        if self._total:
            text = f"{text or 'replay'}: {self._ended} of {self._total} requests ended"
            text += f", {self._failed} failed" if self._failed else ""
        if self._console.is_terminal:
            self._spinner.update(text)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            self.say(text)
