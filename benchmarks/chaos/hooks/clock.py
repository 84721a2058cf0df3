"""The wall clock of a process, set ahead or back as an administrator or NTP sets it: a few lines of
C, compiled when a service is started and loaded before its libraries (clock.c), move what they read
of it. The monotonic clock stays, as it would."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.chaos.orders import LOOK_EVERY_S

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from benchmarks.chaos.orders import Orders

_SOURCE: Final = Path(__file__).with_name("clock.c")
_LIBRARY: Final = "pdserve_chaos_clock.so"
_COMPILE_S: Final = 60.0


def compiler() -> str | None:
    """The C compiler of this machine; without one no clock jumps."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def preload(environment: MutableMapping[str, str], directory: Path) -> None:
    """Have all processes that get this environment load it. Without a compiler nothing happens."""
    found = compiler()
    if found is None:
        return
    library = directory / _LIBRARY
    command = [found, "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=_COMPILE_S)
    loaded = environment.get("LD_PRELOAD", "")
    environment["LD_PRELOAD"] = f"{library}:{loaded}" if loaded else str(library)


def install(orders: Orders) -> None:
    """Follow the orders on a daemon thread."""
    if _LIBRARY in os.environ.get("LD_PRELOAD", ""):
        threading.Thread(target=_follow, args=(orders,), name="chaos-clock", daemon=True).start()


def _follow(orders: Orders) -> None:
    loaded = ctypes.CDLL(None)
    offset = ctypes.c_longlong.in_dll(loaded, "pdserve_clock_offset_ns")
    asked = ctypes.c_longlong.in_dll(loaded, "pdserve_clock_asked")
    told = 0
    while True:
        offset.value = int(orders.now.clock_s * 1e9)
        if asked.value > told:
            told = asked.value
            orders.did()
        time.sleep(LOOK_EVERY_S)
