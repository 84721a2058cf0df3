"""uvicorn inside an event loop that is not its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKLOG = 2048
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0


def bind(host: str, port: int, *, key: str = "http_port") -> socket.socket:
    """A bound socket that does not listen yet. Raises ConfigError naming `key`, the port's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio sets TCP_NODELAY only where it reads IPPROTO_TCP, and without
    # it an answer's second packet waits 40 ms for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}", field=key
        ) from error
    return sock


class _Server(uvicorn.Server):
    """Leaves the signals to the process, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WebServer:
    """Serves `app` on `sock`, which it closes. `stop` ends both; owns uvicorn's task."""

    def __init__(self, app: Any, sock: socket.socket) -> None:
        self._socket = sock
        self._server = _Server(
            uvicorn.Config(
                app,
                backlog=BACKLOG,
                http="httptools",
                ws="none",
                lifespan="off",
                # Our own logging is the process's; one line a request is not wanted at all.
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(STOP_TIMEOUT_S),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when connections are taken."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http-server")
        listening = asyncio.create_task(self._server.listening.wait())
        try:
            await asyncio.wait(
                {self._task, listening},
                timeout=START_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            listening.cancel()
        if not self._server.listening.is_set():
            await self.stop()
            raise ConfigError("the HTTP face did not start", field="http_port")

    def stop_listening(self) -> None:
        """Take no more connections; those there are stay until their response is complete."""
        self._server.should_exit = True

    async def stop(self) -> None:
        """Idempotent; cuts what is still open after STOP_TIMEOUT_S."""
        self.stop_listening()
        task, self._task = self._task, None
        if task is None:
            self._socket.close()
            return
        done, _ = await asyncio.wait({task}, timeout=2 * STOP_TIMEOUT_S)
        if not done:
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()
