"""A full disk under a process's log: its standard output and error become /dev/full, on which the
kernel fails every write with ENOSPC."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from benchmarks.chaos.orders import LOOK_EVERY_S

if TYPE_CHECKING:
    from benchmarks.chaos.orders import Orders

_OUTPUTS = (1, 2)


def install(orders: Orders) -> None:
    """Follow the orders on a daemon thread."""
    threading.Thread(target=_follow, args=(orders,), name="chaos-logs", daemon=True).start()


def _follow(orders: Orders) -> None:
    kept: list[int] = []
    while True:
        is_full = orders.now.logs == "full"
        if is_full and not kept:
            kept = [os.dup(fd) for fd in _OUTPUTS]
            full = os.open("/dev/full", os.O_WRONLY)
            for fd in _OUTPUTS:
                os.dup2(full, fd)
            os.close(full)
            orders.did()
        if kept and not is_full:
            for fd, before in zip(_OUTPUTS, kept, strict=True):
                os.dup2(before, fd)
                os.close(before)
            kept = []
        time.sleep(LOOK_EVERY_S)
