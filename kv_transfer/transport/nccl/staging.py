"""GPU resources of the NCCL transport: staging slots, streams, events."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kv_transfer.cache.gpu_memory import copy_stream
from kv_transfer.errors import KvTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Time of polling without sleep, because most waits are shorter than a sleep. Then poll intervals:
# first and longest, for the GPU or the peer; and the interval for a staging slot.
SPIN_S = 0.00005
POLL_S, MAX_POLL_S = 0.0001, 0.002
SLOT_POLL_S = 0.02


class Gpu:
    """Streams and events of one GPU, through torch. Raises KvTransferError for CUDA's errors."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"

    def open_stream(self) -> Any:
        return copy_stream(self.device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make the stream and its GPU current in the calling thread."""
        try:
            with torch.cuda.stream(stream):
                yield
        except RuntimeError as error:  # torch's type for CUDA errors
            raise KvTransferError(f"CUDA: {error}") from error

    def record(self, stream: Any) -> Any:
        """Return an event that fires when all work now on the stream has run."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work on the stream wait for the event. Does not block the caller."""
        stream.wait_event(event)

    def has_fired(self, event: Any) -> bool:
        try:
            return bool(event.query())
        except RuntimeError as error:
            raise KvTransferError(f"CUDA: {error}") from error


def current_gpu() -> Gpu:
    """Return the calling thread's GPU. Raises KvTransferError if torch finds none."""
    if not torch.cuda.is_available():
        raise KvTransferError("torch finds no CUDA GPU on this machine")
    return Gpu(torch.cuda.current_device())


@dataclass(frozen=True, slots=True, eq=False)
class StagingSlot:
    """Contiguous GPU memory for one operation, and the streams on which NCCL and the copies run."""

    memory: torch.Tensor
    stream: Any
    copies: Any

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


class Staging:
    """Slots of one direction, shared by all links of a process.

    Each direction has its own slots, so sends and receives never wait for each other. The number of
    slots also limits the operations in flight, because each holds thread blocks of the GPU.
    """

    def __init__(self, gpu: Gpu, count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.held_bytes = count * slot_bytes
        self.lost = 0
        self.count = count
        memory = torch.empty((count, slot_bytes), dtype=torch.uint8, device=gpu.device)
        self._free = [StagingSlot(each, gpu.open_stream(), gpu.open_stream()) for each in memory]
        self._changed = threading.Condition()

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, timeout_s: float, check: Callable[[], None]) -> StagingSlot:
        """Return a slot, for one `release`. `check` raises if the caller must stop waiting. Raises
        KvTransferError at the deadline. A slot to which the GPU may still write is not released,
        but counted in `lost`."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while not self._free:
                check()
                if time.monotonic() >= end:
                    raise KvTransferError(f"no staging slot was free for {timeout_s:g} s")
                self._changed.wait(SLOT_POLL_S)
            return self._free.pop()

    def release(self, slot: StagingSlot) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()


def until(
    is_done: Callable[[], bool],
    timeout_s: float,
    what: str,
    check: Callable[[], None],
    nap: Callable[[float], None] = time.sleep,
) -> None:
    """Poll until `is_done()`. `check` raises if the caller must stop waiting; `nap` sleeps. Raises
    KvTransferError at the deadline.

    Never blocks in CUDA, because a kernel whose peer died runs forever, and only a thread that does
    not wait for it can abort it.
    """
    begun = time.monotonic()
    while not is_done():
        check()
        waited = time.monotonic() - begun
        if waited >= timeout_s:
            raise KvTransferError(f"{what} took longer than {timeout_s:g} s")
        if waited < SPIN_S:
            time.sleep(0)  # lets other threads have the interpreter
        else:
            nap(min(MAX_POLL_S, POLL_S + waited / 10))
