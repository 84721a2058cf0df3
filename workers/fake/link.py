"""Transfers between fake engines of different processes: TCP, one connection a transfer.

The consumer sends {"transfer_id", "instance_id"} as one line of JSON and gets the fields of a
Handoff, or {"error"}. The producer releases the blocks when the connection closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pdserve.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    Lend = Callable[[str, str], AbstractAsyncContextManager["Handoff"]]


@dataclass(frozen=True, slots=True)
class Handoff:
    """What goes from prefill to decode: the KV (a digest), its size, the last token, and how long
    the transfer took after the prefill had ended."""

    kv: bytes
    blocks: int
    token: int
    exposed_s: float = 0.0


async def listen(host: str, lend: Lend, connections: set[asyncio.Task[None]]) -> asyncio.Server:
    """Serve transfers on a free port. `lend(transfer_id, instance_id)` holds the KV of a transfer
    while it is entered. The tasks of open connections are kept in `connections`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            request = json.loads(await reader.readline())
            answer = asyncio.create_task(_answer(request, lend, writer))
            try:
                await reader.read()  # returns when the consumer closes the connection
            finally:
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
        except (OSError, ValueError):
            pass  # the consumer is gone, or is none
        finally:
            connections.discard(task)
            await _close(writer)

    return await asyncio.start_server(serve, host, 0)


async def _answer(request: dict[str, str], lend: Lend, writer: asyncio.StreamWriter) -> None:
    """Send the handoff and hold its blocks until this is cancelled."""
    try:
        async with lend(request["transfer_id"], request["instance_id"]) as handoff:
            _send(writer, {**asdict(handoff), "kv": handoff.kv.hex()})
            await asyncio.Event().wait()
    except TransferFailed as error:
        _send(writer, {"error": error.message})


async def fetch(address: str, transfer_id: str, instance_id: str) -> dict[str, Any]:
    """Return the fields of the Handoff. Raises TransferFailed, OSError, ValueError."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        _send(writer, {"transfer_id": transfer_id, "instance_id": instance_id})
        answer = json.loads(await reader.readline())
    finally:
        await _close(writer)
    if "error" in answer:
        raise TransferFailed(answer["error"])
    return {**answer, "kv": bytes.fromhex(answer["kv"])}


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
