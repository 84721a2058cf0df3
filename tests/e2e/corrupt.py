"""Loaded into a prefill engine's process: damages or delays the KV that it announces, as a file
orders. What it damages once, it takes out of the file.

A consumer on the same host reads the producer's memory itself. So the damage is done to the digests
("flip": they do not match what is read) or to the blocks that are announced ("swap", "repeat":
another block is announced, with its digest).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kv_transfer.transport.mapped import MappedProducer
from kv_transfer.transport.tcp import TcpProducer

if TYPE_CHECKING:
    from kv_transfer.layout import PagePart
    from kv_transfer.protocol.messages import ChunkReady

_ORDERS = Path(os.environ["PDSERVE_TEST_CORRUPT"])
# Exists once a copy is held.
_STALLED = _ORDERS.with_suffix(".stalled")
_sends = {producer: producer.send for producer in (MappedProducer, TcpProducer)}


def _order() -> str:
    return _ORDERS.read_text(encoding="ascii").strip()


def _damaged(
    self: MappedProducer | TcpProducer,
    chunk: ChunkReady,
    block_ids: list[int],
    part: PagePart | None,
) -> None:
    while (order := _order()) == "stall":
        _STALLED.touch()
        time.sleep(0.01)
    if order.startswith("flip"):
        if order == "flip once":
            _ORDERS.write_text("", encoding="ascii")
        chunk = replace(chunk, digests=bytes([chunk.digests[0] ^ 0x40]) + chunk.digests[1:])
    moved = list(range(len(block_ids)))
    if order == "swap":
        # With the last, partly filled block. Two full blocks of one request may change places
        # unseen: keys carry their positions, and attention sums over them in any order.
        moved[0], moved[-1] = moved[-1], moved[0]
    elif order == "repeat":
        moved[0] = moved[1]
    digests = [chunk.digests[8 * n : 8 * n + 8] for n in moved]
    chunk = replace(chunk, digests=b"".join(digests))
    _sends[type(self)](self, chunk, [block_ids[n] for n in moved], part)  # type: ignore[arg-type]


for _producer in _sends:
    _producer.send = _damaged  # type: ignore[method-assign]
    _producer.is_quick = False  # a copy that is held must not hold the engine's step
