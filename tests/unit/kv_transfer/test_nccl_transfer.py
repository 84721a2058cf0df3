"""Two processes' NCCL threads over a fake NCCL, when nothing goes wrong."""

from __future__ import annotations

import pytest

from kv_transfer.nccl.binding import CommConfig
from kv_transfer.nccl.pair import PairState
from kv_transfer.nccl.pool import CHANNEL_BYTES, PoolLimits
from tests.unit.kv_transfer.fake_nccl import FakeEvent
from tests.unit.kv_transfer.nccl_world import SLOT_BYTES, TIMEOUTS, Ended, World


def test_bytes_arrive_over_a_communicator_made_on_demand() -> None:
    world = World()
    assert world.prefill.nccl.calls == []
    assert world.move("t:0", 0x5A) == b"\x5a" * SLOT_BYTES
    assert world.prefill.state(world.decode) is PairState.READY
    world.assert_quiet()


def test_one_communicator_serves_many_operations() -> None:
    world = World()
    for n in range(8):
        assert world.move(f"t:{n}", n + 1) == bytes([n + 1]) * SLOT_BYTES
    assert world.prefill.nccl.calls.count("comm_init") == 1
    world.assert_quiet()


def test_queued_operations_keep_their_order_and_one_is_in_flight() -> None:
    world = World()
    slots = {}
    for n in range(4):
        world.prefill.ask(world.decode, f"t:{n}", n + 1)
    for n in (2, 0, 3, 1):
        slots[n] = world.decode.ask(world.prefill, f"t:{n}")
    world.run(lambda: len(world.decode.ended_ops) == 4)
    assert [ended.op_id for ended in world.decode.ended_ops] == ["t:0", "t:1", "t:2", "t:3"]
    for n, slot in slots.items():
        assert world.decode.bytes_of(slot) == bytes([n + 1]) * SLOT_BYTES
    world.assert_quiet()


def test_nothing_is_posted_before_the_other_end_posts_too() -> None:
    world = World()
    world.prefill.ask(world.decode, "t:0", 1)
    world.run(lambda: world.prefill.state(world.decode) is PairState.BUSY)
    world.run_for(TIMEOUTS.offer_s / 2)
    assert "send" not in world.prefill.nccl.calls
    assert "recv" not in world.decode.nccl.calls
    world.decode.ask(world.prefill, "t:0")
    world.run(lambda: world.decode.outcome("t:0") == Ended("t:0", "", False))
    world.assert_quiet()


def test_bytes_that_are_still_being_gathered_are_not_offered() -> None:
    world = World()
    gathered = FakeEvent(is_set=False)
    sent = world.prefill.ask(world.decode, "t:0", 0xDD, after=gathered)
    slot = world.decode.ask(world.prefill, "t:0")
    world.run_for(TIMEOUTS.init_s)
    assert world.prefill.nccl.calls == []
    start = sent * SLOT_BYTES
    world.prefill.memory[start : start + SLOT_BYTES] = [0x11] * SLOT_BYTES
    gathered.is_set = True
    world.run(lambda: world.decode.outcome("t:0") is not None)
    assert world.decode.bytes_of(slot) == b"\x11" * SLOT_BYTES
    world.assert_quiet()


def test_thread_blocks_are_limited_for_each_communicator() -> None:
    world = World(limits=PoolLimits(config=CommConfig(1, 2), timeouts=TIMEOUTS))
    world.move("t:0", 1)
    assert world.prefill.nccl.configs == world.decode.nccl.configs == [CommConfig(1, 2)]


def test_an_unused_communicator_ends_in_order() -> None:
    world = World()
    world.move("t:0", 1)
    world.run(lambda: world.prefill.pool.pairs == {} and world.decode.pool.pairs == {})
    assert "abort" not in world.prefill.nccl.calls + world.decode.nccl.calls
    assert world.prefill.nccl.calls.count("destroy") == 1
    world.assert_quiet()


def small(pairs: int, max_busy: int = 4) -> PoolLimits:
    """Room for so many senders; receivers have one peer and need less than theirs."""
    config = CommConfig(1, 1)
    budget = max(pairs * CHANNEL_BYTES[0], CHANNEL_BYTES[1])
    return PoolLimits(budget, max_busy, config, TIMEOUTS)


def test_the_budget_is_kept_by_ending_what_was_used_longest_ago() -> None:
    world = World(limits=small(5), decodes=6)
    for n in (0, 1, 2, 3, 4, 0):
        world.move(f"a:{n}:{world.now}", 1, world.decodes[n])
    world.move("b", 7, world.decodes[5])
    held = {n for n in range(6) if world.prefill.state(world.decodes[n]) is PairState.READY}
    assert held == {0, 2, 3, 4, 5}
    stats = world.prefill.pool.stats()
    assert (stats.evicted, stats.made, stats.communicators, stats.aborted) == (1, 6, 5, 0)
    assert stats.reserved_bytes == stats.budget_bytes == 5 * CHANNEL_BYTES[0]
    world.assert_quiet()


def test_a_communicator_in_use_is_not_ended_for_another() -> None:
    world = World(limits=small(5), decodes=6)
    for n in range(4):
        world.move(f"a:{n}", 1, world.decodes[n])
    world.fabric.is_held = True
    for n in (0, 1, 2):  # in flight, or waiting for their peer
        world.prefill.ask(world.decodes[n], f"b:{n}", 1)
        world.decodes[n].ask(world.prefill, f"b:{n}")
    world.run_for(TIMEOUTS.move_floor_s / 4)
    world.prefill.ask(world.decodes[5], "c", 1)
    world.run_for(TIMEOUTS.move_floor_s / 4)
    assert [world.prefill.state(world.decodes[n]) for n in range(3)] == [PairState.BUSY] * 3
    world.fabric.is_held = False
    world.run(lambda: len([e for e in world.prefill.ended_ops if e.op_id.startswith("b")]) == 3)
    assert {e.reason for e in world.prefill.ended_ops} == {""}
    assert world.prefill.pool.stats().evicted == 0
    world.decodes[5].ask(world.prefill, "c")
    world.run(lambda: world.prefill.outcome("c") is not None)
    world.assert_quiet()


def test_only_so_many_operations_are_in_flight() -> None:
    world = World(limits=small(5, max_busy=2), decodes=3)
    world.fabric.is_held = True
    for decode in world.decodes:
        world.prefill.ask(decode, f"t:{decode.gpu}", 1)
        decode.ask(world.prefill, f"t:{decode.gpu}")
    world.run(lambda: world.prefill.pool.busy == 2)
    world.run_for(TIMEOUTS.move_floor_s / 2)
    assert world.prefill.nccl.calls.count("send") == 2
    world.fabric.is_held = False
    world.run(lambda: len(world.prefill.ended_ops) == 3)
    assert {e.reason for e in world.prefill.ended_ops} == {""}
    world.assert_quiet()


@pytest.mark.parametrize(
    ("limits", "field"),
    [({"budget_bytes": 1 << 20}, "budget_bytes"), ({"max_busy": 0}, "max_busy")],
)
def test_limits_that_allow_nothing_are_refused(limits: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        PoolLimits(**limits)  # type: ignore[arg-type]
