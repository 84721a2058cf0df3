"""Loaded into a prefill engine's process: damages or delays the KV that it sends, as a file
tells it to. What it damages once, it takes out of the file."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kv_transfer.memory import KvRegion
from kv_transfer.scattering import send_pieces
from kv_transfer.transport import tcp
from kv_transfer.transport.shm import ShmSource

if TYPE_CHECKING:
    import socket

_ORDERS = Path(os.environ["PDSERVE_TEST_CORRUPT"])
# Is there once a copy stands still.
_STALLED = _ORDERS.with_suffix(".stalled")
_copy = KvRegion.copy_from
_send_pages = tcp.send_pages


def _order() -> str:
    return _ORDERS.read_text(encoding="ascii").strip()


def _flips() -> bool:
    """Whether the order is to flip a bit of what goes now."""
    order = _order()
    if order == "flip once":
        _ORDERS.write_text("", encoding="ascii")
    return order.startswith("flip")


def _damaged(
    self: KvRegion,
    source: KvRegion,
    source_ids: list[int],
    own_ids: list[int],
    digests: bool = False,
) -> int:
    while (order := _order()) == "stall":
        _STALLED.touch()
        time.sleep(0.01)
    if order == "swap":
        # With the last, partly filled block. Two full blocks of one request may change places
        # unseen: keys carry their positions, and attention sums over them in any order.
        source_ids = [source_ids[-1], *source_ids[1:-1], source_ids[0]]
    if order == "repeat":
        source_ids = [source_ids[1], *source_ids[1:]]
    mark = _copy(self, source, source_ids, own_ids, digests)
    g = self.geometry
    if order == "zero":
        for layer in range(g.num_layers):
            ctypes.memset(self.address + g.page_offset(layer, own_ids[0]), 0, g.page_bytes)
    if _flips():
        at = self.address + g.page_offset(g.num_layers - 1, own_ids[0])
        ctypes.c_uint8.from_address(at).value ^= 0x40
    return mark


def _damaged_send(
    sock: socket.socket, head: bytes, region: KvRegion, block_ids: list[int], flags: int
) -> int:
    if not _flips():
        return _send_pages(sock, head, region, block_ids, flags)
    pages = region.pages(block_ids)
    last = bytearray(pages[-1])
    last[0] ^= 0x40
    return send_pieces(sock, [memoryview(head), *pages[:-1], memoryview(last)], flags)


KvRegion.copy_from = _damaged  # type: ignore[method-assign]
tcp.send_pages = _damaged_send
tcp.UNWAITED_BYTES = tcp.TcpSource.unwaited_bytes = 0  # each chunk goes through it
# A copy that is held must not hold the engine's step: no real copy waits for anybody.
ShmSource.unwaited_bytes = 0
