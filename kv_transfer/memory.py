"""A worker's KV cache as bytes: the region, its copies, and how it comes to lie in shared memory.

The region is one mapping. For the `shm` transport it is a memfd, so that nothing is left behind
when the process is killed; a source maps it through /proc/PID/fd/N. Both sides fault the pages in
before the first copy: a first touch costs ten times the copy itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.copying import (
    Pages,
    copy_digested_in_c,
    copy_pages,
    digest_in_c,
    digests_in_c,
)
from kv_transfer.digest import NO_DIGEST, digest
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.tokens import TokenOrder, TokenPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.layout import KvGeometry, PagePart
    from kv_transfer.reshard import Span

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since 5.14
_LIBC = ctypes.CDLL(None, use_errno=True)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
_PEER_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}", re.ASCII)


def prefault(address: int, size: int, *, writable: bool = True) -> None:
    """Faults the pages in, for writing if they can be written. Older kernels refuse the advice;
    then the first copies pay."""
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def address_of(mapped: mmap.mmap) -> int:
    """Where it lies, until it is closed; also of what can only be read."""
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


def boot_id() -> str:
    """Equal for processes of one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class KvRegion:
    """The bytes of a KV cache, addressed by page, and by token where its `order` is known. Does not
    own the memory: vLLM does."""

    # Whether this process's CPU reaches the pages; see kv_transfer/device/region.py.
    is_host = True

    def __init__(
        self, address: int, size: int, geometry: KvGeometry, order: TokenOrder | None = None
    ) -> None:
        if geometry.span_bytes > size:
            raise UnsupportedLayout(
                f"the layout spans {geometry.span_bytes} bytes of a cache of {size}"
            )
        self.address = address
        self.geometry = geometry
        self.order = order
        self._view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    @property
    def block_size(self) -> int:
        """Tokens of a block; 0 where single tokens cannot be told apart."""
        return 0 if self.order is None else self.order.block_size

    def size_bytes(self, blocks: int, tokens: int = 0) -> int:
        """Of so many tokens, or, where they are 0, of so many blocks. Raises KvTransferError where
        tokens cannot be told apart."""
        if not tokens:
            return blocks * self.geometry.block_bytes
        if not self.block_size:
            raise KvTransferError("the tokens of this KV cache cannot be told apart")
        return tokens * (self.geometry.block_bytes // self.block_size)

    def narrowed(self, start: int, size: int) -> KvRegion:
        """The same memory, each page cut to a part of it. Raises KvTransferError where the page has
        no such part."""
        if (start, size) == (0, self.geometry.page_bytes):
            return self
        geometry = self.geometry.narrowed(start, size)
        return KvRegion(self.address, self._view.nbytes, geometry, self.order)

    def computed(self, block_ids: Sequence[int]) -> None:
        """The engine has enqueued the step that fills these blocks. In host memory the step has
        ended when it returns; on a GPU copies of the blocks wait for it."""

    def pages(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The pages of these blocks, layer by layer, for scatter/gather socket calls. Raises
        KvTransferError where an id is no block."""
        g, view = self.geometry, self._view
        if not g.has_blocks(block_ids):
            raise KvTransferError("a block id is outside its KV cache")
        starts = (
            g.page_offset(layer, block) for layer in range(g.num_layers) for block in block_ids
        )
        return [view[start : start + g.page_bytes] for start in starts]

    def copy_from(
        self,
        source: KvRegion,
        source_ids: list[int],
        own_ids: list[int],
        digests: bool = False,
    ) -> int:
        """Copies blocks page by page.

        Returns the digest of what was read where `digests`, else NO_DIGEST. The two regions share
        layers and page size, not strides. Raises KvTransferError, having copied nothing, where they
        do not or an id is no block.
        """
        dst, src = self.geometry, source.geometry
        layers, page_bytes = dst.num_layers, dst.page_bytes
        if (layers, page_bytes) != (src.num_layers, src.page_bytes):
            raise KvTransferError("the pages differ in number or size")
        if len(source_ids) != len(own_ids):
            raise KvTransferError(f"{len(source_ids)} blocks for {len(own_ids)} places")
        if not (src.has_blocks(source_ids) and dst.has_blocks(own_ids)):
            raise KvTransferError("a block id is outside its KV cache")
        to, start = self._pages_of(own_ids), source._pages_of(source_ids)
        if digests and digests_in_c(len(own_ids), layers, page_bytes):
            return copy_digested_in_c(to, start, layers, page_bytes) or 1
        mark = source.digest(source_ids) if digests else NO_DIGEST
        copy_pages(to, start, layers, page_bytes)
        return mark

    def take(self, block_ids: Sequence[int], tokens: Span) -> memoryview:
        """The tokens of these blocks, counted from the first block's first, as
        kv_transfer/tokens.py lays them. Raises KvTransferError where they are not here, or cannot
        be told apart."""
        return self._by_token(block_ids).take(block_ids, tokens)

    def put(self, block_ids: Sequence[int], tokens: int, data: memoryview) -> None:
        """The reverse, into the first `tokens` of the blocks. Raises KvTransferError, having
        written nothing."""
        self._by_token(block_ids).put(block_ids, tokens, data)

    def _by_token(self, block_ids: Sequence[int]) -> TokenPages:
        if self.order is None:
            raise KvTransferError("the tokens of this KV cache cannot be told apart")
        if not self.geometry.has_blocks(block_ids):
            raise KvTransferError("a block id is outside its KV cache")
        return TokenPages(self._view, self.geometry, self.order)

    def digest(self, block_ids: list[int], tokens: Span | None = None) -> int:
        """kv_transfer/digest.py's of the `pages` of these blocks, or of so many of their `tokens`,
        counted from the first block's first. Raises KvTransferError where an id is no block."""
        if tokens is not None:
            return digest([self.take(block_ids, tokens)])
        g = self.geometry
        if not digests_in_c(len(block_ids), g.num_layers, g.page_bytes):
            return digest(self.pages(block_ids))
        return digest_in_c(self.pages_at(block_ids), g.num_layers, g.page_bytes) or 1

    def pages_at(self, block_ids: list[int]) -> Pages:
        """Where they lie. Raises KvTransferError where an id is no block."""
        if not self.geometry.has_blocks(block_ids):
            raise KvTransferError("a block id is outside its KV cache")
        return self._pages_of(block_ids)

    def _pages_of(self, block_ids: list[int]) -> Pages:
        g = self.geometry
        return Pages(
            self.address + g.offset_bytes, g.layer_stride_bytes, g.block_stride_bytes, block_ids
        )


def parts_of(
    target: KvRegion, source: KvRegion, part: PagePart | None
) -> tuple[KvRegion, KvRegion]:
    """(target, source) cut to what moves of each page; None is all of it."""
    if part is None:
        return target, source
    return (
        target.narrowed(part.target_start, part.size),
        source.narrowed(part.source_start, part.size),
    )


class SharedMemory:
    """The memfd under a worker's own KV cache. Owner: the connector; released by `close`.

    Its size is sealed: a source that maps it must not lose pages under its copy (SIGBUS).
    """

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size = 0

    @property
    def path(self) -> str:
        """How another process of this user reaches the memory."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def inode(self) -> int:
        """Names this memory among all of the running kernel. A path alone does not: in another PID
        namespace it leads elsewhere."""
        return os.fstat(self.fd).st_ino

    def grow(self, size: int) -> None:
        """Sets the size, once, before it is mapped."""
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.size = size

    def close(self) -> None:
        """Idempotent. Mappings stay valid until their owners drop them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PeerMapping:
    """Shared memory of another worker, mapped whole. Released by `close`.

    The path is a peer's word, so nothing is mapped but a sealed memfd, which no ordinary file of
    this user can be, and only the one that `inode` names. Raises OSError or ValueError.
    """

    def __init__(self, path: str, inode: int, size: int, *, writable: bool) -> None:
        if not _PEER_PATH.fullmatch(path):
            raise ValueError(f"{path!r} is no descriptor of a process")
        # A look first: opening a device or a pipe can have effects, or wait.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ValueError(f"{path} is no memory")
        self.fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if not fcntl.fcntl(self.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"{path} may shrink")
            found = os.fstat(self.fd)
            if found.st_ino != inode:
                raise ValueError(f"{path} leads to other memory here")
            if found.st_size != size:
                raise ValueError(f"{path} is not {size} bytes long")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(self.fd, size, prot=protection)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        self.address = address_of(self._map)
        prefault(self.address, size, writable=writable)

    def close(self) -> None:
        """Unmaps; only when nobody reads or writes there any more. Idempotent."""
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1


class PeerMemory(PeerMapping):
    """Another worker's KV cache, mapped here for writing unless `writable` is False."""

    def __init__(
        self,
        path: str,
        inode: int,
        size: int,
        geometry: KvGeometry,
        order: TokenOrder | None = None,
        *,
        writable: bool = True,
    ) -> None:
        if not 0 < geometry.span_bytes <= size:
            raise ValueError(f"the layout spans {geometry.span_bytes} bytes of a cache of {size}")
        super().__init__(path, inode, size, writable=writable)
        self.region = KvRegion(self.address, size, geometry, order)

    def close(self) -> None:
        if self.fd >= 0:
            self.region._view.release()
        super().close()


class WriteFence:
    """Tells a target whether a source may still be writing into its memory, even one that was
    stopped in the middle of a copy.

    One byte of the memfd, never used twice, stands for one link. The source holds a shared lock on
    it during each copy. The target, once it gave the link up, takes it exclusively: that succeeds
    when no copy runs, and from then on none can begin. A dead process holds no lock. (fcntl(2),
    open file description locks.)
    """

    def __init__(self, fd: int, slot: int) -> None:
        self._fd = fd
        self._shared, self._free, self._own = (
            _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0)
            for kind in (fcntl.F_RDLCK, fcntl.F_UNLCK, fcntl.F_WRLCK)
        )

    def _lock(self, request: bytes) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (11, 13):
                return False
            raise
        return True

    def enter(self) -> bool:
        """The source, before a copy: False when the target has given the link up."""
        return self._lock(self._shared)

    def leave(self) -> None:
        """The source, after a copy."""
        self._lock(self._free)

    def seal(self) -> bool:
        """The target: True when nothing is, or ever will be, written over this link."""
        return self._lock(self._own)
