"""A fake of NCCL, streams and events for several simulated processes, without a GPU.

It copies real bytes and checks NCCL's rules: no call on a communicator that is gone or still
joining, the receiver posts before the sender, and no call blocks.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import select
import socket
import threading
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.messages import HEADER, decode, encode
from kv_transfer.transport.nccl.binding import UNIQUE_ID_BYTES, Nccl, Result
from kv_transfer.transport.nccl.staging import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_transfer.cache.gpu_memory import DeviceRegion
    from kv_transfer.protocol.messages import KvMessage

GARBAGE = 0xEE


@dataclass(eq=False)
class Move:
    """A send or receive on a stream. It begins when the stream reaches it."""

    comm: FakeComm
    address: int
    size_bytes: int
    has_begun: bool = False
    is_over: bool = False


@dataclass(eq=False)
class FakeComm:
    """One rank's end of a communicator."""

    owner: FakeNccl
    unique_id: bytes
    rank: int
    is_joined: bool = False
    is_gone: bool = False
    posted: int = 0
    is_connected: bool = False  # both ends have posted; it stays true when the peer leaves
    moves: list[Move] = field(default_factory=list)  # unfinished ones


class Fabric:
    """The connection between the processes, and its faults."""

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
        """Run every GPU as far as possible."""
        with self.lock:
            while any(gpu.run() for gpu in self.gpus):
                pass

    def advance(self, mine: Move) -> bool:
        """Move the bytes if both ends have begun. With unequal sizes NCCL would spin for ever."""
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
            if found.posted and not found.is_connected:
                return Result.IN_PROGRESS  # the first operation connects, which needs both ends
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
            self.fabric.posts.append(comm.rank)
            self.fabric.groups.append(len(moves))
            # The receiver must post first, and the sender only after it.
            receiver = self.fabric.comms[comm.unique_id][1]
            comm.posted += 1
            if (other := self.fabric.other(comm)) is not None and other.posted:
                comm.is_connected = other.is_connected = True
            assert receiver.posted >= (comm.posted if self.fabric.is_strict else 1)
            for stream, move in moves:
                comm.moves.append(move)
                stream.todo.append(functools.partial(self.fabric.advance, move))
            return Result.IN_PROGRESS

    def abort(self, comm: int) -> Result:
        with self.fabric.lock:
            found = self._comm(comm)
            for move in found.moves:
                if found.rank == 1:  # half of it has arrived
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
    """A stream. It runs `todo` in order; an item returns False while it cannot run."""

    cuda_stream: int
    todo: deque[Callable[[], bool]] = field(default_factory=deque)


class FakeGpu(Gpu):
    """A GPU in host memory. Its streams run when an event is queried. `is_stuck`: the GPU never
    becomes idle. `copies_left`: the number of gathers and scatters that it will still do."""

    def __init__(self, nccl: FakeNccl, uuid: str) -> None:
        self.device = torch.device("cpu")
        self.uuid = uuid
        self.nccl = nccl
        self.is_stuck = False
        self.copies_left = 10**6
        self._current = threading.local()
        nccl.fabric.gpus.append(self)

    def own(self, region: DeviceRegion) -> DeviceRegion:
        """Return the region with copies that run when their stream reaches them."""
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
        """Run the streams. Return True if any item ran."""
        done = 0
        for stream in self.nccl.streams.values():
            while stream.todo and not self.is_stuck and stream.todo[0]():
                stream.todo.popleft()
                done += 1
        return done > 0


class FakeLink:
    """One end of a link, as transports use it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_down = False
        self.behind: list[KvMessage] = []

    @property
    def stream(self) -> FakeLink:
        return self

    def post(self, message: KvMessage) -> None:
        self.sock.sendall(encode(message))

    write = buffer = post

    def has_input(self, wait_s: float = 0.0) -> bool:
        return bool(self.behind or select.select([self.sock], [], [], wait_s)[0])

    def unread(self, messages: list[KvMessage]) -> None:
        self.behind[:0] = messages

    def read(self) -> KvMessage:
        if self.behind:
            return self.behind.pop(0)
        header = self._receive(HEADER.size)
        return decode(self._receive(HEADER.unpack(header)[0]))

    def _receive(self, size: int) -> bytes:
        data = self.sock.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise KvTransferError("the peer closed the link")
        return data

    def close(self) -> None:
        self.is_down = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
