"""The one thread that makes every NCCL call of a process. It polls and never waits for the device:
a kernel whose peer died spins for ever, and only who is not waiting for it can abort it.

Others put work in by `submit`, `deliver` and `peer_lost`; answers come by the owner's two
callbacks, on this thread (on the caller's where the work is refused at once). One call alone may
take its time, `ncclCommAbort`; whoever owns the thread asks `stalled_s` and takes the worker for
sick when that grows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kv_transfer.device.base import StreamError
from kv_transfer.nccl.actions import (
    AbortComm,
    Destroy,
    Finalise,
    Finished,
    Init,
    Lost,
    MakeId,
    Post,
    Tell,
)
from kv_transfer.nccl.binding import NcclUnavailable, Result
from kv_transfer.nccl.messages import Identify
from kv_transfer.nccl.pair import LIVE, SENDER, PairState

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.device.base import Event, StreamOps
    from kv_transfer.nccl.actions import Op, PairAction
    from kv_transfer.nccl.binding import Nccl
    from kv_transfer.nccl.messages import PairMessage
    from kv_transfer.nccl.pair import Pair
    from kv_transfer.nccl.pool import PairKey, Pool, PoolStats, Work

logger = logging.getLogger(__name__)

POLL_S = 0.0005
PAUSE_S = 0.05
_PROGRESS = (Result.SUCCESS, Result.IN_PROGRESS)


class PairOwner(Protocol):
    """Who asked. Its methods must not wait."""

    def send(self, key: PairKey, message: PairMessage) -> None:
        """Bring the message to the other end, in order."""
        ...

    def ended(self, key: PairKey, op: Op, reason: str, *, is_lost: bool) -> None:
        """The operation is over; `reason` is "" when all went well. With `is_lost` its memory may
        yet be written to, or read, and must not be used again."""
        ...


@dataclass(slots=True)
class _Comm:
    """What NCCL and CUDA gave for a pair. 0 and None: not there."""

    stream: int
    handle: int = 0
    event: Event | None = None


class NcclThread:
    """See the top of the file. `start` and `close` belong to one owner; `step` is what the thread
    does, one round of it."""

    def __init__(
        self,
        nccl: Nccl,
        streams: StreamOps,
        pool: Pool,
        owner: PairOwner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nccl = nccl
        self._streams = streams
        self._pool = pool
        self._owner = owner
        self._clock = clock
        self._comms: dict[PairKey, _Comm] = {}
        self._inbox: deque[Callable[[float], Work]] = deque()
        self._staging: list[tuple[PairKey, Op, Event]] = []
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._closing_until: float | None = None
        self._broken = ""
        self._busy_since: float | None = None
        self._stats = pool.stats()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-nccl")

    # -- from other threads

    def start(self) -> None:
        """Begins; once."""
        self._thread.start()

    def submit(self, key: PairKey, op: Op, after: Event | None = None) -> None:
        """Asks for an operation, once `after` (the gather into its memory) has fired. It ends by
        `PairOwner.ended`, whatever happens."""

        def take(now: float) -> Work:
            if after is None:
                return self._pool.submit(key, op)
            self._staging.append((key, op, after))
            return []

        self._put(take, key, op)

    def deliver(self, key: PairKey, message: PairMessage) -> None:
        """A message of the pair's other end."""
        self._put(lambda now: self._pool.told(key, message, now))

    def peer_lost(self, peer_instance_id: str, reason: str) -> None:
        """The worker is gone for good."""
        self._put(lambda now: self._pool.peer_lost(peer_instance_id, reason, now))

    def stats(self) -> PoolStats:
        """As of the last round."""
        return self._stats

    def stalled_s(self) -> float:
        """How long the round that runs has lasted; 0.0 between rounds."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def close(self, timeout_s: float) -> bool:
        """Ends every pair, in order where that is possible within half of the time, and the thread.
        False where it did not end: then its memory must stay."""
        with self._lock:
            self._closing_until = self._clock() + timeout_s / 2
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the thread

    def step(self) -> bool:
        """One round; True while something goes on that must be looked at soon."""
        self._busy_since = now = self._clock()
        try:
            while self._inbox:
                self._do(self._inbox.popleft()(now))
            self._stage(now)
            for key, pair in list(self._pool.pairs.items()):
                self._look(key, pair, self._clock())
            self._do(self._pool.pump(self._clock()))
            self._drop_streams()
            self._stats = self._pool.stats()
        finally:
            self._busy_since = None
        idle = (PairState.READY, PairState.ABSENT)
        return bool(self._staging) or any(p.state not in idle for p in self._pool.pairs.values())

    def _put(
        self, work: Callable[[float], Work], key: PairKey | None = None, op: Op | None = None
    ) -> None:
        with self._lock:
            refusal = self._broken or ("" if self._closing_until is None else "the worker stops")
            if not refusal or (op is None and not self._broken):
                self._inbox.append(work)
        self._wake.set()
        if refusal and key is not None and op is not None:
            self._owner.ended(key, op, refusal, is_lost=False)

    def _run(self) -> None:
        try:
            self._streams.bind()
            while not self._is_closed():
                hurried = self.step()
                self._wake.wait(POLL_S if hurried else PAUSE_S)
                self._wake.clear()
        except Exception as error:
            logger.exception("the NCCL thread failed")
            self._break(f"{type(error).__name__}: {error}")

    def _is_closed(self) -> bool:
        until = self._closing_until
        if until is None:
            return False
        now = self._clock()
        self._do(self._pool.close(now) if now < until else self._pool.abandon("stopped", now))
        return not self._pool.pairs and not self._inbox and not self._staging

    def _break(self, reason: str) -> None:
        """Nobody looks after what is in flight any more: its memory is lost."""
        with self._lock:
            self._broken = reason
            self._inbox.clear()
        for key, pair in self._pool.pairs.items():
            for op in pair.remaining():
                self._owner.ended(key, op, reason, is_lost=op is pair.op)
        for key, op, _ in self._staging:
            self._owner.ended(key, op, reason, is_lost=True)

    def _stage(self, now: float) -> None:
        waiting, self._staging = self._staging, []
        for key, op, after in waiting:
            if self._has_fired(after):
                self._do(self._pool.submit(key, op))
            elif now >= op.expires_at:
                self._owner.ended(key, op, "its bytes were not staged in time", is_lost=True)
            else:
                self._staging.append((key, op, after))

    def _has_fired(self, event: Event) -> bool:
        try:
            return self._streams.query(event)
        except StreamError as error:
            logger.warning("a CUDA event cannot be asked: %s", error)
            return False

    # -- looking at a pair

    def _look(self, key: PairKey, pair: Pair, now: float) -> None:
        comm = self._comms.get(key)
        if comm is None:
            return
        if pair.state is PairState.QUARANTINED:
            if comm.event is not None and self._has_fired(comm.event):
                comm.event = None
                self._act(key, pair.idle(now))
        elif pair.state in LIVE and comm.handle:
            result = self._nccl.async_error(comm.handle)
            if result not in _PROGRESS:
                said = self._nccl.last_error(comm.handle)
                self._act(key, pair.failed(f"{pair.state.value}: {result.name}: {said}", now))
            elif result is Result.SUCCESS:
                self._advance(key, pair, comm, now)

    def _advance(self, key: PairKey, pair: Pair, comm: _Comm, now: float) -> None:
        """What was asked of NCCL last has been taken."""
        if pair.state is PairState.INITIALISING:
            self._act(key, pair.ready(now))
        elif pair.state is PairState.FINALISING:
            self._act(key, pair.finalised(now))
        elif pair.state is PairState.BUSY and pair.is_posted:
            # An event recorded before NCCL has enqueued would fire before the bytes moved.
            try:
                if comm.event is None:
                    comm.event = self._streams.record(comm.stream)
                elif self._streams.query(comm.event):
                    comm.event = None
                    self._act(key, pair.completed(now))
            except StreamError as error:
                self._act(key, pair.failed(str(error), now))

    # -- doing what the pairs decided

    def _act(self, key: PairKey, actions: list[PairAction]) -> None:
        self._do(self._pool.act(key, actions))

    def _do(self, work: Work) -> None:
        for key, action in work:
            match action:
                case Tell(message):
                    self._owner.send(key, message)
                case Finished(op, reason):
                    self._owner.ended(key, op, reason, is_lost=False)
                case Lost(op, reason):
                    self._owner.ended(key, op, reason, is_lost=True)
                case _:
                    self._call(key, action)

    def _call(self, key: PairKey, action: PairAction) -> None:
        comm = self._comms.get(key)
        if comm is None:
            comm = self._comms[key] = _Comm(self._streams.open_stream())
        match action:
            case MakeId(generation):
                self._make_id(key, comm, generation)
            case Init(_, unique_id):
                self._join(key, comm, unique_id)
            case Post(op):
                self._check(key, self._post(key, comm, op))
            case Finalise():
                self._check(key, self._nccl.finalize(comm.handle))
            case Destroy():
                self._nccl.destroy(comm.handle)
                comm.handle = 0
            case AbortComm():
                self._abort(key, comm)

    def _make_id(self, key: PairKey, comm: _Comm, generation: int) -> None:
        try:
            unique_id = self._nccl.unique_id()
        except NcclUnavailable as error:
            self._fail(key, str(error))
            return
        self._owner.send(key, Identify(generation, unique_id))
        self._join(key, comm, unique_id)

    def _join(self, key: PairKey, comm: _Comm, unique_id: bytes) -> None:
        result, comm.handle = self._nccl.comm_init(unique_id, key.rank, self._pool.limits.config)
        self._check(key, result)

    def _post(self, key: PairKey, comm: _Comm, op: Op) -> Result:
        comm.event = None
        move = self._nccl.send if key.rank == SENDER else self._nccl.recv
        self._nccl.group_start()
        result = move(comm.handle, 1 - key.rank, op.address, op.size_bytes, comm.stream)
        ended = self._nccl.group_end()
        return ended if result in _PROGRESS else result

    def _abort(self, key: PairKey, comm: _Comm) -> None:
        if comm.handle:
            self._nccl.abort(comm.handle)
            comm.handle = 0
        try:
            comm.event = self._streams.record(comm.stream)
        except StreamError as error:
            logger.warning("the stream of an aborted communicator cannot be watched: %s", error)
            comm.event = None
        pair = self._pool.pairs[key]
        self._act(key, pair.aborted(self._clock()))

    def _check(self, key: PairKey, result: Result) -> None:
        if result not in _PROGRESS:
            comm = self._comms[key]
            self._fail(key, f"{result.name}: {self._nccl.last_error(comm.handle)}")

    def _fail(self, key: PairKey, reason: str) -> None:
        pair = self._pool.pairs[key]
        self._act(key, pair.failed(reason, self._clock()))

    def _drop_streams(self) -> None:
        for key in [key for key in self._comms if key not in self._pool.pairs]:
            self._streams.close_stream(self._comms.pop(key).stream)
