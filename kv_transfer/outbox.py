"""What waits to be written on a link, and whose turn it is to write it.

Any thread may put work in. One at a time has the turn, and does what waits in order: the link's
writer thread, or a visitor: a thread that put something in and, nobody writing, goes on with it
itself, which saves waking another. A visitor never waits for the peer and pushes few bytes; what
is left it hands to the writer.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Of what jobs have written, so much is kept to be sent in one piece.
MAX_UNSENT_BYTES = 64 << 10


class Turn(Enum):
    """Who may write."""

    NOBODY = "nobody"
    VISITOR = "visitor"
    WRITER = "writer"


@dataclass(frozen=True, slots=True)
class Job:
    """Work for whoever has the turn. `size` is how many bytes of KV it moves: one that moves some
    finds everything written before it sent."""

    run: Callable[[], None]
    size: int = 0


class Outbox:
    """The turn is the writer's until it first finds nothing to do."""

    def __init__(
        self, send_all: Callable[[bytes], None], send_some: Callable[[bytes], int]
    ) -> None:
        """`send_all` waits for the peer; `send_some` returns how many bytes went without that."""
        self._send_all = send_all
        self._send_some = send_some
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._turn = Turn.WRITER
        self._urgent: deque[Job | bytes] = deque()
        self._waiting: deque[Job | bytes] = deque()
        self._unsent = bytearray()  # only whoever has the turn touches it
        self._closed = False

    @property
    def has_visitor(self) -> bool:
        """Whether a thread that is not the link's is inside."""
        return self._turn is Turn.VISITOR

    def has_more(self) -> bool:
        """For jobs: whether something waits behind this one."""
        return bool(self._urgent or self._waiting)

    def put(self, job: Job | bytes) -> None:
        """Behind all that waits; bytes are written as they are. Nothing happens before `flush`."""
        self._waiting.append(job)

    def put_next(self, job: Job | bytes) -> None:
        """Before all that waits, behind what is being done now."""
        self._urgent.append(job)

    def write(self, data: bytes) -> None:
        """For jobs: the bytes go behind all that was written before, soon."""
        self._unsent += data

    def flush(self, limit: int) -> None:
        """Does what waits, without waiting for the peer and up to `limit` bytes of KV; the rest is
        the writer's. Nothing where somebody else has the turn. Raises what the jobs raise."""
        with self._lock:
            if self._turn is not Turn.NOBODY or self._closed:
                return
            self._turn = Turn.VISITOR
        try:
            self._work(limit)
        except BaseException:
            self.close()  # what stands behind a job that failed must not be done
            raise
        finally:
            with self._lock:
                if self._turn is Turn.VISITOR:
                    self._give(Turn.NOBODY)

    def hand_over(self) -> None:
        """Leaves what waits to the writer; to whoever has the turn, where it is somebody's."""
        with self._lock:
            if self._turn is Turn.NOBODY:
                self._give(Turn.WRITER)

    def serve(self) -> None:
        """The writer thread's life, until `close`. Raises what the jobs raise."""
        while True:
            with self._lock:
                while self._turn is not Turn.WRITER and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            self._work(math.inf)

    def close(self) -> None:
        """Nothing more is begun. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def wait_for_visitor(self) -> None:
        """After `close`: returns when no visitor is inside, which has no peer to wait for."""
        with self._lock:
            while self._turn is Turn.VISITOR:
                self._changed.wait()

    def _work(self, limit: float) -> None:
        while (job := self._next(limit)) is not None:
            limit -= job.size
            job.run()

    def _next(self, limit: float) -> Job | None:
        """The job to do now; None when the turn is given away."""
        while True:
            with self._lock:
                if self._closed:
                    return None
                queue = self._urgent or self._waiting
                job = queue[0] if queue else b""
                size = job.size if isinstance(job, Job) else 0
                is_due = not queue or size or len(self._unsent) >= MAX_UNSENT_BYTES
                if not (self._unsent and is_due):
                    if queue and size <= limit:
                        queue.popleft()
                        if isinstance(job, Job):
                            return job
                        self._unsent += job
                        continue
                    self._give(Turn.WRITER if queue else Turn.NOBODY)
                    return None
            if limit == math.inf:
                self._send_all(bytes(self._unsent))
                self._unsent.clear()
            else:
                del self._unsent[: self._send_some(bytes(self._unsent))]
                if self._unsent:
                    with self._lock:
                        self._give(Turn.WRITER)
                    return None

    def _give(self, turn: Turn) -> None:
        self._turn = turn
        # Nobody else waits for a turn that is free: do not wake the writer for it.
        if turn is Turn.WRITER or self._closed:
            self._changed.notify_all()
