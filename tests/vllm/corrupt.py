"""Loaded into a prefill engine's process: damages or delays the KV that it sends, as a file
tells it to."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from kv_transfer.memory import KvRegion

_ORDERS = Path(os.environ["PDSERVE_TEST_CORRUPT"])
# Is there once a copy stands still.
_STALLED = _ORDERS.with_suffix(".stalled")
_copy = KvRegion.copy_from


def _damaged(self: KvRegion, source: KvRegion, source_ids: list[int], own_ids: list[int]) -> int:
    while (order := _ORDERS.read_text(encoding="ascii").strip()) == "stall":
        _STALLED.touch()
        time.sleep(0.01)
    if order == "swap":
        # With the last, partly filled block. Two full blocks of one request may change places
        # unseen: keys carry their positions, and attention sums over them in any order.
        source_ids = [source_ids[-1], *source_ids[1:-1], source_ids[0]]
    if order == "repeat":
        source_ids = [source_ids[1], *source_ids[1:]]
    copied = _copy(self, source, source_ids, own_ids)
    if order == "zero":
        g = self.geometry
        for layer in range(g.num_layers):
            ctypes.memset(self.address + g.page_offset(layer, own_ids[0]), 0, g.page_bytes)
    return copied


KvRegion.copy_from = _damaged  # type: ignore[method-assign]
