"""The router's end of a connection that a worker's frames come over: see pdserve/frames.py."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from pdserve.frames import FrameParser

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.frames import Offer
    from pdserve.v1 import worker_pb2 as w


class FrameReader(asyncio.Protocol):
    """Gives each frame to `on_frame` as it comes. `ended` is done when no frame follows, with the
    error of a frame that could not be handled."""

    def __init__(self, token: bytes, on_frame: Callable[[w.StepFrame], None]) -> None:
        self._token = token
        self._on_frame = on_frame
        self._parser = FrameParser()
        self._transport: asyncio.Transport
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def start(self) -> None:
        """Frames come from now on."""
        self._transport.write(self._token)

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
    address: str, offer: Offer, on_frame: Callable[[w.StepFrame], None], *, within_s: float
) -> FrameReader:
    """To the worker whose gRPC is at `address` (host:port). Raises OSError, TimeoutError too."""
    host = address.rpartition(":")[0].strip("[]")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(within_s):
        _, reader = await loop.create_connection(
            lambda: FrameReader(offer.token, on_frame), host, offer.port
        )
    return reader
