"""KV caches without an engine: plain or shared memory that is laid out as vLLM lays it out."""

from __future__ import annotations

import ctypes
import mmap
import random

import numpy as np

from kv_transfer.layout import KvGeometry
from kv_transfer.memory import KvRegion, SharedMemory
from kv_transfer.transport.base import LocalKv


def geometry(
    layers: int = 3, blocks: int = 24, page: int = 64, *, layers_inside: bool = False, gap: int = 0
) -> KvGeometry:
    """All layers of a block side by side, or all blocks of a layer."""
    unit = page + gap
    layer_stride, block_stride = (unit, layers * unit) if layers_inside else (blocks * unit, unit)
    return KvGeometry(layers, blocks, page, layer_stride, block_stride)


class Cache:
    """A KV cache full of random bytes. `close` releases shared memory; plain memory is Python's."""

    def __init__(self, shape: KvGeometry, *, seed: int, shared: bool = False) -> None:
        size = shape.span_bytes + 16
        self.shared: SharedMemory | None = None
        if shared:
            self.shared = SharedMemory("test-kv")
            self.shared.grow(size)
            self._memory: mmap.mmap | bytearray = mmap.mmap(self.shared.fd, size)
        else:
            self._memory = bytearray(size)
        self._memory[:] = random.Random(seed).randbytes(size)
        self._anchor: ctypes.Array[ctypes.c_char] = (ctypes.c_char * size).from_buffer(self._memory)
        self.region = KvRegion(ctypes.addressof(self._anchor), size, shape)

    @property
    def local(self) -> LocalKv:
        """As a transport takes it."""
        return LocalKv((self.region,), self.shared)

    def snapshot(self) -> bytes:
        """Every byte, also those between the pages."""
        return bytes(self._memory)

    def block(self, block: int) -> list[bytes]:
        """The block's pages, by layer."""
        return [page.tobytes() for page in self.region._array()[:, block]]

    def blocks(self) -> list[list[bytes]]:
        """All of them."""
        return [self.block(b) for b in range(self.region.geometry.num_blocks)]

    def write(self, block: int, seed: int) -> None:
        """New random content for a block."""
        g, rng = self.region.geometry, random.Random(seed)
        self.fill(block, [rng.randbytes(g.page_bytes) for _ in range(g.num_layers)])

    def fill(self, block: int, pages: list[bytes]) -> None:
        """These pages for a block, by layer."""
        for layer, page in enumerate(pages):
            self.put(block, layer, page)

    def put(self, block: int, layer: int, page: bytes) -> None:
        """One page's content."""
        self.region._array()[layer, block] = np.frombuffer(page, np.uint8)

    def close(self) -> None:
        """Idempotent; when nobody touches the region any more."""
        if self.shared is not None and isinstance(self._memory, mmap.mmap):
            self._anchor = (ctypes.c_char * 0)()
            self._memory.close()
            self.shared.close()
