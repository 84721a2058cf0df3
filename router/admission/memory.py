"""Memory of the router: measures it, rejects requests near the limit, and trims freed memory."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

from pdserve.errors import Overloaded, Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from pdserve.types import MediaItem

_POLL_S = 1.0
# New requests are rejected above this share of the limit. Open requests need the rest.
SHED_SHARE = 0.9
# Retry-After: open requests end, and their memory is returned to the system, within seconds.
_RETRY_S = 5.0
# glibc keeps freed memory until malloc_trim. It is called after the router grew by this much, and
# not after each request, because it takes time.
TRIM_BYTES = 32 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cgroup_limit_bytes(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the lowest memory limit of this process's control groups (v2 or v1), above which the
    kernel kills the process. Return 0 if there is none."""
    found = []
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, file = root, "memory.max"
            elif controllers == "memory":
                top, file = root / "memory", "memory.limit_in_bytes"
            else:
                continue
            folder = top / path.strip("/")
            # A parent group, as that of a Kubernetes pod, may have a lower limit.
            for each in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # "max": no limit
                    found.append(int((each / file).read_text()))
                if each == top:
                    break
    # v1 shows a number near 2^63 where there is no limit.
    return min((x for x in found if x < 1 << 60), default=0)


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
    `used` and `limit` in bytes; `refused`, the number of rejected requests. A limit of 0 rejects
    none."""

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


class MediaFile:
    """The data of the images of a prompt on disk. State: an open file and the items without data,
    with the sizes of what the file has."""

    def __init__(self, file: IO[bytes], items: Sequence[tuple[MediaItem, int]]) -> None:
        self._file, self._items = file, items

    @classmethod
    def write(cls, file: IO[bytes], media: Sequence[MediaItem]) -> MediaFile:
        """Write the data of `media` to an empty file. Blocks; raises OSError."""
        for item in media:
            file.write(item.data)
        file.flush()
        return cls(file, [(item.without_data(), len(item.data)) for item in media])

    async def read(self) -> tuple[MediaItem, ...]:
        """Return the items with their data. Raises OSError if the disk fails."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> tuple[MediaItem, ...]:
        found, at = [], 0
        for item, size in self._items:
            data = os.pread(self._file.fileno(), size, at)
            if len(data) != size:
                raise OSError(f"{len(data)} of {size} bytes of an image could be read")
            found.append(replace(item, data=data))
            at += size
        return tuple(found)


class MediaMemory:
    """Room for the images of open requests: encoded until they are rendered, then processed until
    the answer ends, because a retry may compute the prompt again. What memory has no room for is
    kept in files for temporary files, without names: the system removes them with their process.
    State: `used` in memory and `on_disk`, in bytes."""

    def __init__(self, limit: int, disk_limit: int = 0) -> None:
        self.limit, self.disk_limit = limit, disk_limit
        self.used = self.on_disk = 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count `size` bytes of memory until the context ends. Raises Overloaded without room."""
        if self.used + size > self.limit:
            raise self._refusal(size)
        self.used += size
        try:
            yield
        finally:
            self.used -= size

    @asynccontextmanager
    async def keep(self, media: Sequence[MediaItem]) -> AsyncIterator[MediaFile | None]:
        """Keep the data of `media` until the context ends. Yield the file that has it, or None if
        memory has room. Raises Overloaded if neither has, or if the disk is full or fails."""
        size = sum([len(x.data) for x in media])
        if self.used + size <= self.limit:
            with self.hold(size):
                yield None
            return
        if self.on_disk + size > self.disk_limit:
            raise self._refusal(size)
        self.on_disk += size
        try:
            with ExitStack() as stack:
                try:
                    file = stack.enter_context(TemporaryFile())
                    made = await asyncio.to_thread(MediaFile.write, file, media)
                except OSError as error:
                    raise self._refusal(size) from error
                yield made
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
