"""One prefill GPU and one decode GPU: their two-rank communicator, one end of it, as a state
machine without I/O.

    ABSENT ─open─► INITIALISING ─ready─► READY ◄─start, completed─► BUSY
       ▲                 └──────────┬──────┴─────────────────────────┘
       │ work is left               ├─ error, deadline, peer's Abort ─► ABORTING ► QUARANTINED ┐
       └────────────────────────────┼─────────────────────────────────────────────────────────┤
                                    └─ close, peer's Finish ─► FINALISING ──────────────────┴► GONE

Rank 0 sends and rank 1 receives; KV is pushed. Nothing is posted to NCCL before the other end has
said that it posts now: a kernel that waits for its peer holds processors that others need. At most
one operation is in flight. NCCL has no deadlines, so every state has one of ours. A failure costs
the communicator: its memory is quarantined until the stream is idle, a fresh communicator tries the
operation once more, and then the pair gives up all it was asked (the decode worker recomputes).

Every method takes the time and returns the work to do. `generation` names a communicator; what
speaks of another one is dropped.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from kv_transfer.nccl.actions import (
    AbortComm,
    Destroy,
    Finalise,
    Finished,
    Init,
    Lost,
    MakeId,
    Op,
    PairAction,
    Post,
    Tell,
)
from kv_transfer.nccl.messages import (
    Abort,
    Clear,
    Finish,
    Identify,
    Offer,
    PairMessage,
    Refuse,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.nccl.actions import PairTimeouts

SENDER, RECEIVER = 0, 1
MAX_FAILURES = 2


class PairState(Enum):
    """Where the communicator stands."""

    ABSENT = "absent"
    INITIALISING = "initialising"
    READY = "ready"
    BUSY = "busy"
    FINALISING = "finalising"
    ABORTING = "aborting"
    QUARANTINED = "quarantined"
    GONE = "gone"


LIVE = frozenset({PairState.INITIALISING, PairState.READY, PairState.BUSY, PairState.FINALISING})


class Pair:
    """One end. Mutable: `state`, `generation`, the queue and the operation in flight; only its own
    methods change them, and one thread calls those."""

    def __init__(
        self,
        rank: int,
        timeouts: PairTimeouts,
        next_generation: Callable[[], int],
        is_fresh: Callable[[bytes], bool],
        *,
        generation: int = 0,
    ) -> None:
        self.rank = rank
        self.state = PairState.ABSENT
        self.generation = generation
        self.deadline: float | None = None
        self.op: Op | None = None
        self.is_posted = False
        self.reason = ""
        self._timeouts = timeouts
        self._next_generation = next_generation
        self._is_fresh = is_fresh
        self._queue: deque[Op] = deque()
        self._failures = 0
        self._identity: Identify | None = None
        self._offer: Offer | None = None
        self._peer_finishes = False

    def __repr__(self) -> str:
        return f"Pair({self.state.value}, generation {self.generation}, {len(self._queue)} queued)"

    @property
    def is_used(self) -> bool:
        """Whether somebody waits for it."""
        return self.op is not None or bool(self._queue) or self._identity is not None

    @property
    def wants_open(self) -> bool:
        """Whether `open` would begin a communicator."""
        has_cause = bool(self._queue) if self.rank == SENDER else self._identity is not None
        return self.state is PairState.ABSENT and has_cause

    @property
    def wants_start(self) -> bool:
        """Whether `start` would begin an operation."""
        return self.state is PairState.READY and self._next_op() is not None

    def remaining(self) -> list[Op]:
        """Every operation that has not ended, the one in flight first."""
        return ([] if self.op is None else [self.op]) + list(self._queue)

    # -- from the owner

    def submit(self, op: Op) -> list[PairAction]:
        """Queues an operation."""
        if self.state is PairState.GONE:
            return [Finished(op, self.reason or "the pair is gone")]
        self._queue.append(op)
        return []

    def open(self, now: float) -> list[PairAction]:
        """There is memory for a communicator: begin one if it is wanted."""
        if not self.wants_open:
            return []
        self._enter(PairState.INITIALISING, now + self._timeouts.init_s)
        self._offer, self._peer_finishes = None, False
        if self.rank == SENDER:
            self.generation = self._next_generation()
            return [MakeId(self.generation)]
        assert self._identity is not None
        joined, self._identity = self._identity, None
        self.generation = joined.generation
        return [Init(joined.generation, joined.unique_id)]

    def start(self, now: float) -> list[PairAction]:
        """There is room for an operation in flight: begin the next one if there is one."""
        op = self._next_op() if self.state is PairState.READY else None
        if op is None:
            return []
        self._queue.remove(op)
        if self.rank == SENDER:
            self.op, self.is_posted = op, False
            self._enter(PairState.BUSY, now + self._timeouts.offer_s)
            return [Tell(Offer(self.generation, op.op_id, op.size_bytes))]
        assert self._offer is not None
        offer, self._offer = self._offer, None
        if offer.size_bytes != op.size_bytes:
            reason = f"{offer.size_bytes} bytes offered where {op.size_bytes} were due"
            return [Tell(Refuse(self.generation, op.op_id, reason)), Finished(op, reason)]
        # The peer posts when it reads Clear; the memory must be ours to fill before that.
        return [*self._post(op, now), Tell(Clear(self.generation, op.op_id))]

    def close(self, now: float) -> list[PairAction]:
        """End in order, unless somebody waits for it."""
        if self.is_used or self.state not in (PairState.ABSENT, PairState.READY):
            return []
        if self.state is PairState.ABSENT:
            return self._go()
        return [Tell(Finish(self.generation)), *self._finalise(now)]

    def peer_lost(self, reason: str, now: float) -> list[PairAction]:
        """The other end is gone for good: no retry."""
        self._failures = MAX_FAILURES
        self._identity = None
        if self.state is PairState.ABSENT:
            self.reason = reason
            return self._go()
        return self._fail(reason, now, tell=False)

    # -- from NCCL

    def ready(self, now: float) -> list[PairAction]:
        """The communicator exists."""
        if self.state is PairState.INITIALISING:
            return self._rest(now)
        return []

    def completed(self, now: float) -> list[PairAction]:
        """The operation's event has fired."""
        if self.state is not PairState.BUSY or self.op is None or not self.is_posted:
            return []
        op, self.op = self.op, None
        self._failures = 0
        return [Finished(op), *self._rest(now)]

    def failed(self, reason: str, now: float) -> list[PairAction]:
        """A call or the communicator reported an error."""
        return self._fail(reason, now, tell=True)

    def finalised(self, now: float) -> list[PairAction]:
        """The orderly end is over."""
        if self.state is not PairState.FINALISING:
            return []
        return [Destroy(), *self._settle(now)]

    def aborted(self, now: float) -> list[PairAction]:
        """The abort has returned."""
        if self.state is PairState.ABORTING:
            self._enter(PairState.QUARANTINED, now + self._timeouts.quarantine_s)
        return []

    def idle(self, now: float) -> list[PairAction]:
        """Nothing of the communicator runs on the stream any more."""
        return self._settle(now) if self.state is PairState.QUARANTINED else []

    # -- from the peer

    def told(self, message: PairMessage, now: float) -> list[PairAction]:
        """A message of the other end."""
        if isinstance(message, Identify):
            return self._identified(message, now)
        waiting = self._identity
        if isinstance(message, Abort) and waiting and waiting.generation == message.generation:
            self._identity = None
            return []
        if message.generation != self.generation or self.state not in LIVE:
            return []
        match message:
            case Offer() if self.rank == RECEIVER:
                return self._offered(message, now)
            case Clear(_, op_id) if self._is_offered(op_id):
                assert self.op is not None
                return self._post(self.op, now)
            case Refuse(_, op_id, reason) if self._is_offered(op_id):
                assert self.op is not None
                op, self.op = self.op, None
                return [Finished(op, reason), *self._rest(now)]
            case Abort(_, reason):
                return self._fail(reason, now, tell=False)
            case Finish():
                return self._peer_finished(now)
        return []

    # -- from the clock

    def tick(self, now: float) -> list[PairAction]:
        """What came too late."""
        actions: list[PairAction] = []
        for op in [op for op in self._queue if now >= op.expires_at]:
            self._queue.remove(op)
            actions.append(Finished(op, "its time was over before it could be posted"))
        if self.state is PairState.ABSENT and not self.is_used:
            return actions + self._go()
        if self.deadline is None or now < self.deadline:
            return actions
        match self.state:
            case PairState.READY:
                # Work that waits for a place in flight is no reason to keep the clock.
                self.deadline = now + self._timeouts.idle_s
                return actions + self.close(now)
            case PairState.ABORTING | PairState.QUARANTINED:
                return actions + self._lose(f"{self.reason}; then the GPU did not come to rest")
            case _:
                waited = "the peer posted nothing" if self._is_waiting else "no progress"
                return actions + self._fail(f"{self.state.value}: {waited}", now, tell=True)

    # -- inside

    @property
    def _is_waiting(self) -> bool:
        return self.op is not None and not self.is_posted

    def _enter(self, state: PairState, deadline: float | None) -> None:
        self.state, self.deadline = state, deadline

    def _next_op(self) -> Op | None:
        if self.rank == SENDER:
            return self._queue[0] if self._queue else None
        offered = self._offer.op_id if self._offer is not None else None
        return next((op for op in self._queue if op.op_id == offered), None)

    def _is_offered(self, op_id: str) -> bool:
        return self.rank == SENDER and self._is_waiting and self.op_id == op_id

    @property
    def op_id(self) -> str:
        """Of the operation in flight, or ""."""
        return "" if self.op is None else self.op.op_id

    def _post(self, op: Op, now: float) -> list[PairAction]:
        self.op, self.is_posted = op, True
        self._enter(PairState.BUSY, now + self._timeouts.move_s(op.size_bytes))
        return [Post(op)]

    def _rest(self, now: float) -> list[PairAction]:
        self._enter(PairState.READY, now + self._timeouts.idle_s)
        return self._finalise(now) if self._peer_finishes else []

    def _finalise(self, now: float) -> list[PairAction]:
        self._enter(PairState.FINALISING, now + self._timeouts.finalise_s)
        return [Finalise()]

    def _identified(self, message: Identify, now: float) -> list[PairAction]:
        known = self.generation if self._identity is None else self._identity.generation
        if self.rank == SENDER or message.generation <= known:
            return []
        if self.state is PairState.GONE or not self._is_fresh(message.unique_id):
            return [Tell(Abort(message.generation, "the unique id was used before"))]
        self._identity = message
        if self.state in LIVE and self.state is not PairState.FINALISING:
            return self._fail("the peer began anew", now, tell=False)
        return []

    def _offered(self, offer: Offer, now: float) -> list[PairAction]:
        if self._offer is not None and offer.op_id != self._offer.op_id:
            return self._fail("two operations were offered at once", now, tell=True)
        # The sender may see an operation's end before we do, and offer the next one.
        if offer.op_id != self.op_id:
            self._offer = offer
        return []

    def _peer_finished(self, now: float) -> list[PairAction]:
        if self.state is PairState.FINALISING:
            return []
        if self._is_waiting and self.op is not None:
            # Our offer and its Finish crossed: nothing was posted, and nothing went wrong.
            self._queue.appendleft(self.op)
            self.op = None
            return self._finalise(now)
        self._peer_finishes = True
        return self._finalise(now) if self.state is PairState.READY else []

    def _fail(self, reason: str, now: float, *, tell: bool) -> list[PairAction]:
        if self.state not in LIVE:
            return []
        self.reason = reason
        self._failures += 1
        self._enter(PairState.ABORTING, now + self._timeouts.abort_s)
        told: list[PairAction] = [Tell(Abort(self.generation, reason))] if tell else []
        return [*told, AbortComm()]

    def _settle(self, now: float) -> list[PairAction]:
        """The communicator is no more and its memory is safe."""
        actions: list[PairAction] = []
        if self.op is not None:
            op, self.op = self.op, None
            if self._failures < MAX_FAILURES and now < op.expires_at:
                self._queue.appendleft(op)
            else:
                actions.append(Finished(op, self.reason))
        if self._failures >= MAX_FAILURES or not self.is_used:
            return actions + self._go()
        self._enter(PairState.ABSENT, None)
        return actions

    def _lose(self, reason: str) -> list[PairAction]:
        self.reason = reason
        lost: list[PairAction] = [] if self.op is None else [Lost(self.op, reason)]
        self.op = None
        return lost + self._go()

    def _go(self) -> list[PairAction]:
        reason = self.reason or "the pair is gone"
        actions: list[PairAction] = [Finished(op, reason) for op in self._queue]
        self._queue.clear()
        if self._identity is not None:
            actions.append(Tell(Abort(self._identity.generation, reason)))
            self._identity = None
        self._enter(PairState.GONE, None)
        return actions
