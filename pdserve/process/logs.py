"""Log rotation with a limit on disk space.

Processes that vLLM starts inherit the descriptor of the log, and cannot be made to open another
file. So the log is copied and truncated, like logrotate's `copytruncate`. This works because all
writers append. Lines that are written between copy and truncation are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 << 20
BACKUPS = 4  # LOG.1 (the newest) to LOG.4
_LOOK_S = 1.0


async def keep_rotating(log: Path, max_bytes: int) -> NoReturn:
    """Check a log periodically and rotate it when it is too long. Runs until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            rotate(log, max_bytes)
        except FileNotFoundError:
            continue  # the process has not started, because a fork server first imports vLLM
        except OSError as error:
            logger.warning("cannot rotate log %s: %s", log, error)


def rotate(log: Path, max_bytes: int) -> None:
    """If a log is longer than `max_bytes`, move its content into the first backup and delete the
    last backup. On a full disk the log is truncated without a backup, to free the space. Raises
    OSError."""
    if log.stat().st_size <= max_bytes:
        return
    first, *others = (log.with_name(f"{log.name}.{n}") for n in range(1, BACKUPS + 1))
    for older, younger in zip(reversed(others), [*reversed(others[:-1]), first], strict=True):
        with contextlib.suppress(FileNotFoundError):
            younger.replace(older)
    try:
        shutil.copyfile(log, first)
    except OSError:
        first.unlink(missing_ok=True)
        raise
    finally:
        os.truncate(log, 0)
