"""The worker's end of the connections that its routers' frames go over, and their commands come
over: see pdserve/frames.py."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from typing import TYPE_CHECKING, Self, cast

from pdserve.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.frames import TOKEN_BYTES, MessageParser, Offer, pack
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Callable

# For a router to connect, for a connection to show its token, and for what is written to go out.
CONNECT_S = 10.0
HANDSHAKE_S = 5.0
LINGER_S = 5.0
# Connections that have shown nothing yet.
MAX_STRANGERS = 64
# Commands that wait to be taken; beyond it no more is read than one read brings.
MAX_COMMANDS = 4096


class FramePort:
    """Owns the listening socket, on a free port, and its connections. State: the carriers that wait
    for a router, by the digest of their tokens, and every open connection."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._port = 0
        self._server: asyncio.Server | None = None
        self._awaited: dict[bytes, FrameCarrier] = {}
        self.connections: set[_Connection] = set()

    async def start(self) -> None:
        """Raises ConfigError where none can be had."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Connection(self), self._host, 0)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host}: {error.strerror or error}", field="host"
            ) from error
        self._port = self._server.sockets[0].getsockname()[1]

    def expect(self) -> FrameCarrier:
        """A carrier for whoever shows its token."""
        token = secrets.token_bytes(TOKEN_BYTES)
        digest = _digest(token)
        carrier = FrameCarrier(Offer(self._port, token), lambda: self._awaited.pop(digest, None))
        self._awaited[digest] = carrier
        return carrier

    def take(self, token: bytes) -> FrameCarrier | None:
        """The carrier of this token, once."""
        return self._awaited.pop(_digest(token), None)

    @property
    def has_room(self) -> bool:
        """For one more that has shown nothing."""
        return sum(x.is_stranger for x in self.connections) <= MAX_STRANGERS

    def stop(self) -> None:
        """Ends every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()


class FrameCarrier:
    """Takes the frames of one session, and iterates over its commands. State: the router's
    connection, once it is there; `closed` is done when it is there no more; the commands that
    came."""

    def __init__(self, offer: Offer, forget: Callable[[], object]) -> None:
        self.offer = offer
        self._forget = forget
        self._parser = MessageParser(w.Command)
        self._commands: asyncio.Queue[w.Command | InvalidRequest] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._connection: asyncio.Future[_Connection] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    def connected(self, connection: _Connection) -> None:
        """The router has come."""
        if self._connection.done():  # it was closed meanwhile
            connection.abort()
        else:
            self._connection.set_result(connection)

    def lost(self) -> None:
        """The router's connection is gone."""
        if not self.closed.done():
            self.closed.set_result(None)

    def received(self, data: bytes) -> bool:
        """More of the commands came. False where enough of them wait."""
        try:
            for command in self._parser.feed(data):
                self._commands.put_nowait(command)
        except InvalidRequest as error:
            self._commands.put_nowait(error)
        return self._commands.qsize() < MAX_COMMANDS

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> w.Command:
        """The next command; there is always one to come. Raises InvalidRequest for what is none."""
        if self._commands.empty() and self._connection.done():
            self._connection.result().read_on()
        command = await self._commands.get()
        if isinstance(command, InvalidRequest):
            raise command
        return command

    async def write(self, frame: w.StepFrame) -> None:
        """Waits while the router reads slower than this is called. Raises Unavailable where it does
        not come."""
        if not self._connection.done():
            await asyncio.wait([self._connection], timeout=CONNECT_S)
        if not self._connection.done():
            raise Unavailable("this router does not fetch its frames")
        await self._connection.result().write(pack(frame))

    def close(self) -> None:
        """What was written still goes out. Idempotent."""
        self._forget()
        if self._connection.done() and not self._connection.cancelled():
            self._connection.result().close()
        self._connection.cancel()


class _Connection(asyncio.Protocol):
    """State: what has come of the token, the carrier that it belongs to, whether its router lags
    behind, whether it is read from, and when it is given up."""

    def __init__(self, port: FramePort) -> None:
        self._port = port
        self._shown = b""
        self._carrier: FrameCarrier | None = None
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._reads = True
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    @property
    def is_stranger(self) -> bool:
        return self._carrier is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._port.connections.add(self)
        self._give_up_in(HANDSHAKE_S)
        if not self._port.has_room:
            transport.abort()  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self._carrier is None:
            self._shown += data
            if len(self._shown) < TOKEN_BYTES:
                return
            data = self._shown[TOKEN_BYTES:]
            self._carrier = self._port.take(self._shown[:TOKEN_BYTES])
            if self._carrier is None:
                self._transport.abort()
                return
            self._give_up_in(None)
            self._carrier.connected(self)
        if not self._carrier.received(data) and self._reads:
            self._reads = False
            self._transport.pause_reading()

    def read_on(self) -> None:
        """There is room for commands."""
        if not self._reads and not self._transport.is_closing():
            self._reads = True
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.connections.discard(self)
        self._give_up_in(None)
        self._goes_on.set()
        if self._carrier is not None:
            self._carrier.lost()

    def pause_writing(self) -> None:
        self._goes_on.clear()

    def resume_writing(self) -> None:
        self._goes_on.set()

    async def write(self, data: bytes) -> None:
        self._transport.write(data)
        if not self._goes_on.is_set():
            await self._goes_on.wait()

    def close(self) -> None:
        """Once all has gone out, or LINGER_S have passed."""
        if not self._transport.is_closing():
            self._give_up_in(LINGER_S)
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _give_up_in(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)


def _digest(token: bytes) -> bytes:
    """Looked up in place of the token, so that the time it takes tells nothing of one."""
    return hashlib.sha256(token).digest()
