"""What ranks send to the process with the step thread."""

from __future__ import annotations

import os
import select
import struct
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kv_transfer.vllm.step import Arrival
from pdserve.types import TransferReport
from tests.support.timeouts import WAIT_S
from workers.vllm.ranks.rank_links import RankLinks

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator


class Ranks:
    """Two ranks' ends of the links."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.lost: list[int] = []
        self.is_lost = threading.Event()
        executor = SimpleNamespace(local_world_size=2, world_size=2, collective_rpc=self._join)
        self.links = RankLinks(executor, "127.0.0.1", self._note_lost)

    def _join(self, _function: Any, args: Any) -> list[bool]:
        point, _ = args
        self.sockets = [point.join(rank) for rank in range(2)]
        return [True, True]

    def _note_lost(self, rank: int) -> None:
        self.lost.append(rank)
        self.is_lost.set()

    def received(self) -> list[Arrival]:
        [wakeup] = self.links.wakeups
        assert select.select([wakeup], [], [], WAIT_S)[0]
        os.eventfd_read(wakeup)
        return self.links.take_received()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.links.close()
    for link in made.sockets:
        link.close()


def message(*arrivals: Arrival) -> bytes:
    body = msgspec.msgpack.encode(list(arrivals))
    return struct.pack("<I", len(body)) + body


def test_arrivals_are_read_whole_however_their_bytes_are_split(ranks: Ranks) -> None:
    first, second = (
        Arrival(name, (7, 8), TransferReport(0.1, 0.0, 64, 2, "shm")) for name in ("a", "b")
    )
    data = message(first) + message(second)
    ranks.sockets[1].sendall(data[:-5])
    assert ranks.received() == [first]
    ranks.sockets[1].sendall(data[-5:])
    assert ranks.received() == [second]


def test_a_rank_whose_link_ends_is_lost(ranks: Ranks) -> None:
    ranks.sockets[0].close()
    assert ranks.is_lost.wait(WAIT_S)
    assert ranks.lost == [0]
