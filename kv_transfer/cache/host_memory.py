"""A worker's KV cache as bytes: pages, copies, digests, shared memory.

For the mapped transport the cache is a memfd, so that nothing is left behind when the process is
killed. A consumer receives its descriptor (transport/descriptors.py). Neither side touches an empty
page before a block needs it, so empty pages take no memory.

Each block has a 64-bit digest over its pages, layer by layer, each page padded with zeros to whole
rows of 16 bytes. The two 64-bit lanes of the rows are summed twice: `sums` is the sum of the rows,
`running` the sum of all intermediate `sums`. The digest therefore changes if a bit changes, or if
rows or pages are swapped. It detects accidents, not forgeries. _copy.c computes the same digest
during the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kv_transfer.errors import KvTransferError, UnsupportedLayout

# False if the package was installed without a C compiler.
IS_COMPILED = find_spec("kv_transfer._copy") is not None
if IS_COMPILED:
    from kv_transfer import _copy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kv_transfer.cache.geometry import KvGeometry

ROW_BYTES, _LANES = 16, 2
DIGEST_BYTES = 8
# Linux maps this much at one read fault (fault_around_bytes). PeerMemory maps so much between two
# looks at `close`.
_FAULT_BYTES, _AHEAD_BYTES = 64 << 10, 16 << 20
_MULTIPLIER, _SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


def boot_id() -> str:
    """Return an id that is equal for all processes of one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class StepEnd(Protocol):
    """A point on the GPU's stream, reached when all work enqueued before it has run."""

    def synchronize(self) -> None:
        """Wait until the GPU reaches this point."""


class BlockCopy(Protocol):
    """A copy of blocks into a KV cache, or a computation of their digests, that may still run."""

    @property
    def has_ended(self) -> bool: ...

    def wait(self) -> bytes:
        """Wait until the copy has ended. Return the digests of the blocks, eight bytes each. No
        copy writes to the blocks when this returns or raises."""


@dataclass(frozen=True, slots=True)
class EndedCopy:
    """A copy that has ended, with its digests."""

    digests: bytes
    has_ended: bool = True

    def wait(self) -> bytes:
        return self.digests


def checked_blocks(first: int, count: int, one_in: int) -> range | None:
    """Return the positions of blocks with digests among the `count` blocks from position `first` of
    the sequence, or None for all. Every `one_in`-th block of a sequence has a digest."""
    return None if one_in == 1 else range(-first % one_in, count, one_in)


@dataclass(frozen=True, slots=True)
class SampledDigests:
    """The digests of `copy` for some of `count` blocks, with zeros for the others."""

    copy: BlockCopy
    checked: range
    count: int

    @property
    def has_ended(self) -> bool:
        return self.copy.has_ended

    def wait(self) -> bytes:
        made, some = bytearray(DIGEST_BYTES * self.count), self.copy.wait()
        for place, n in enumerate(self.checked):
            at = DIGEST_BYTES * place
            made[DIGEST_BYTES * n : DIGEST_BYTES * (n + 1)] = some[at : at + DIGEST_BYTES]
        return bytes(made)


class KvRegion:
    """The bytes of a KV cache, addressed by page. Does not own the memory."""

    is_host = True  # the CPU can read the pages; False in gpu_memory.py

    def __init__(self, address: int, size: int, geometry: KvGeometry) -> None:
        if geometry.span_bytes > size:
            raise UnsupportedLayout(
                f"the layout spans {geometry.span_bytes} bytes of a cache of {size}"
            )
        self.address = address
        self.geometry = geometry
        self.size = size
        self._view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def size_bytes(self, blocks: int) -> int:
        return blocks * self.geometry.block_bytes

    def narrowed(self, layers: range, start: int, size: int) -> KvRegion:
        """Return some layers of the same memory, with each page cut to `size` bytes from `start`.
        Raises KvTransferError if the cache lacks these layers, or pages these bytes."""
        g = self.geometry
        if (len(layers), start, size) == (g.num_layers, 0, g.page_bytes):
            return self
        return KvRegion(self.address, self.size, g.narrowed(layers, start, size))

    def pages_in_memory(self) -> tuple[int, KvGeometry] | None:
        """Return (base address, geometry) of the pages, or None if a page is not one run of
        bytes."""
        return self.address, self.geometry

    def enter_thread(self) -> None:
        """Prepare the calling thread. Each thread that copies or waits for a step calls it
        first."""

    def step_end(self) -> StepEnd | None:
        """Return the end of the engine steps that the calling thread has enqueued, or None if they
        have ended, which is always true in host memory."""
        return None

    def pages(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the pages of these blocks, layer by layer. Raises KvTransferError for an unknown
        block id."""
        g, view = self.geometry, self._view
        self._check(block_ids)
        starts = (
            g.page_offset(layer, block) for layer in range(g.num_layers) for block in block_ids
        )
        return [view[start : start + g.page_bytes] for start in starts]

    def copy_from(self, source: KvRegion, source_ids: list[int], own_ids: list[int]) -> bytes:
        """Copy blocks page by page and return the digests of the bytes read.

        The regions must have equal layers and page sizes; strides may differ. Raises
        KvTransferError before any copy if they do not, or for an unknown block id.
        """
        ours, theirs = self.geometry, source.geometry
        if (ours.num_layers, ours.page_bytes) != (theirs.num_layers, theirs.page_bytes):
            raise KvTransferError("the pages differ in number or size")
        if len(source_ids) != len(own_ids):
            raise KvTransferError(f"{len(source_ids)} blocks for {len(own_ids)} places")
        source._check(source_ids)
        self._check(own_ids)
        if IS_COMPILED:
            return _copy.copy(
                *source._pages_at(source_ids),
                *self._pages_at(own_ids),
                ours.num_layers,
                ours.page_bytes,
            )
        read = source._array()[:, source_ids]
        self._array()[:, own_ids] = read
        return _digests(read)

    def begin_copy(
        self,
        source: KvRegion,
        source_ids: list[int],
        own_ids: list[int],
        checked: range | None = None,
    ) -> BlockCopy:
        """Start `copy_from`. Only digests at the positions `checked` are required. Host memory is
        copied synchronously, with all digests."""
        return EndedCopy(self.copy_from(source, source_ids, own_ids))

    def digests(self, block_ids: list[int]) -> bytes:
        """Return the digests of these blocks, eight bytes each. Raises KvTransferError for an
        unknown block id."""
        self._check(block_ids)
        g = self.geometry
        if IS_COMPILED:
            return _copy.digest(*self._pages_at(block_ids), g.num_layers, g.page_bytes)
        return _digests(self._array()[:, block_ids])

    def begin_digests(self, block_ids: list[int], checked: range | None = None) -> BlockCopy:
        """Start to compute `digests`. Only positions `checked` are required. Digests of host memory
        are computed synchronously."""
        return EndedCopy(self.digests(block_ids))

    def _check(self, block_ids: Sequence[int]) -> None:
        if not self.geometry.has_blocks(block_ids):
            raise KvTransferError(
                f"a block id is not in the KV cache of {self.geometry.num_blocks} blocks"
            )

    def _pages_at(self, block_ids: list[int]) -> tuple[int, int, int, list[int]]:
        g = self.geometry
        return self.address + g.offset_bytes, g.layer_stride_bytes, g.block_stride_bytes, block_ids

    def _array(self) -> NDArray[np.uint8]:
        """Return the cache as [layers, blocks, bytes of a page]."""
        g = self.geometry
        return np.ndarray(
            (g.num_layers, g.num_blocks, g.page_bytes),
            np.uint8,
            self._view,
            g.offset_bytes,
            (g.layer_stride_bytes, g.block_stride_bytes, 1),
        )


def _digests(pages: NDArray[np.uint8]) -> bytes:
    """Return the digests of blocks given as [layers, blocks, bytes of a page]."""
    layers, blocks, size = pages.shape
    if size % ROW_BYTES:
        pages = np.pad(pages, ((0, 0), (0, 0), (0, -size % ROW_BYTES)))
    by_block = np.ascontiguousarray(pages.transpose(1, 0, 2)).view(np.uint64)
    rows = by_block.reshape(blocks, layers * -(-size // ROW_BYTES), _LANES)
    weights = np.arange(rows.shape[1], 0, -1, dtype=np.uint64)
    sums, running = rows.sum(axis=1, dtype=np.uint64), np.einsum("r,brl->bl", weights, rows)
    return fold_digests(sums, running)


def fold_digests(sums: NDArray[np.uint64], running: NDArray[np.uint64]) -> bytes:
    """Return the digests of blocks from their sums, both [blocks, lanes]."""
    digests = np.zeros(len(sums), np.uint64)
    for words in (*sums.T, *running.T):
        digests ^= words
        digests *= _MULTIPLIER
        digests ^= digests >> _SHIFT
    return digests.tobytes()


class SharedMemory:
    """The memfd under a worker's KV cache. Released by `close`.

    Its size is sealed, because a peer's copy would fail (SIGBUS) if mapped pages vanished.
    """

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size = 0

    @property
    def path(self) -> str:
        """Path under which this process can open the memory."""
        return f"/proc/self/fd/{self.fd}"

    def grow(self, size: int) -> None:
        """Set the size. Call it once, before the memory is mapped."""
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.size = size

    def close(self) -> None:
        """Idempotent. Mappings stay valid until their owners drop them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PeerMemory:
    """Another worker's KV cache, mapped read-only: a region for each group with layers on that
    worker. Released by `close`.

    The descriptor `fd` comes from a peer, so only a sealed memfd of the right size is mapped. The
    caller still owns `fd`. Raises OSError, ValueError, and UnsupportedLayout.

    A thread maps the pages that the cache has now, because the page faults of a first copy would
    take half as long as the copy.
    """

    def __init__(self, fd: int, size: int, geometries: Mapping[int, KvGeometry]) -> None:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory may shrink")
        if (found := os.fstat(fd).st_size) != size:
            raise ValueError(f"the memory has {found} bytes, not {size}")
        self._map: mmap.mmap | None = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self.regions = {group: KvRegion(address, size, g) for group, g in geometries.items()}
        self._is_closing = False
        own = FileIO(os.dup(fd))
        self._mapper = threading.Thread(
            target=self._map_pages, args=(self._map, own), daemon=True, name="kv-map"
        )
        self._mapper.start()

    def _map_pages(self, memory: mmap.mmap, file: FileIO) -> None:
        """Read one byte for each fault. Holes are left out, because a read of one would allocate
        pages in the producer's cache."""
        found, end = np.frombuffer(memory, np.uint8), 0
        with file, contextlib.suppress(OSError):  # from SEEK_DATA, behind the last page
            while not self._is_closing:
                start = file.seek(end, os.SEEK_DATA)
                end = min(file.seek(start, os.SEEK_HOLE), start + _AHEAD_BYTES)
                found[start:end:_FAULT_BYTES].max()

    def close(self) -> None:
        """Unmap the memory. Call it after the last read. Idempotent."""
        if self._map is not None:
            self._is_closing = True
            self._mapper.join()
            self._map.close()
            self._map = None
