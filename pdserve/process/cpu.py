"""The kind of processor that this machine has."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# Lines of x86_64 and aarch64 that determine the instructions of compiled code.
_FIELDS = ("flags", "model name", "Features", "CPU implementer", "CPU part")


@functools.cache
def cpu_digest(cpuinfo: Path = _CPUINFO) -> str:
    """Return a digest of the processor's model and instructions."""
    lines = {x for x in cpuinfo.read_text().splitlines() if x.startswith(_FIELDS)}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
