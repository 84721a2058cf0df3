"""Wake the step thread from the processes of a tensor-parallel engine, where its KV arrives."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

if TYPE_CHECKING:
    from collections.abc import Callable


class RankWakes:
    """A socket at `address`, and a thread that calls `wake` for what comes, until `close`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("")  # Linux chooses a name that is no file
        self.address: bytes = self._socket.getsockname()
        threading.Thread(target=self._read, name="rank-wakes", daemon=True).start()

    def _read(self) -> None:
        with self._socket:
            while self._socket.recv(1):
                self._wake()

    def close(self) -> None:
        """End the thread. Call it once."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
            ours.sendto(b"", self.address)


def wake_in(_worker: Any, address: bytes) -> bool:
    """For `Executor.collective_rpc`: have the process that runs this send to `address` when a step
    may find that a transfer ended. Return False if its connector cannot say."""
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.setblocking(False)
    ours.connect(address)

    def wake() -> None:
        # Full: the thread wakes all the same. Refused: the engine has ended.
        with contextlib.suppress(OSError):
            ours.send(b"\1")

    does_wake: bool = get_kv_transfer_group().wake_with(wake)
    return does_wake
