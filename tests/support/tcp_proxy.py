"""A TCP proxy controlled by a test, which can hold the traffic and break the connection."""

from __future__ import annotations

import asyncio
import contextlib

_READ_BYTES = 1 << 16


class TcpProxy:
    """A proxy to `address`. It forwards everything, except that it holds the replies of `address`
    after the first `let_through` bytes; `is_holding` is set then. If either end closes, the other
    end is closed. Released by `close`."""

    def __init__(self, address: str, let_through: int) -> None:
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self._let_through = let_through
        self._server: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self.is_holding = asyncio.Event()
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    def cut(self) -> None:
        """Close both ends of every connection."""
        for writer in self._open:
            writer.close()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(*self._to)
        ends = {writer, to_writer}
        self._open |= ends
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, to_writer, None))
                tasks.create_task(self._pass(to_reader, writer, self._let_through))
        finally:
            self._open -= ends

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                if left is not None:
                    if len(data) > left:
                        self.is_holding.set()
                    data, left = data[:left], max(0, left - len(data))
                if data:
                    writer.write(data)
                    await writer.drain()
        writer.close()
