"""The router's end of a connection that a worker's frames come over, and its commands go over: see
pdserve/frames.py."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from pdserve.frames import MessageParser, pack
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.frames import Offer


class FrameConnection(asyncio.Protocol):
    """Gives each frame to `on_frame` as it comes. `ended` is done when no frame follows, with the
    error of a frame that could not be handled. State: the commands that wait, packed, for the next
    turn of the loop, or for a worker that reads slower than it is told."""

    def __init__(
        self, offer: Offer, on_frame: Callable[[w.StepFrame], None], *, max_waiting: int
    ) -> None:
        self._offer = offer
        self._on_frame = on_frame
        self._parser = MessageParser(w.StepFrame)
        self._waiting: list[bytes] = []
        self._max_waiting = max_waiting
        self._is_paused = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def takes_commands(self) -> bool:
        """Whether the worker takes them here."""
        return self._offer.takes_commands

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def start(self) -> None:
        """Frames come from now on."""
        self._transport.write(self._offer.token)

    def put_nowait(self, command: w.Command) -> None:
        """Send a command behind those before it. Those of one turn of the loop go in one write.
        Raises asyncio.QueueFull where too many wait, ValueError for one that is too large."""
        if len(self._waiting) >= self._max_waiting:
            raise asyncio.QueueFull
        self._waiting.append(pack(command))
        if len(self._waiting) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if not self._waiting or self._is_paused or self._transport.is_closing():
            return
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._transport.write(data)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            for frame in self._parser.feed(data):
                self._on_frame(frame)
        except Exception as error:  # noqa: BLE001 - the link's task tells of it
            self.ended.set_exception(error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """No frame is given from now on."""
        self.ended.cancel()
        self._transport.abort()


async def connect(
    address: str,
    offer: Offer,
    on_frame: Callable[[w.StepFrame], None],
    *,
    within_s: float,
    max_waiting: int,
) -> FrameConnection:
    """To the worker whose gRPC is at `address` (host:port). Raises OSError, TimeoutError too."""
    host = address.rpartition(":")[0].strip("[]")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(within_s):
        _, connection = await loop.create_connection(
            lambda: FrameConnection(offer, on_frame, max_waiting=max_waiting), host, offer.port
        )
    return connection
