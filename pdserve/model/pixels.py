"""The data of a prompt's images: in memory, or in a file above the router's memory limit."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import MediaItem


class Pixels:
    """A handle, created when a request is read, through which every attempt gets the images with
    their data. State: the items with their data, or the items without data and the file that has
    it."""

    def __init__(self, items: Sequence[MediaItem]) -> None:
        self._items = tuple(items)
        self._sizes = [len(x.data) for x in self._items]
        self._file: IO[bytes] | None = None

    @property
    def size(self) -> int:
        """Bytes of data."""
        return sum(self._sizes)

    def move_to(self, file: IO[bytes]) -> None:
        """Move the data to an empty file. Blocks; raises OSError."""
        for item in self._items:
            file.write(item.data)
        file.flush()
        self._items, self._file = tuple([x.without_data() for x in self._items]), file

    async def read(self) -> tuple[MediaItem, ...]:
        """Return the items with their data. Raises OSError if the disk fails."""
        if self._file is None:
            return self._items
        return await asyncio.to_thread(self._read, self._file)

    def _read(self, file: IO[bytes]) -> tuple[MediaItem, ...]:
        found, at = [], 0
        for item, size in zip(self._items, self._sizes, strict=True):
            data = os.pread(file.fileno(), size, at)
            if len(data) != size:
                raise OSError(f"{len(data)} of {size} bytes of an image could be read")
            found.append(replace(item, data=data))
            at += size
        return tuple(found)
