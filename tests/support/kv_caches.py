"""KV caches without an engine: plain or shared memory in vLLM's layout."""

from __future__ import annotations

import ctypes
import mmap
import random

import numpy as np

from kv_transfer.cache.geometry import KvGeometry
from kv_transfer.cache.host_memory import KvRegion, SharedMemory
from kv_transfer.protocol.transport import LocalKv


def geometry(
    layers: int = 3, blocks: int = 24, page: int = 64, *, layers_inside: bool = False, gap: int = 0
) -> KvGeometry:
    """Return a geometry with all layers of a block together (`layers_inside`), or all blocks of a
    layer."""
    unit = page + gap
    layer_stride, block_stride = (unit, layers * unit) if layers_inside else (blocks * unit, unit)
    return KvGeometry(layers, blocks, page, layer_stride, block_stride)


class HostCache:
    """A KV cache full of random bytes. `close` releases shared memory; Python frees plain
    memory."""

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
        """The cache as the argument of a transport."""
        return LocalKv({0: self.region}, self.shared)

    def snapshot(self) -> bytes:
        """Return every byte, including those between the pages."""
        return bytes(self._memory)

    def block(self, block: int) -> list[bytes]:
        """Return a block's pages, by layer."""
        return [page.tobytes() for page in self.region._array()[:, block]]

    def blocks(self) -> list[list[bytes]]:
        """Return the pages of all blocks."""
        return [self.block(b) for b in range(self.region.geometry.num_blocks)]

    def write(self, block: int, seed: int) -> None:
        """Write new random content into a block."""
        g, rng = self.region.geometry, random.Random(seed)
        self.fill(block, [rng.randbytes(g.page_bytes) for _ in range(g.num_layers)])

    def fill(self, block: int, pages: list[bytes]) -> None:
        """Write these pages, by layer, into a block."""
        for layer, page in enumerate(pages):
            self.put(block, layer, page)

    def put(self, block: int, layer: int, page: bytes) -> None:
        """Write one page."""
        self.region._array()[layer, block] = np.frombuffer(page, np.uint8)

    def close(self) -> None:
        """Release the memory. Call it after the last use of the region. Idempotent."""
        if self.shared is not None and isinstance(self._memory, mmap.mmap):
            self._anchor = (ctypes.c_char * 0)()
            self._memory.close()
            self.shared.close()
