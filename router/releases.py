"""What a request has taken, and how each of it is given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Releases:
    """Calls to be made when all is over, the last one first: the callbacks of contextlib's
    ExitStack, which take a request several times as long. State: those not made yet."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def callback(self, release: Callable[..., object], *args: Any) -> None:
        """Have `close` call it."""
        self._calls.append((release, args))

    def close(self) -> None:
        """Make the calls, each once. Where one raises the others are made all the same, and then
        what it raised is raised."""
        while self._calls:
            release, args = self._calls.pop()
            try:
                release(*args)
            except BaseException:
                self.close()
                raise
