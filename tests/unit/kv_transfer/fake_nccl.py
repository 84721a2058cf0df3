"""NCCL, streams and events of several processes in one, without a GPU.

Copies real bytes, and holds the caller to NCCL's rules: nothing may be asked of a communicator that
is gone or still joining, the receiver posts before the sender, and nothing waits.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kv_transfer.device.gpu import Gpu
from kv_transfer.transport.nccl_binding import UNIQUE_ID_BYTES, Nccl, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_transfer.device.region import DeviceRegion

GARBAGE = 0xEE


@dataclass(eq=False)
class Move:
    """A send or receive as a stream sees it. It begins when the stream comes to it."""

    comm: FakeComm
    address: int
    size_bytes: int
    has_begun: bool = False
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
    moves: list[Move] = field(default_factory=list)  # that are not over


class Fabric:
    """What lies between the processes, and what goes wrong there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ids = itertools.count(1)
        self.comms: dict[bytes, dict[int, FakeComm]] = {}
        self.gpus: list[FakeGpu] = []
        self.is_held = False  # no byte moves
        self.joins = True
        self.error: Result | None = None  # of every communicator
        self.posts: list[int] = []  # ranks, in the order in which they posted
        self.groups: list[int] = []  # operations in each post
        self.is_strict = True  # each run is one post

    def other(self, comm: FakeComm) -> FakeComm | None:
        found = self.comms[comm.unique_id].get(1 - comm.rank)
        return None if found is None or found.is_gone else found

    def run(self) -> None:
        """Let every GPU do what it can."""
        with self.lock:
            while any(gpu.run() for gpu in self.gpus):
                pass

    def advance(self, mine: Move) -> bool:
        """Move the bytes if both ends have begun. NCCL would spin for ever on unequal sizes."""
        mine.has_begun = True
        other = self.other(mine.comm)
        theirs = other.moves[0] if other is not None and other.moves else None
        is_next = mine.comm.moves[:1] == [mine] and theirs is not None and theirs.has_begun
        if is_next and not self.is_held and theirs and mine.size_bytes == theirs.size_bytes:
            source, target = (mine, theirs) if mine.comm.rank == 0 else (theirs, mine)
            ctypes.memmove(target.address, source.address, source.size_bytes)
            for move in (mine, theirs):
                move.is_over = True
                move.comm.moves.pop(0)
        return mine.is_over


class FakeNccl(Nccl):
    """One process's NCCL."""

    def __init__(self, fabric: Fabric, version: int = 23007) -> None:
        self.fabric = fabric
        self.number = version
        self.max_ctas: list[int] = []
        self.streams: dict[int, FakeStream] = {}
        self._group = threading.local()
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
            if found.posted == 1 and (other is None or not other.posted):
                return Result.IN_PROGRESS  # the first operation connects, which takes both ends
            return Result.SUCCESS

    def group_start(self) -> Result:
        self._group.moves = []
        return Result.SUCCESS

    def send(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        found = self._comm(comm)
        assert peer == 1 - found.rank
        self._group.moves.append((self.streams[stream], Move(found, address, size_bytes)))
        return Result.IN_PROGRESS

    recv = send

    def group_end(self) -> Result:
        with self.fabric.lock:
            moves, self._group.moves = self._group.moves, None
            comm: FakeComm = moves[0][1].comm
            assert comm.is_joined, "posted before it had joined"
            assert not (self.fabric.is_strict and comm.moves), "two posts in flight"
            self.fabric.posts.append(comm.rank)
            self.fabric.groups.append(len(moves))
            # The receiver posts first, and the sender only once it has.
            receiver = self.fabric.comms[comm.unique_id][1]
            comm.posted += 1
            assert receiver.posted >= (comm.posted if self.fabric.is_strict else 1)
            for stream, move in moves:
                comm.moves.append(move)
                stream.todo.append(functools.partial(self.fabric.advance, move))
            return Result.IN_PROGRESS

    def abort(self, comm: int) -> Result:
        with self.fabric.lock:
            found = self._comm(comm)
            for move in found.moves:
                if found.rank == 1:  # half of it came
                    ctypes.memset(move.address, GARBAGE, move.size_bytes // 2 + 1)
                move.is_over = True
            found.moves.clear()
            found.is_gone = True
            return Result.SUCCESS

    def last_error(self, comm: int) -> str:
        return "as the test wanted"

    def _comm(self, handle: int) -> FakeComm:
        found = self.comms[handle]
        assert not found.is_gone, "the communicator is gone"
        return found


@dataclass(eq=False)
class FakeStream:
    """`todo` is done in order; each returns False while it cannot be done."""

    cuda_stream: int
    todo: deque[Callable[[], bool]] = field(default_factory=deque)


class FakeGpu(Gpu):
    """Streams and events in host memory, which run when somebody looks at an event. `is_stuck`: the
    GPU does not come to rest. `copies_left`: how many gathers and scatters it will do."""

    def __init__(self, nccl: FakeNccl, uuid: str) -> None:
        self.device = torch.device("cpu")
        self.uuid = uuid
        self.nccl = nccl
        self.is_stuck = False
        self.copies_left = 10**6
        self._current = threading.local()
        nccl.fabric.gpus.append(self)

    def own(self, region: DeviceRegion) -> DeviceRegion:
        """Return the region with copies that run when their stream comes to them."""
        for name in ("gather", "scatter"):
            setattr(region, name, functools.partial(self._enqueue, getattr(region, name)))
        return region

    def _enqueue(self, copy: Callable[..., None], *args: Any) -> None:
        if (stream := getattr(self._current, "stream", None)) is None:
            copy(*args)
        else:
            stream.todo.append(functools.partial(self._copy, copy, *args))

    def _copy(self, copy: Callable[..., None], *args: Any) -> bool:
        if not self.copies_left:
            return False
        self.copies_left -= 1
        copy(*args)
        return True

    def open_stream(self) -> Any:
        number = len(self.nccl.streams) + 1
        return self.nccl.streams.setdefault(number, FakeStream(number))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def record(self, stream: Any) -> threading.Event:
        event = threading.Event()
        stream.todo.append(lambda: event.set() or True)
        return event

    def wait(self, stream: Any, event: threading.Event) -> None:
        stream.todo.append(event.is_set)

    def has_fired(self, event: threading.Event) -> bool:
        self.nccl.fabric.run()
        return event.is_set()

    def run(self) -> bool:
        """Return True if something was done."""
        done = 0
        for stream in self.nccl.streams.values():
            while stream.todo and not self.is_stuck and stream.todo[0]():
                stream.todo.popleft()
                done += 1
        return done > 0
