"""Memory of the router: measures it, rejects requests near the limit, and trims freed memory."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded, Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pdserve.types import ImageData

_POLL_S = 1.0
# Share of the limit above which new requests are rejected. Open requests need the rest.
SHED_SHARE = 0.9
# Retry-After: within seconds open requests end and their memory returns to the system.
_RETRY_S = 5.0
# glibc keeps freed memory until malloc_trim. It is called after the router grew by this much, and
# not after each request, because it takes time.
TRIM_BYTES = 32 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def used_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process and its descendants, 0 if it has ended."""
    process, used = Path("/proc") / str(pid), 0
    with suppress(OSError):
        used = resident_bytes(pid)
        for task in (process / "task").iterdir():
            with suppress(OSError):
                used += sum(map(used_bytes, (task / "children").read_text().split()))
    return used


def trim() -> None:
    """Return freed memory to the system."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


class MemoryGuard:
    """Measures the memory. New requests are rejected while `used` is above `shed_above`. State:
    `used` and `limit` in bytes; `refused`, the number of rejected requests. A limit of 0 disables
    it."""

    def __init__(
        self, limit: int, *, poll_s: float = _POLL_S, measure: Callable[[], int] = used_bytes
    ) -> None:
        self.limit = limit
        self.shed_above = SHED_SHARE * limit if limit else math.inf
        self._poll_s, self._measure = poll_s, measure
        self.used = measure()
        self.refused = 0
        self._lowest = self.used  # since the last trim

    async def run(self) -> None:
        """Measure and trim the memory until cancelled."""
        while True:
            # On a thread, because reading /proc of all child processes blocks.
            self.used = await asyncio.to_thread(self._measure)
            self._lowest = min(self._lowest, self.used)
            if self.used > self._lowest + TRIM_BYTES:
                await asyncio.to_thread(trim)
                self.used = self._lowest = await asyncio.to_thread(self._measure)
            await asyncio.sleep(self._poll_s)

    def refusal(self) -> Overloaded:
        """Count a rejected request and return its error."""
        self.refused += 1
        return Overloaded(
            f"the router uses {self.used >> 20} MiB of memory, the limit is "
            f"{self.limit >> 20} MiB; retry in {_RETRY_S:.0f} s",
            retry_after_s=_RETRY_S,
            reason=Refusal.MEMORY,
        )


class MediaMemory:
    """Memory and disk for the images of open requests: encoded until they are rendered, then
    processed until the answer ends, because a retry may compute the prompt again. Data beyond the
    memory limit goes to unnamed temporary files, which the system removes with the process. State:
    `used` in memory and `on_disk`, in bytes."""

    def __init__(self, limit: int, disk_limit: int = 0) -> None:
        self.limit, self.disk_limit = limit, disk_limit
        self.used = self.on_disk = 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count `size` bytes of memory until the context ends. Raises Overloaded above the
        limit."""
        if self.used + size > self.limit:
            raise self._refusal(size)
        self.used += size
        try:
            yield
        finally:
            self.used -= size

    @asynccontextmanager
    async def keep(self, pixels: ImageData) -> AsyncIterator[None]:
        """Keep the data of images until the context ends, in a file if the memory limit is reached.
        Raises Overloaded if the disk limit is reached too, or the disk is full or fails."""
        size = pixels.size
        if self.used + size <= self.limit:
            with self.hold(size):
                yield
            return
        if self.on_disk + size > self.disk_limit:
            raise self._refusal(size)
        self.on_disk += size
        try:
            with ExitStack() as stack:
                try:
                    file = stack.enter_context(TemporaryFile())
                    await asyncio.to_thread(pixels.move_to, file)
                except OSError as error:
                    raise self._refusal(size) from error
                yield
        finally:
            self.on_disk -= size

    def _refusal(self, size: int) -> Overloaded:
        used, on_disk = self.used >> 20, self.on_disk >> 20
        return Overloaded(
            f"the images of open requests take {used} MiB of memory and {on_disk} MiB of disk, and "
            f"those of this one {size >> 20} MiB; the limits are {self.limit >> 20} MiB "
            f"(router.images.memory_mib) and {self.disk_limit >> 20} MiB (router.images.disk_mib)",
            retry_after_s=_RETRY_S,
            reason=Refusal.MEMORY,
        )
