"""A prefill and a decode process with one GPU each: two NCCL threads, stepped in turn under a clock
of the test's, and the link between them."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_transfer.device.slots import SlotRing
from kv_transfer.nccl.actions import Op, PairTimeouts
from kv_transfer.nccl.pair import LIVE, RECEIVER, SENDER, PairState
from kv_transfer.nccl.pool import PairKey, Pool, PoolLimits
from kv_transfer.nccl.thread import NcclThread
from tests.unit.kv_transfer.fake_nccl import Fabric, FakeNccl, FakeStreams

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.device.base import Event
    from kv_transfer.nccl.messages import PairMessage

SLOT_BYTES = 64
SLOTS = 4
STEP_S = 0.01
TIMEOUTS = PairTimeouts(
    init_s=3.0,
    offer_s=1.0,
    idle_s=8.0,
    finalise_s=1.0,
    abort_s=1.0,
    quarantine_s=2.0,
    move_floor_s=1.0,
)
# What becomes of a message: the messages that arrive in its place.
Wire = "Callable[[PairMessage], list[PairMessage]]"


@dataclass(frozen=True)
class Ended:
    """How an operation ended, and whether its memory is safe."""

    op_id: str
    reason: str
    is_lost: bool


@dataclass(eq=False)
class Process:
    """One worker: its staging ring, its NCCL thread and what ended."""

    world: World
    instance_id: str
    gpu: int
    rank: int
    limits: PoolLimits
    nccl: FakeNccl
    ended_ops: list[Ended] = field(default_factory=list)
    is_dead: bool = False

    def __post_init__(self) -> None:
        self.streams = FakeStreams(self.nccl)
        self.pool = Pool(self.limits)
        self.ring = SlotRing(SLOTS)
        self.memory = (ctypes.c_ubyte * (SLOT_BYTES * SLOTS))()
        self.slots: dict[str, int] = {}
        self.thread = NcclThread(self.nccl, self.streams, self.pool, self, self.world.clock)

    # -- the owner's side

    def send(self, key: PairKey, message: PairMessage) -> None:
        for arriving in self.world.wire(message):
            self.world.link.append((self, key, arriving))

    def ended(self, key: PairKey, op: Op, reason: str, *, is_lost: bool) -> None:
        self.ended_ops.append(Ended(op.op_id, reason, is_lost))
        slot = self.slots.pop(op.op_id)
        (self.ring.lose if is_lost else self.ring.release)(slot)

    # -- the test's side

    def key(self, peer: Process) -> PairKey:
        return PairKey(peer.instance_id, peer.gpu, self.rank)

    def address(self, slot: int) -> int:
        return ctypes.addressof(self.memory) + slot * SLOT_BYTES

    def bytes_of(self, slot: int) -> bytes:
        return bytes(self.memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])

    def ask(
        self,
        peer: Process,
        op_id: str,
        fill: int = 0,
        *,
        size_bytes: int = SLOT_BYTES,
        within_s: float = 60.0,
        after: Event | None = None,
    ) -> int:
        """Submits an operation on a slot of `fill`; returns the slot."""
        slot = self.ring.acquire()
        assert slot is not None
        self.slots[op_id] = slot
        ctypes.memset(self.address(slot), fill, SLOT_BYTES)
        op = Op(op_id, self.address(slot), size_bytes, self.world.now + within_s)
        self.thread.submit(self.key(peer), op, after)
        return slot

    def state(self, peer: Process) -> PairState:
        pair = self.pool.pairs.get(self.key(peer))
        return PairState.GONE if pair is None else pair.state

    def outcome(self, op_id: str) -> Ended | None:
        found = [ended for ended in self.ended_ops if ended.op_id == op_id]
        assert len(found) <= 1, f"{op_id} ended more than once"
        return found[0] if found else None

    def check(self) -> None:
        """What holds at every moment."""
        assert self.pool.reserved_bytes <= self.limits.budget_bytes
        assert self.pool.busy <= self.limits.max_busy
        for pair in self.pool.pairs.values():
            live = pair.state in LIVE or pair.state in (PairState.ABORTING, PairState.QUARANTINED)
            assert (pair.deadline is not None) == live
            assert pair.op is None or live
        assert (
            set(self.slots.values()) == set(range(SLOTS)) - set(self.ring._free) - self.ring._lost
        )


class World:
    """All of it. `run` steps until something holds or too much time has passed."""

    def __init__(self, *, limits: PoolLimits | None = None, decodes: int = 1) -> None:
        self.now = 100.0
        self.fabric = Fabric()
        self.link: deque[tuple[Process, PairKey, PairMessage]] = deque()
        self.wire: Callable[[PairMessage], list[PairMessage]] = lambda message: [message]
        limits = limits or PoolLimits(timeouts=TIMEOUTS)

        def process(name: str, gpu: int, rank: int) -> Process:
            return Process(self, name, gpu, rank, limits, FakeNccl(self.fabric))

        self.prefill = process("prefill", 0, SENDER)
        self.decodes = [process("decode", gpu, RECEIVER) for gpu in range(decodes)]

    @property
    def decode(self) -> Process:
        return self.decodes[0]

    @property
    def processes(self) -> list[Process]:
        return [self.prefill, *self.decodes]

    def clock(self) -> float:
        return self.now

    def kill(self, process: Process) -> None:
        """kill -9: it does nothing more and says nothing."""
        process.is_dead = process.nccl.is_dead = True

    def step(self) -> None:
        self.now += STEP_S
        for _ in range(len(self.link)):
            sender, key, message = self.link.popleft()
            others = self.decodes if sender is self.prefill else [self.prefill]
            receiver = next(
                p for p in others if (p.instance_id, p.gpu) == (key.peer_instance_id, key.peer_gpu)
            )
            if not receiver.is_dead:
                receiver.thread.deliver(receiver.key(sender), message)
        for process in self.processes:
            if not process.is_dead:
                process.thread.step()
                process.check()

    def run(self, until: Callable[[], bool], limit_s: float = 60.0) -> None:
        end = self.now + limit_s
        while not until():
            assert self.now < end, (
                f"not within {limit_s} s: {[p.pool.pairs for p in self.processes]}"
            )
            self.step()

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def move(self, op_id: str, fill: int, decode: Process | None = None) -> bytes:
        """One operation from end to end; what arrived. Both slots are free again."""
        target = decode or self.decode
        self.prefill.ask(target, op_id, fill)
        slot = target.ask(self.prefill, op_id)
        self.run(lambda: bool(self.prefill.outcome(op_id) and target.outcome(op_id)))
        assert self.prefill.outcome(op_id) == target.outcome(op_id) == Ended(op_id, "", False)
        return target.bytes_of(slot)

    def assert_quiet(self) -> None:
        """Nothing is held after a while, and what lives ends within its idle time."""
        alive = [p for p in self.processes if not p.is_dead]
        self.run(lambda: not any(p.pool.pairs for p in alive), limit_s=6 * TIMEOUTS.idle_s)
        self.run_for(1.0)
        for process in alive:
            assert process.pool.pairs == {}
            assert process.nccl.live == set()
            assert process.streams.open == set()
            assert process.ring.held == 0
            assert process.slots == {}


def begun(world: World, op_id: str = "t:0") -> tuple[int, int]:
    """An operation in flight at both ends, whose bytes do not move; its slots."""
    world.fabric.is_held = True
    sent = world.prefill.ask(world.decode, op_id, 0x42)
    slot = world.decode.ask(world.prefill, op_id)
    world.run(lambda: all("send" in p.nccl.calls or p.rank for p in world.processes))
    world.run(lambda: "recv" in world.decode.nccl.calls)
    return sent, slot


def over(world: World, op_id: str = "t:0") -> bool:
    return all(p.is_dead or p.outcome(op_id) is not None for p in world.processes)


def failed(process: Process, op_id: str = "t:0") -> str:
    """The reason; the memory is safe."""
    ended = process.outcome(op_id)
    assert ended is not None
    assert ended.reason
    assert not ended.is_lost
    return ended.reason


def peer_is_lost(world: World, survivor: Process, dead: Process) -> None:
    """What the link finds out when the other process is gone."""
    survivor.thread.peer_lost(dead.instance_id, "the link is down")
