"""Changes of files."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOOK_S = 1.0


def file_state(path: str | Path) -> tuple[int, ...] | None:
    """Return a value that differs after the file has been changed or replaced. None: there is no
    file."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


async def file_changes(
    path: Path, asked: asyncio.Event, used: tuple[int, ...] | None
) -> AsyncIterator[bool]:
    """Yield False after each change of the file, and True when `asked` is set. `used`: the state of
    the file when it was read last."""
    last = file_state(path)
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await asked.wait()
        last, now = file_state(path), last
        # Used only once it has stayed the same for a while: somebody may still be writing it.
        if asked.is_set() or (last == now != used and now is not None):
            was_asked, used = asked.is_set(), last
            asked.clear()
            yield was_asked
