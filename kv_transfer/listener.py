"""Where a worker's KV is reached: a listening socket and the thread that accepts."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

# For the one connection that is just being served.
JOIN_S = 30.0
PAUSE_S = 0.1
TICK_S = 0.5


class Listener:
    """Bound at birth, on a free port of `host`; accepts once started. Released by `close`."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), backlog=64)
        name, port = self._socket.getsockname()[:2]
        self.address = f"{name}:{port}"
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, serve: Callable[[socket.socket], None], tick: Callable[[], None]) -> None:
        """`serve` owns each connection. `tick` is called about twice a second while none comes, for
        what must not wait for an engine that has no step to run. Both on the accepting thread."""
        self._socket.settimeout(TICK_S)
        thread = threading.Thread(
            target=self._accept, args=[serve, tick], daemon=True, name="kv-accept"
        )
        self._thread = thread
        thread.start()

    def close(self) -> None:
        """Idempotent. `serve` is not called any more when it returns."""
        self._closing.set()
        # shutdown wakes the thread that is blocked in accept; close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                logger.error("the thread that accepts KV links did not end")
        self._socket.close()

    def _accept(self, serve: Callable[[socket.socket], None], tick: Callable[[], None]) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                tick()
                continue
            except OSError as error:
                # Out of descriptors, or a peer that went away: the next one may have more luck.
                if not self._closing.wait(PAUSE_S):
                    logger.warning("a KV link could not be accepted: %s", error)
                continue
            try:
                serve(connection)
            except RuntimeError as error:  # no more threads can be started
                connection.close()
                logger.warning("a KV link could not be served: %s", error)
