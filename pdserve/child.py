"""What a process does for the `pdserve up` that started it: reports, and dies with it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1


class Reports:
    """One JSON object a line into the pipe `fd`; without a pipe every call does nothing.

    Lines are {"doing": text}, {"ready": facts} and {"failed": text}.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def doing(self, what: str) -> None:
        """Say what a person who waits would want to read."""
        self._write({"doing": what})

    def ready(self, facts: Mapping[str, object]) -> None:
        """Serving from now on; `facts` has the addresses."""
        self._write({"ready": dict(facts)})

    def failed(self, why: str) -> None:
        """About to end, with the reason in one sentence."""
        self._write({"failed": why})

    def _write(self, line: Mapping[str, object]) -> None:
        if self._fd is None:
            return
        # Whoever listened may be gone, and then so are we in a moment.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, json.dumps(line).encode() + b"\n")


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when `parent_pid`, its parent, ends in whatever way.

    Exits at once where that parent is gone already. Linux only; elsewhere nothing is promised.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(1)
