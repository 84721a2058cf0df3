"""Commands over the frames' connection: few writes, in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.frames import TOKEN_BYTES, MessageParser, Offer
from pdserve.v1 import worker_pb2 as w
from router import frame_connection
from router.frame_connection import FrameConnection
from tests.patience import WAIT_S, skip

if TYPE_CHECKING:
    import pytest


class Written(asyncio.Transport):
    """What was written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False


def cancels(data: bytes) -> list[int]:
    return [command.cancel.stream_id for command in MessageParser(w.Command).feed(data)]


async def test_commands_that_come_soon_after_a_write_wait_for_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_connection, "SPACING_S", WAIT_S)
    transport = Written()
    offer = Offer(4711, bytes(TOKEN_BYTES))
    connection = FrameConnection(offer, lambda _: None, max_waiting=8)
    connection.connection_made(transport)
    turns = ((1, 2), (3,), (4, 5))
    for stream_ids in turns:
        for stream_id in stream_ids:
            connection.put_nowait(w.Command(cancel=w.Cancel(stream_id=stream_id)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    # The first ones went at once, together.
    assert [cancels(data) for data in transport.writes] == [[1, 2]]
    skip(2 * WAIT_S)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [cancels(data) for data in transport.writes] == [[1, 2], [3, 4, 5]]
    connection.ended.cancel()
