"""Loaded into a prefill engine's process: damages or delays the KV that it announces, by the order
in a file.

"swap", "repeat", "shift" and "drop" use wrong blocks in place of the request's, also for the
digests. "rotary" scales the rotary embedding of keys and queries, as a wrong attention factor does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import _custom_ops

from kv_transfer.protocol.producer import Producer
from kv_transfer.transport.mapped import MappedProducer
from kv_transfer.transport.tcp import TcpProducer

if TYPE_CHECKING:
    from kv_transfer.cache.geometry import PagePart
    from kv_transfer.cache.host_memory import BlockCopy
    from kv_transfer.protocol.messages import ChunkReady

_ORDERS = Path(os.environ["PDSERVE_TEST_CORRUPT_KV"])
# This file exists once a copy is held.
_STALLED = _ORDERS.with_suffix(".stalled")
_sends = {producer: producer.send for producer in (MappedProducer, TcpProducer)}


def _order() -> str:
    return _ORDERS.read_text(encoding="ascii").strip()


def _held(
    self: MappedProducer | TcpProducer,
    chunk: ChunkReady,
    block_ids: list[int],
    part: PagePart,
) -> BlockCopy:
    while _order() == "stall":
        _STALLED.touch()
        time.sleep(0.01)
    return _sends[type(self)](self, chunk, block_ids, part)  # type: ignore[arg-type]


_progress = Producer.progress


def _moved(self: Any, transfer_id: str, tables: list[list[int]], *rest: Any) -> Any:
    ids = list(tables[0])
    if (order := _order()) == "swap":
        # Swap with the last, partly filled block. A swap of two full blocks of one request would
        # change nothing: keys contain their positions, and attention sums over them in any order.
        ids[0], ids[-1] = ids[-1], ids[0]
    elif order == "repeat":
        ids[0] = ids[1]
    elif order == "shift":
        ids = [*ids[-1:], *ids[:-1]]
    elif order == "drop":
        ids[-1] = 0  # vLLM's null block, in whose place nothing was written
    return _progress(self, transfer_id, [ids, *tables[1:]], *rest)


_rotary = _custom_ops.rotary_embedding


def _scaled(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin: Any, *more: Any, **options: Any
) -> None:
    if _order() == "rotary":
        cos_sin = cos_sin * 1.1
    _rotary(positions, query, key, head_size, cos_sin, *more, **options)


_custom_ops.rotary_embedding = _scaled
Producer.progress = _moved  # type: ignore[method-assign]
for _producer in _sends:
    _producer.send = _held  # type: ignore[method-assign]
    _producer.is_quick = False  # a held copy must not block the engine's step
