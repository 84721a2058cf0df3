"""Wrong words, errors of NCCL and of the device, memory that is short or unsafe, and all faults at
once, on the fake. Each test names its fault, and ends with nothing held."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kv_transfer.nccl.binding import NcclUnavailable, Result, check_versions
from tests.unit.kv_transfer.fake_nccl import FakeEvent
from tests.unit.kv_transfer.nccl_world import (
    SLOT_BYTES,
    SLOTS,
    TIMEOUTS,
    Ended,
    World,
    begun,
    failed,
    over,
    peer_is_lost,
)

if TYPE_CHECKING:
    from nccl_world import Process

    from kv_transfer.nccl.messages import PairMessage


# -- what is said or asked is wrong


@pytest.mark.parametrize("due", [SLOT_BYTES - 1, SLOT_BYTES // 2])
def test_wrong_size(due: int) -> None:
    world = World()
    world.prefill.ask(world.decode, "t:0", 1)
    world.decode.ask(world.prefill, "t:0", size_bytes=due)
    world.run(lambda: over(world), limit_s=1.0)
    expected = f"{SLOT_BYTES} bytes offered where {due} were due"
    assert failed(world.prefill) == failed(world.decode) == expected
    assert "recv" not in world.decode.nccl.calls
    assert world.move("t:1", 3) == b"\x03" * SLOT_BYTES
    assert world.prefill.pool.stats().made == 1
    world.assert_quiet()


def test_unique_id_reuse() -> None:
    world = World()
    world.prefill.nccl.uid_repeats = True
    world.move("t:0", 1)
    world.prefill.nccl.break_comms(Result.SYSTEM_ERROR)
    world.run(lambda: world.prefill.pool.pairs == {} and world.decode.pool.pairs == {})
    world.prefill.ask(world.decode, "t:1", 1)
    world.decode.ask(world.prefill, "t:1", within_s=10.0)
    world.run(lambda: over(world, "t:1"))
    assert failed(world.prefill, "t:1") == "the unique id was used before"
    assert world.decode.nccl.calls.count("comm_init") == 1
    world.prefill.nccl.uid_repeats = False
    assert world.move("t:2", 3) == b"\x03" * SLOT_BYTES
    world.assert_quiet()


def test_no_unique_id() -> None:
    world = World()
    world.prefill.nccl.uid_fails = True
    world.prefill.ask(world.decode, "t:0", 1)
    world.run(lambda: world.prefill.outcome("t:0") is not None, limit_s=1.0)
    assert "no interface" in failed(world.prefill)
    world.prefill.nccl.uid_fails = False
    assert world.move("t:1", 3) == b"\x03" * SLOT_BYTES
    world.assert_quiet()


def test_version_mismatch() -> None:
    check_versions(23007, 23007)
    with pytest.raises(NcclUnavailable, match="23007 here and 22809 there"):
        check_versions(23007, 22809)
    world = World()
    world.decode.nccl.number = 22809
    world.prefill.ask(world.decode, "t:0", 1)
    world.decode.ask(world.prefill, "t:0", within_s=10.0)
    world.run(lambda: over(world))
    assert "INVALID_USAGE" in failed(world.prefill)
    world.assert_quiet()


# -- NCCL or the device reports an error


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("result", [Result.REMOTE_ERROR, Result.INTERNAL_ERROR, Result.UNKNOWN])
def test_async_error(side: str, result: Result) -> None:
    world = World()
    _, slot = begun(world)
    getattr(world, side).nccl.break_comms(result)
    world.fabric.is_held = False
    world.run(lambda: over(world))
    assert world.decode.outcome("t:0") == Ended("t:0", "", False)
    assert world.decode.bytes_of(slot) == b"\x42" * SLOT_BYTES
    assert [p.nccl.calls.count("abort") for p in world.processes] == [1, 1]
    world.assert_quiet()


def test_async_error_of_an_idle_communicator() -> None:
    world = World()
    world.move("t:0", 1)
    world.decode.nccl.break_comms(Result.REMOTE_ERROR)
    assert world.move("t:1", 2) == b"\x02" * SLOT_BYTES
    world.assert_quiet()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_init_is_refused(side: str) -> None:
    world = World()
    getattr(world, side).nccl.init_result = Result.INVALID_USAGE
    world.prefill.ask(world.decode, "t:0", 1)
    world.decode.ask(world.prefill, "t:0", within_s=10.0)
    world.run(lambda: over(world))
    assert "INVALID_USAGE: as the test wanted" in failed(world.prefill)
    assert failed(world.decode)
    world.assert_quiet()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_post_is_refused(side: str) -> None:
    world = World()
    world.move("t:0", 1)
    nccl = getattr(world, side).nccl
    nccl.post_result = Result.INVALID_ARGUMENT
    world.prefill.ask(world.decode, "t:1", 7)
    slot = world.decode.ask(world.prefill, "t:1")
    world.run(lambda: "abort" in nccl.calls)
    nccl.post_result = Result.IN_PROGRESS
    world.run(lambda: over(world, "t:1"))
    assert world.decode.outcome("t:1") == Ended("t:1", "", False)
    assert world.decode.bytes_of(slot) == b"\x07" * SLOT_BYTES
    world.assert_quiet()


# -- memory


def test_slot_exhaustion() -> None:
    world = World()
    world.fabric.is_held = True
    for n in range(SLOTS):
        world.prefill.ask(world.decode, f"t:{n}", 1)
        world.decode.ask(world.prefill, f"t:{n}")
    assert world.prefill.ring.acquire() is None
    world.run_for(TIMEOUTS.move_floor_s / 2)
    assert world.prefill.ring.acquire() is None
    world.fabric.is_held = False
    world.run(lambda: world.prefill.ring.free == SLOTS and world.decode.ring.free == SLOTS)
    assert {e.reason for e in world.decode.ended_ops} == {""}
    world.assert_quiet()


def test_a_slot_is_not_given_back_before_the_stream_is_idle() -> None:
    world = World()
    begun(world)
    world.decode.streams.is_stuck = True
    peer_is_lost(world, world.decode, world.prefill)
    world.run(lambda: "abort" in world.decode.nccl.calls)
    world.run_for(TIMEOUTS.quarantine_s / 2)
    assert world.decode.outcome("t:0") is None
    assert world.decode.ring.held == 1
    world.decode.streams.is_stuck = False
    world.run(lambda: world.decode.outcome("t:0") is not None, limit_s=0.1)
    assert failed(world.decode) == "the link is down"
    world.fabric.is_held = False
    world.assert_quiet()


@pytest.mark.parametrize("fault", ["is_stuck", "fails"])
def test_a_gpu_that_does_not_come_to_rest_costs_the_slot(fault: str) -> None:
    world = World()
    _, slot = begun(world)
    setattr(world.decode.streams, fault, True)
    peer_is_lost(world, world.decode, world.prefill)
    world.run(lambda: world.decode.outcome("t:0") is not None)
    ended = world.decode.outcome("t:0")
    assert ended is not None
    assert ended.is_lost
    assert world.decode.ring.lost == 1
    assert slot not in world.decode.ring._free
    setattr(world.decode.streams, fault, False)
    world.fabric.is_held = False
    world.run(lambda: world.prefill.outcome("t:0") is not None)
    assert world.move("t:1", 4) == b"\x04" * SLOT_BYTES
    world.assert_quiet()


def test_bytes_that_were_not_gathered_in_time_cost_the_slot() -> None:
    world = World()
    world.prefill.ask(world.decode, "t:0", 1, within_s=2.0, after=FakeEvent(is_set=False))
    world.run(lambda: world.prefill.outcome("t:0") is not None)
    assert world.prefill.ring.lost == 1
    assert world.prefill.nccl.calls == []
    world.assert_quiet()


# -- all of it


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_faults_leaves_nothing_behind_and_brings_no_wrong_byte(seed: int) -> None:
    world, dice = World(decodes=2), random.Random(seed)

    def wire(message: PairMessage) -> list[PairMessage]:
        return dice.choices([[message], [], [message, message]], (90, 5, 5))[0]

    world.wire = wire
    expected: dict[tuple[Process, str], tuple[int, int]] = {}
    for n in range(60):
        decode = dice.choice(world.decodes)
        if world.prefill.ring.free and decode.ring.free:
            op_id, fill = f"t:{n}", dice.randrange(1, 200)
            late = dice.choice((3.0, 30.0))
            world.prefill.ask(decode, op_id, fill, within_s=late)
            expected[decode, op_id] = (decode.ask(world.prefill, op_id, within_s=late), fill)
        process = dice.choice(world.processes)
        if dice.random() < 0.1:
            process.nccl.break_comms(Result.REMOTE_ERROR)
        if dice.random() < 0.05:
            peer = dice.choice(world.decodes) if process is world.prefill else world.prefill
            process.thread.peer_lost(peer.instance_id, "the link is down")
        world.fabric.is_held = dice.random() < 0.2
        for _ in range(dice.randrange(150)):
            before = {p: len(p.ended_ops) for p in world.decodes}
            world.step()
            for target in world.decodes:
                for ended in target.ended_ops[before[target] :]:
                    slot, fill = expected[target, ended.op_id]
                    assert ended.reason or target.bytes_of(slot) == bytes([fill]) * SLOT_BYTES
    world.fabric.is_held = False
    world.wire = lambda message: [message]
    world.assert_quiet()
    assert any(not e.reason for p in world.decodes for e in p.ended_ops)
    assert any(e.reason for p in world.decodes for e in p.ended_ops)
    assert [p.ring.free for p in world.processes] == [SLOTS] * 3
