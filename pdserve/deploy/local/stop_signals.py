"""Signals to `pdserve up`: the first one stops the service, the second one kills its processes."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """State: `stopped` and `killed`, which get the exit code with the first and the second
    signal."""

    def __init__(self, on_kill: Callable[[], None], code: int) -> None:
        """Handle signals until `close`. `on_kill` is called with the second one."""
        self._loop = asyncio.get_running_loop()
        self._on_kill, self._code = on_kill, code
        self.stopped: asyncio.Future[int] = self._loop.create_future()
        self.killed: asyncio.Future[int] = self._loop.create_future()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self.stopped.done():
            self.stopped.set_result(self._code)
        elif not self.killed.done():
            self._on_kill()
            self.killed.set_result(self._code)

    def close(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)
