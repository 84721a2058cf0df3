"""The NCCL thread as a thread, and what its owner may rely on; the ring's slots."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kv_transfer.device.slots import SlotRing
from kv_transfer.errors import KvTransferError
from kv_transfer.nccl.actions import Op, PairTimeouts
from kv_transfer.nccl.messages import Identify, Offer
from kv_transfer.nccl.pair import RECEIVER, SENDER
from kv_transfer.nccl.pool import PairKey, Pool, PoolLimits
from kv_transfer.nccl.thread import NcclThread
from tests.patience import WAIT_S
from tests.unit.kv_transfer.fake_nccl import Fabric, FakeNccl, FakeStreams

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.nccl.binding import Result
    from kv_transfer.nccl.messages import PairMessage

NEVER = 1e12
# No state's time is over while a test goes on, not even when it moves the clock.
TIMEOUTS = PairTimeouts(
    init_s=NEVER,
    offer_s=NEVER,
    finalise_s=NEVER,
    abort_s=NEVER,
    quarantine_s=NEVER,
    move_floor_s=NEVER,
)


class End:
    """One process with a thread that runs. `peer` is the other."""

    peer: End

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.nccl = FakeNccl(fabric)
        self.streams = FakeStreams(self.nccl)
        self.key = PairKey("peer", 0, rank)
        self.done = threading.Event()
        self.outcomes: list[tuple[str, str, bool]] = []
        self.ahead_s = 0.0
        limits = PoolLimits(timeouts=TIMEOUTS)
        self.thread = NcclThread(self.nccl, self.streams, Pool(limits), self, self.clock)
        self.on_send: Callable[[PairMessage], None] = lambda message: None

    def clock(self) -> float:
        return time.monotonic() + self.ahead_s

    def close_late(self) -> bool:
        """Closes the thread, and lets the time for an end in order pass at once."""
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(self.thread.close, WAIT_S)
            until = time.monotonic() + WAIT_S
            while self.thread._closing_until is None:
                assert time.monotonic() < until
            self.ahead_s = WAIT_S
            return closing.result()

    def send(self, key: PairKey, message: PairMessage) -> None:
        self.on_send(message)
        self.peer.thread.deliver(self.peer.key, message)

    def ended(self, key: PairKey, op: Op, reason: str, *, is_lost: bool) -> None:
        self.outcomes.append((op.op_id, reason, is_lost))
        self.done.set()


def two_ends() -> tuple[End, End]:
    fabric = Fabric()
    source, target = End(fabric, SENDER), End(fabric, RECEIVER)
    source.peer, target.peer = target, source
    return source, target


def op(buffer: ctypes.Array[ctypes.c_char], op_id: str = "t:0") -> Op:
    return Op(op_id, ctypes.addressof(buffer), len(buffer), NEVER)


def test_bytes_move_between_two_threads_and_both_end() -> None:
    source, target = two_ends()
    data, room = ctypes.create_string_buffer(b"key/value", 9), (ctypes.c_char * 9)()
    source.thread.start()
    target.thread.start()
    target.thread.submit(target.key, op(room))
    source.thread.submit(source.key, op(data))
    assert source.done.wait(WAIT_S)
    assert target.done.wait(WAIT_S)
    assert source.outcomes == target.outcomes == [("t:0", "", False)]
    assert room.raw == b"key/value"
    for end in (source, target):
        assert end.streams.is_bound
        assert end.thread.close(WAIT_S)
        assert end.nccl.live == set()
        assert end.streams.open == set()
        # Not this thread's: its own made every call.
        assert end.nccl.threads.isdisjoint({threading.get_ident()})
        assert end.thread.stalled_s() == 0.0


def test_close_ends_what_is_in_flight() -> None:
    source, target = two_ends()
    source.nccl.fabric.is_held = True
    posted = threading.Event()
    send = source.nccl.send

    def sending(comm: int, peer: int, address: int, size_bytes: int, stream: int) -> Result:
        posted.set()
        return send(comm, peer, address, size_bytes, stream)

    source.nccl.send = sending  # type: ignore[method-assign]
    for end in (source, target):
        end.thread.start()
        end.thread.submit(end.key, op((ctypes.c_char * 9)()))
    assert posted.wait(WAIT_S)
    assert source.close_late()
    assert source.outcomes == [("t:0", "stopped", False)]
    assert source.nccl.live == set()
    assert target.close_late()
    assert [(op_id, lost) for op_id, _, lost in target.outcomes] == [("t:0", False)]


def test_after_close_work_is_refused_at_once() -> None:
    source, _ = two_ends()
    source.thread.start()
    assert source.thread.close(WAIT_S)
    source.thread.submit(source.key, op((ctypes.c_char * 9)()))
    assert source.outcomes == [("t:0", "the worker stops", False)]
    assert source.nccl.calls == []


def test_a_thread_that_was_not_started_closes() -> None:
    source, _ = two_ends()
    assert source.thread.close(WAIT_S)


def test_a_thread_without_a_device_refuses_work() -> None:
    source, _ = two_ends()
    source.streams.fails = True
    source.thread.start()
    assert source.thread.close(WAIT_S)
    source.thread.submit(source.key, op((ctypes.c_char * 9)()))
    assert source.outcomes == [("t:0", "StreamError: no device", False)]


@pytest.mark.parametrize(("at", "is_lost"), [(Identify, False), (Offer, True)])
def test_a_thread_that_fails_gives_up_what_it_holds_and_loses_what_is_in_flight(
    at: type[PairMessage], is_lost: bool
) -> None:
    source, target = two_ends()

    def broken(message: PairMessage) -> None:
        if isinstance(message, at):
            raise RuntimeError("a bug of the owner's")

    source.on_send = broken
    source.thread.start()
    target.thread.start()
    source.thread.submit(source.key, op((ctypes.c_char * 9)()))
    assert source.done.wait(WAIT_S)
    assert source.outcomes == [("t:0", "RuntimeError: a bug of the owner's", is_lost)]
    assert source.thread.close(WAIT_S)
    assert target.close_late()


def test_a_call_that_does_not_return_can_be_seen() -> None:
    source, _ = two_ends()
    entered, leave = threading.Event(), threading.Event()

    def stuck() -> bytes:
        entered.set()
        assert leave.wait(WAIT_S)
        return bytes(128)

    source.nccl.unique_id = stuck  # type: ignore[method-assign]
    source.thread.start()
    source.thread.submit(source.key, op((ctypes.c_char * 9)()))
    assert entered.wait(WAIT_S)
    try:
        assert source.thread.stalled_s() > 0.0
    finally:
        leave.set()
    assert source.close_late()
    assert [(op_id, lost) for op_id, _, lost in source.outcomes] == [("t:0", False)]


def test_slots_are_given_out_until_there_are_none() -> None:
    ring = SlotRing(2)
    first, second = ring.acquire(), ring.acquire()
    assert {first, second} == {0, 1}
    assert ring.acquire() is None
    assert first is not None
    ring.release(first)
    assert ring.acquire() == first
    assert (ring.free, ring.held, ring.lost) == (0, 2, 0)


def test_a_lost_slot_is_not_given_out_again() -> None:
    ring = SlotRing(1)
    slot = ring.acquire()
    assert slot is not None
    ring.lose(slot)
    assert ring.acquire() is None
    assert (ring.free, ring.held, ring.lost) == (0, 0, 1)
    with pytest.raises(KvTransferError, match="slot 0 is not held"):
        ring.release(slot)


@pytest.mark.parametrize("slot", [-1, 0, 2])
def test_a_slot_that_is_not_held_is_not_released(slot: int) -> None:
    with pytest.raises(KvTransferError, match=f"slot {slot} is not held"):
        SlotRing(2).release(slot)


def test_a_ring_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="0 slots"):
        SlotRing(0)
