"""NCCL, streams and events of several processes in one, without a GPU.

Copies real bytes, and holds the caller to NCCL's rules: nothing may be asked of a communicator that
is gone or still joining, the receiver posts before the sender, and nothing waits.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kv_transfer.device.gpu import Gpu
from kv_transfer.transport.nccl_binding import UNIQUE_ID_BYTES, Nccl, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

GARBAGE = 0xEE


@dataclass(eq=False)
class Move:
    """A send or receive as a stream sees it."""

    comm: FakeComm
    address: int
    size_bytes: int
    is_over: bool = False


@dataclass(eq=False)
class FakeComm:
    """One rank's end."""

    owner: FakeNccl
    unique_id: bytes
    rank: int
    is_joined: bool = False
    is_gone: bool = False
    posted: int = 0
    move: Move | None = None


class Fabric:
    """What lies between the processes, and what goes wrong there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ids = itertools.count(1)
        self.comms: dict[bytes, dict[int, FakeComm]] = {}
        self.is_held = False  # no byte moves
        self.joins = True
        self.error: Result | None = None  # of every communicator
        self.posts: list[int] = []  # ranks, in the order in which they posted

    def other(self, comm: FakeComm) -> FakeComm | None:
        found = self.comms[comm.unique_id].get(1 - comm.rank)
        return None if found is None or found.is_gone else found

    def advance(self, comm: FakeComm) -> None:
        """Move the bytes if both ends have posted. NCCL would spin for ever on unequal sizes."""
        other = self.other(comm)
        mine, theirs = comm.move, None if other is None else other.move
        if self.is_held or mine is None or theirs is None or mine.size_bytes != theirs.size_bytes:
            return
        source, target = (mine, theirs) if comm.rank == 0 else (theirs, mine)
        ctypes.memmove(target.address, source.address, source.size_bytes)
        mine.is_over = theirs.is_over = True
        comm.move = None
        assert other is not None
        other.move = None


class FakeNccl(Nccl):
    """One process's NCCL."""

    def __init__(self, fabric: Fabric, version: int = 23007) -> None:
        self.fabric = fabric
        self.number = version
        self.max_ctas: list[int] = []
        self.streams: dict[int, list[Move]] = {}
        self.comms: dict[int, FakeComm] = {}
        self._handles = itertools.count(0x1000)

    @property
    def live(self) -> list[FakeComm]:
        return [comm for comm in self.comms.values() if not comm.is_gone]

    def version(self) -> int:
        return self.number

    def unique_id(self) -> bytes:
        return next(self.fabric.ids).to_bytes(UNIQUE_ID_BYTES, "big")

    def comm_init(self, unique_id: bytes, rank: int, max_ctas: int) -> tuple[Result, int]:
        with self.fabric.lock:
            self.max_ctas.append(max_ctas)
            comm = FakeComm(self, unique_id, rank)
            self.fabric.comms.setdefault(unique_id, {})[rank] = comm
            handle = next(self._handles)
            self.comms[handle] = comm
            return Result.IN_PROGRESS, handle

    def async_error(self, comm: int) -> Result:
        with self.fabric.lock:
            found = self._comm(comm)
            if self.fabric.error is not None:
                return self.fabric.error
            other = self.fabric.other(found)
            if not found.is_joined:
                if other is None or not self.fabric.joins:
                    return Result.IN_PROGRESS
                found.is_joined = other.is_joined = True
            if found.move is not None and (other is None or other.move is None):
                return Result.IN_PROGRESS  # the first operation connects, which takes both ends
            return Result.SUCCESS

    def send(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        return self._post(comm, peer, address, size_bytes, stream)

    def recv(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        return self._post(comm, peer, address, size_bytes, stream)

    def abort(self, comm: int) -> Result:
        with self.fabric.lock:
            found = self._comm(comm)
            if found.move is not None:
                if found.rank == 1:  # half of it came
                    size = found.move.size_bytes // 2 + 1
                    ctypes.memset(found.move.address, GARBAGE, size)
                found.move.is_over = True
                found.move = None
            found.is_gone = True
            return Result.SUCCESS

    def last_error(self, comm: int) -> str:
        return "as the test wanted"

    def _comm(self, handle: int) -> FakeComm:
        found = self.comms[handle]
        assert not found.is_gone, "the communicator is gone"
        return found

    def _post(self, comm: int, peer: int, address: int, size: int, stream: int) -> Result:
        with self.fabric.lock:
            found = self._comm(comm)
            assert found.is_joined, "posted before it had joined"
            assert found.move is None, "two operations in flight"
            assert peer == 1 - found.rank
            self.fabric.posts.append(found.rank)
            # The receiver posts first, and the sender only once it has.
            ends = self.fabric.comms[found.unique_id]
            found.posted += 1
            assert found.rank == 1 or ends[1].posted == found.posted
            found.move = Move(found, address, size)
            self.streams.setdefault(stream, []).append(found.move)
            return Result.IN_PROGRESS


@dataclass(eq=False)
class FakeEvent:
    """Fires when the operations in front of it are over."""

    gpu: FakeGpu
    moves: list[Move] = field(default_factory=list)
    is_held: bool = False


class FakeGpu(Gpu):
    """Streams and events in host memory. `is_stuck`: the GPU does not come to rest. `holds`: no
    event fires that is recorded meanwhile. `copy_fails`: the next copy is refused."""

    def __init__(self, nccl: FakeNccl, uuid: str) -> None:
        self.device = torch.device("cpu")
        self.uuid = uuid
        self.nccl = nccl
        self.is_stuck = False
        self.holds = False
        self.events: list[FakeEvent] = []
        self._streams = itertools.count(1)

    def open_stream(self) -> Any:
        return SimpleNamespace(cuda_stream=next(self._streams))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        yield

    def record(self, stream: Any) -> FakeEvent:
        moves = list(self.nccl.streams.get(stream.cuda_stream, ()))
        self.events.append(FakeEvent(self, moves, self.holds))
        return self.events[-1]

    def has_fired(self, event: FakeEvent) -> bool:
        with self.nccl.fabric.lock:
            for move in event.moves:
                if not move.is_over and not move.comm.is_gone:
                    self.nccl.fabric.advance(move.comm)
            is_over = all(move.is_over for move in event.moves)
            return is_over and not event.is_held and not self.is_stuck
