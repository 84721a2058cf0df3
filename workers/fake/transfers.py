"""Transfers between fake engines of different processes: TCP, one connection a transfer.

The consumer sends a transfer id and the producer's instance id as one line of JSON, and gets a
FakeKv, or the text of an error. The producer releases the blocks when the connection closes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.protocol.link import DEAD_PEER_S
from pdserve.errors import TransferFailed
from pdserve.net.sockets import detect_dead_peer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    Lend = Callable[[str, str], AbstractAsyncContextManager["FakeKv"]]


class FakeKv(msgspec.Struct, frozen=True):
    """Data sent from prefill to decode. `kv`: a digest. `blocks`: its size. `token`: the last
    token. `exposed_s`: duration of the transfer after the end of prefill."""

    kv: bytes
    blocks: int
    token: int
    exposed_s: float = 0.0


async def serve(lend: Lend, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection. `lend(transfer_id, instance_id)` holds the KV of a transfer while it
    is entered."""
    answer: asyncio.Future[None] | None = None
    try:
        request = msgspec.json.decode(await reader.readline(), type=tuple[str, str])
        answer = asyncio.ensure_future(_answer(request, lend, writer))
        await reader.read()  # returns when the consumer closes the connection
    except (OSError, ValueError):
        pass  # the consumer has left, or the peer speaks another protocol
    finally:
        if answer is not None:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
        writer.close()


async def _answer(request: tuple[str, str], lend: Lend, writer: asyncio.StreamWriter) -> None:
    """Send the handoff and hold its blocks until this is cancelled."""
    try:
        async with lend(*request) as handoff:
            writer.write(msgspec.json.encode(handoff) + b"\n")
            await asyncio.Event().wait()
    except TransferFailed as error:
        writer.write(msgspec.json.encode(error.message) + b"\n")


async def fetch(address: str, transfer_id: str, instance_id: str) -> FakeKv:
    """Fetch the KV of a transfer. Raises TransferFailed, OSError, ValueError."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(DEAD_PEER_S):
        reader, writer = await asyncio.open_connection(host, int(port))
    detect_dead_peer(writer.get_extra_info("socket"), DEAD_PEER_S)
    try:
        writer.write(msgspec.json.encode((transfer_id, instance_id)) + b"\n")
        answer = msgspec.json.decode(await reader.readline(), type=FakeKv | str)
    finally:
        writer.close()
    if isinstance(answer, str):
        raise TransferFailed(answer)
    return answer
