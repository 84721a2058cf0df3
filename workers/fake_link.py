"""The link between two fake engines: TCP, one connection a transfer, one JSON object a line.

decode → {"fetch": transfer, "instance_id": instance id of the source}
prefill → {"kv": hex, "blocks": n, "first_token": t, "exposed_s": s}   once computed,
          or {"error": reason}
decode → {"ack": true}

Whoever closes the connection before that gives the transfer up, and the other side frees its
blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Protocol

from pdserve.errors import TransferFailed
from workers.fake_sequence import Handoff

if TYPE_CHECKING:
    from workers.fake_settings import FakeKv

_CONNECT_S = 30.0


class TransferSource(Protocol):
    """The prefill engine as its link sees it."""

    async def fetch(self, transfer_id: str) -> Handoff:
        """Waits until the blocks are computed, then puts them in flight. Raises TransferFailed."""
        ...

    async def travel(self, transfer_id: str) -> float:
        """Takes the scripted time of a transfer and returns it, in seconds. Raises TransferFailed
        where the link shall break."""
        ...

    def release(self, transfer_id: str, reason: str) -> None:
        """The blocks have arrived, or nobody wants them any more."""
        ...


class LinkServer:
    """State: the listening socket and the connections being served."""

    def __init__(self, source: TransferSource, kv: FakeKv) -> None:
        self._source = source
        self._kv = kv
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listens on a free port; returns host:port."""
        self._server = await asyncio.start_server(self._serve, self._kv.host, 0)
        return f"{self._kv.host}:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Breaks every transfer off and listens no more; idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()

    async def close(self) -> None:
        """Stops, and waits until the connections are closed; idempotent."""
        self.stop()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                await self._transfer(reader, writer)
        finally:
            self._connections.discard(task)
            await _close(writer)

    async def _transfer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_CONNECT_S):
            asked = await _receive(reader)
        transfer_id = str(asked.get("fetch", ""))
        if asked.get("instance_id") != self._kv.instance_id:
            await _send(writer, {"error": "the prefill worker was started anew"})
            return
        acknowledged = asyncio.ensure_future(reader.readline())
        answer = asyncio.ensure_future(self._answer(transfer_id, writer))
        reason, owned = "the decode worker gave up", True
        try:
            async with asyncio.timeout(self._kv.pairing_s + self._kv.receive_timeout_s):
                await asyncio.wait({acknowledged, answer}, return_when=asyncio.FIRST_COMPLETED)
                owned = not answer.done() or answer.result()
                if answer.done() and owned and await acknowledged:
                    reason = "it has arrived"
        finally:
            answer.cancel()
            acknowledged.cancel()
            await asyncio.gather(answer, acknowledged, return_exceptions=True)
            if owned:
                self._source.release(transfer_id, reason)

    async def _answer(self, transfer_id: str, writer: asyncio.StreamWriter) -> bool:
        """Sends the handoff, or False: why there is none for this connection.

        Raises ConnectionError where the link shall break.
        """
        try:
            handoff = await self._source.fetch(transfer_id)
        except TransferFailed as error:
            await _send(writer, {"error": error.message})
            return False
        try:
            exposed_s = await self._source.travel(transfer_id)
        except TransferFailed as error:
            raise ConnectionAbortedError(error.message) from error
        await _send(
            writer,
            {
                "kv": handoff.kv.hex(),
                "blocks": handoff.blocks,
                "first_token": handoff.first_token,
                "exposed_s": exposed_s,
            },
        )
        return True


class LinkClient:
    """The decode side of one transfer; closing it before `acknowledge` gives the transfer up."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: str) -> LinkClient:
        """Raises OSError or TimeoutError; TransferFailed for an address that is none."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise TransferFailed(f"source_address {address!r} is not host:port")
        async with asyncio.timeout(_CONNECT_S):
            return cls(*await asyncio.open_connection(host, int(port)))

    async def fetch(self, transfer_id: str, instance_id: str) -> tuple[Handoff, float]:
        """Waits for the handoff; also returns the seconds since prefill and grant were both done.

        Raises TransferFailed when the other side has none.
        """
        await _send(self._writer, {"fetch": transfer_id, "instance_id": instance_id})
        answer = await _receive(self._reader)
        if "error" in answer:
            raise TransferFailed(str(answer["error"]))
        kv, first_token = bytes.fromhex(answer["kv"]), int(answer["first_token"])
        return Handoff(kv, int(answer["blocks"]), first_token), float(answer["exposed_s"])

    async def acknowledge(self) -> None:
        await _send(self._writer, {"ack": True})

    async def close(self) -> None:
        await _close(self._writer)


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises ConnectionError at the end of the stream, ValueError for what is not ours."""
    line = await reader.readline()
    if not line:
        raise ConnectionResetError("the link was closed")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
