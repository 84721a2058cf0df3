"""Commands over the frames' connection: few writes, in order."""

from __future__ import annotations

import asyncio

from pdserve.frames import TOKEN_BYTES, MessageParser, Offer
from pdserve.v1 import worker_pb2 as w
from router.frame_connection import FrameConnection


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


async def test_the_commands_of_a_turn_go_in_one_write() -> None:
    transport = Written()
    offer = Offer(4711, bytes(TOKEN_BYTES))
    connection = FrameConnection(offer, lambda _: None, max_waiting=8)
    connection.connection_made(transport)
    turns = [[1, 2], [3], [4, 5, 6]]
    for stream_ids in turns:
        for stream_id in stream_ids:
            connection.put_nowait(w.Command(cancel=w.Cancel(stream_id=stream_id)))
        await asyncio.sleep(0)
    assert [cancels(data) for data in transport.writes] == turns
    connection.ended.cancel()
