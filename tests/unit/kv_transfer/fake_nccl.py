"""NCCL, streams and events of two processes, in one, without a GPU. Copies real bytes, and holds
the caller to NCCL's rules: nothing may be asked of a communicator that is gone, that still joins,
or from a second thread, and nothing waits.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from dataclasses import dataclass, field

from kv_transfer.device.base import StreamError
from kv_transfer.nccl.binding import UNIQUE_ID_BYTES, CommConfig, NcclUnavailable, Result

GARBAGE = 0xEE


@dataclass(eq=False)
class Move:
    """A send or receive as a stream sees it."""

    comm: FakeComm
    address: int
    size_bytes: int
    is_send: bool
    is_over: bool = False


@dataclass(eq=False)
class FakeComm:
    """One rank's end."""

    owner: FakeNccl
    unique_id: bytes
    rank: int
    polls: int = 0  # until it has joined
    joined: bool = False
    state: Result = Result.IN_PROGRESS
    finalising: bool = False
    gone: bool = False
    move: Move | None = None


@dataclass(eq=False)
class Fabric:
    """What lies between the two, and what goes wrong there."""

    init_polls: int = 2
    connect_polls: int = 1
    wire_polls: int = 2
    is_held: bool = False  # no byte moves
    reports_death: bool = True  # as networks do and NVLink does not
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    comms: dict[bytes, dict[int, FakeComm]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def other(self, comm: FakeComm) -> FakeComm | None:
        return self.comms[comm.unique_id].get(1 - comm.rank)

    def advance(self, comm: FakeComm) -> None:
        """Moves the bytes of the communicator once both ends have posted."""
        with self.lock:
            self._advance(comm)

    def _advance(self, comm: FakeComm) -> None:
        other = self.other(comm)
        mine, theirs = comm.move, other.move if other is not None else None
        if self.is_held or other is None or mine is None or theirs is None:
            return
        if other.gone or mine.is_send == theirs.is_send or mine.size_bytes != theirs.size_bytes:
            return  # NCCL would spin: it compares nothing
        if self.wire_polls and comm.polls < self.wire_polls:
            comm.polls += 1
            return
        source, target = (mine, theirs) if mine.is_send else (theirs, mine)
        ctypes.memmove(target.address, source.address, source.size_bytes)
        mine.is_over = theirs.is_over = True
        comm.move = other.move = None
        comm.polls = other.polls = 0


class FakeNccl:
    """One process's NCCL. The faults are attributes that a test sets at any time."""

    def __init__(self, fabric: Fabric, version: int = 23007) -> None:
        self.fabric = fabric
        self.number = version
        self.calls: list[str] = []
        self.configs: list[CommConfig] = []
        self.threads: set[int] = set()
        self.live: set[FakeComm] = set()
        self.init_result = Result.IN_PROGRESS
        self.post_result = Result.IN_PROGRESS
        self.uid_fails = False
        self.uid_repeats = False
        self.is_dead = False
        self._comms: dict[int, FakeComm] = {}
        self._handles = itertools.count(0x1000)
        self._streams: dict[int, list[Move]] = {}
        self._in_group = False

    # -- NCCL

    def version(self) -> int:
        return self.number

    def unique_id(self) -> bytes:
        self._called("unique_id")
        if self.uid_fails:
            raise NcclUnavailable("no unique id: SYSTEM_ERROR: no interface")
        number = 7 if self.uid_repeats else next(self.fabric.ids)
        return number.to_bytes(UNIQUE_ID_BYTES, "big")

    def comm_init(self, unique_id: bytes, rank: int, config: CommConfig) -> tuple[Result, int]:
        self._called("comm_init")
        self.configs.append(config)
        if self.init_result not in (Result.IN_PROGRESS, Result.SUCCESS):
            return self.init_result, 0
        comm = FakeComm(self, unique_id, rank)
        self.fabric.comms.setdefault(unique_id, {})[rank] = comm
        handle = next(self._handles)
        self._comms[handle] = comm
        self.live.add(comm)
        return self.init_result, handle

    def async_error(self, comm: int) -> Result:
        self._called("async_error")
        found = self._comm(comm)
        other = self.fabric.other(found)
        if other is not None and other.owner.is_dead and self.fabric.reports_death:
            return Result.REMOTE_ERROR
        if found.state is not Result.IN_PROGRESS:
            return found.state
        found.polls += 1
        if found.finalising:
            is_over = other is None or other.finalising or other.gone
        elif found.joined:
            is_over = found.polls > self.fabric.connect_polls
        else:
            both = other is not None and not other.gone and not other.owner.is_dead
            is_over = both and found.polls > self.fabric.init_polls
            if is_over and other is not None and other.owner.number != self.number:
                found.state = Result.INVALID_USAGE
                return found.state
        if is_over:
            found.state, found.joined, found.polls = Result.SUCCESS, True, 0
        return found.state

    def send(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        return self._move(comm, peer, Move(self._comm(comm), address, size_bytes, True), stream)

    def recv(self, comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        return self._move(comm, peer, Move(self._comm(comm), address, size_bytes, False), stream)

    def group_start(self) -> Result:
        self._called("group_start")
        assert not self._in_group
        self._in_group = True
        return Result.SUCCESS

    def group_end(self) -> Result:
        self._called("group_end")
        assert self._in_group
        self._in_group = False
        return self.post_result

    def finalize(self, comm: int) -> Result:
        self._called("finalize")
        found = self._comm(comm)
        assert found.joined, "finalised before it had joined"
        found.finalising, found.state, found.polls = True, Result.IN_PROGRESS, 0
        return Result.IN_PROGRESS

    def destroy(self, comm: int) -> Result:
        self._called("destroy")
        found = self._comm(comm)
        assert found.finalising, "destroy would wait for the peer"
        assert found.state is Result.SUCCESS, "destroy would wait for the peer"
        return self._end(found)

    def abort(self, comm: int) -> Result:
        self._called("abort")
        found = self._comm(comm)
        with self.fabric.lock:
            if found.move is not None:
                if not found.move.is_send:  # half of it came
                    ctypes.memset(found.move.address, GARBAGE, found.move.size_bytes // 2 + 1)
                found.move.is_over = True
                found.move = None
            return self._end(found)

    def last_error(self, comm: int) -> str:
        return "as the test wanted"

    # -- faults

    def break_comms(self, result: Result) -> None:
        """Every communicator reports this from now on."""
        for comm in self.live:
            comm.state = result

    # -- inside

    def _called(self, name: str) -> None:
        assert not self.is_dead, f"{name} by a process that was killed"
        self.threads.add(threading.get_ident())
        assert len(self.threads) == 1, f"{name} from a second thread"
        self.calls.append(name)

    def _comm(self, handle: int) -> FakeComm:
        assert handle in self._comms, f"no communicator {handle:#x}"
        found = self._comms[handle]
        assert not found.gone, "the communicator is gone"
        return found

    def _end(self, comm: FakeComm) -> Result:
        comm.gone = True
        self.live.discard(comm)
        return Result.SUCCESS

    def _move(self, comm: int, peer: int, move: Move, stream: int) -> Result:
        self._called("send" if move.is_send else "recv")
        found = self._comm(comm)
        assert self._in_group
        assert found.joined, "posted before it had joined"
        assert found.move is None, "two operations in flight"
        assert peer == 1 - found.rank
        if self.post_result in (Result.IN_PROGRESS, Result.SUCCESS):
            found.move, found.state, found.polls = move, self.post_result, 0
            self._streams[stream].append(move)
        return Result.SUCCESS


@dataclass(eq=False)
class FakeEvent:
    """Fires when the moves that it was recorded behind are over, and what a test set."""

    moves: list[Move] = field(default_factory=list)
    is_set: bool = True


class FakeStreams:
    """One process's streams, beside its FakeNccl. `is_stuck`: the GPU does not come to rest.
    `fails`: the device reports an error."""

    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl
        self._numbers = itertools.count(0x9000)
        self.open: set[int] = set()
        self.is_stuck = False
        self.fails = False
        self.is_bound = False

    def bind(self) -> None:
        if self.fails:
            raise StreamError("no device")
        self.is_bound = True

    def open_stream(self) -> int:
        stream = next(self._numbers)
        self.open.add(stream)
        self._nccl._streams[stream] = []
        return stream

    def close_stream(self, stream: int) -> None:
        self.open.remove(stream)

    def record(self, stream: int) -> FakeEvent:
        assert stream in self.open
        if self.fails:
            raise StreamError("illegal address")
        return FakeEvent(list(self._nccl._streams[stream]))

    def query(self, event: object) -> bool:
        assert isinstance(event, FakeEvent)
        if self.fails:
            raise StreamError("illegal address")
        for move in event.moves:
            if not move.is_over and not move.comm.gone:
                self._nccl.fabric.advance(move.comm)
        return event.is_set and not self.is_stuck and all(move.is_over for move in event.moves)
