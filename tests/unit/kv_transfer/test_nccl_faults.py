"""Processes that die, messages that go astray, peers that do not do their part: what NCCL answers
with a hang, on the fake. Each test names its fault, and ends with nothing held: no communicator,
stream, slot or operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv_transfer.nccl.binding import Result
from kv_transfer.nccl.messages import Abort, Clear, Finish, Identify, Offer, Refuse
from kv_transfer.nccl.pair import PairState
from kv_transfer.nccl.pool import PairKey
from tests.unit.kv_transfer.nccl_world import (
    SLOT_BYTES,
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


# -- a process dies


def test_kill_prefill_mid_chunk() -> None:
    world = World()
    begun(world)
    world.kill(world.prefill)
    peer_is_lost(world, world.decode, world.prefill)
    world.run(lambda: over(world), limit_s=1.0)
    assert failed(world.decode) == "the link is down"
    world.assert_quiet()


def test_kill_decode_mid_chunk() -> None:
    world = World()
    begun(world)
    world.kill(world.decode)
    peer_is_lost(world, world.prefill, world.decode)
    world.run(lambda: over(world), limit_s=1.0)
    assert failed(world.prefill) == "the link is down"
    world.assert_quiet()


@pytest.mark.parametrize("dies", ["prefill", "decode"])
@pytest.mark.parametrize("is_reported", [True, False])
def test_kill_a_peer_whose_link_says_nothing(dies: str, is_reported: bool) -> None:
    world = World()
    world.fabric.reports_death = is_reported
    begun(world)
    dead = getattr(world, dies)
    survivor = world.decode if dies == "prefill" else world.prefill
    survivor_op = survivor.slots["t:0"]
    world.kill(dead)
    # The retry waits for a peer that does not come; the operation's own time ends it.
    world.run(lambda: over(world), limit_s=61.0)
    assert failed(survivor)
    assert survivor.nccl.calls.count("abort") >= 1
    assert survivor.ring.held == 0
    assert survivor_op in survivor.ring._free
    world.assert_quiet()


def test_kill_a_peer_while_it_joins() -> None:
    world = World()
    world.fabric.reports_death = False
    world.prefill.ask(world.decode, "t:0", 1, within_s=20.0)
    world.run(lambda: world.prefill.state(world.decode) is PairState.INITIALISING)
    world.kill(world.decode)
    world.run(lambda: over(world))
    assert failed(world.prefill)
    world.assert_quiet()


# -- messages are lost, late or double


@pytest.mark.parametrize("lost", [Identify, Offer, Clear])
def test_a_lost_message_costs_a_communicator_and_no_operation(lost: type[PairMessage]) -> None:
    world = World()
    dropped: list[PairMessage] = []

    def wire(message: PairMessage) -> list[PairMessage]:
        if isinstance(message, lost) and not dropped:
            dropped.append(message)
            return []
        return [message]

    world.wire = wire
    assert world.move("t:0", 0x33) == b"\x33" * SLOT_BYTES
    assert dropped
    assert world.prefill.pool.stats().made == 2
    world.assert_quiet()


def test_a_lost_abort_ends_by_the_deadline() -> None:
    world = World()
    begun(world)
    world.wire = lambda message: [] if isinstance(message, Abort) else [message]
    world.prefill.nccl.break_comms(Result.SYSTEM_ERROR)
    world.run(lambda: "abort" in world.decode.nccl.calls, limit_s=2 * TIMEOUTS.move_floor_s)
    world.fabric.is_held = False
    world.run(lambda: over(world), limit_s=61.0)
    world.assert_quiet()


def test_a_lost_finish_ends_by_the_deadline() -> None:
    world = World()
    world.move("t:0", 1)
    world.wire = lambda message: [] if isinstance(message, Finish) else [message]
    world.assert_quiet()


def test_duplicate_messages() -> None:
    world = World()
    world.wire = lambda message: [message, message]
    for n in range(3):
        assert world.move(f"t:{n}", n + 1) == bytes([n + 1]) * SLOT_BYTES
    assert [p.nccl.calls.count("comm_init") for p in world.processes] == [1, 1]
    assert [p.nccl.calls.count("abort") for p in world.processes] == [0, 0]
    world.assert_quiet()


def test_stale_generation() -> None:
    """Everything the first communicator's ends said is said again during the second's life."""
    world = World()
    said: list[tuple[Process, PairMessage]] = []
    world.fabric.wire_polls = 3

    def record(message: PairMessage) -> list[PairMessage]:
        sender = world.decode if isinstance(message, Clear | Refuse) else world.prefill
        said.append((sender, message))
        return [message]

    world.wire = record
    world.move("t:0", 1)
    world.prefill.nccl.break_comms(Result.SYSTEM_ERROR)
    world.run(lambda: world.prefill.pool.pairs == {} and world.decode.pool.pairs == {})
    world.wire = lambda message: [message]
    old = list(said)
    assert {type(message) for _, message in old} >= {Identify, Offer, Clear, Abort}
    slot = world.decode.ask(world.prefill, "t:1")
    world.prefill.ask(world.decode, "t:1", 2)
    while not over(world, "t:1"):
        for sender, message in old:
            receiver = world.prefill if sender is world.decode else world.decode
            receiver.thread.deliver(receiver.key(sender), message)
        world.step()
    assert world.decode.outcome("t:1") == Ended("t:1", "", False)
    assert world.decode.bytes_of(slot) == b"\x02" * SLOT_BYTES
    assert world.prefill.nccl.calls.count("abort") == 1
    world.assert_quiet()


@pytest.mark.parametrize(
    "message", [Offer(1, "t:0", 8), Clear(1, "t:0"), Abort(1, "no"), Finish(1)]
)
def test_stale_instance_id(message: PairMessage) -> None:
    world = World()
    world.move("t:0", 1)
    for process in world.processes:
        process.thread.deliver(PairKey("a worker of yesterday", 0, process.rank), message)
    world.step()
    assert [p.pool.stats().stale_messages for p in world.processes] == [1, 1]
    assert world.move("t:1", 2) == b"\x02" * SLOT_BYTES
    world.assert_quiet()


def test_a_receiver_that_offers_and_a_sender_that_clears_are_not_heard() -> None:
    world = World()
    world.move("t:0", 1)
    pair = world.prefill.pool.pairs[world.prefill.key(world.decode)]
    for process, message in (
        (world.prefill, Offer(pair.generation, "t:1", SLOT_BYTES)),
        (world.prefill, Identify(pair.generation + 1, b"x" * 128)),
        (world.decode, Clear(pair.generation, "t:1")),
    ):
        peer = world.decode if process is world.prefill else world.prefill
        process.thread.deliver(process.key(peer), message)
    world.run_for(0.2)
    assert world.move("t:1", 2) == b"\x02" * SLOT_BYTES
    world.assert_quiet()


# -- the peer does not do its part


def test_never_cleared_to_send() -> None:
    world = World()
    world.wire = lambda message: [] if isinstance(message, Clear) else [message]
    world.prefill.ask(world.decode, "t:0", 1)
    world.decode.ask(world.prefill, "t:0")
    world.run(lambda: over(world))
    assert "the peer posted nothing" in failed(world.prefill)
    assert failed(world.decode)
    assert "send" not in world.prefill.nccl.calls
    assert world.prefill.pool.stats().made == 2
    world.assert_quiet()


def test_a_peer_that_never_posts() -> None:
    world = World()
    world.prefill.ask(world.decode, "t:0", 1)
    world.run(lambda: world.prefill.outcome("t:0") is not None)
    assert "the peer posted nothing" in failed(world.prefill)
    assert "send" not in world.prefill.nccl.calls
    world.assert_quiet()


def test_a_sender_that_never_comes() -> None:
    world = World()
    world.decode.ask(world.prefill, "t:0", within_s=5.0)
    world.run(lambda: world.decode.outcome("t:0") is not None, limit_s=5.1)
    assert "time was over" in failed(world.decode)
    assert world.decode.nccl.calls == []
    world.assert_quiet()


def test_bytes_that_stop_are_tried_once_more_and_then_given_up() -> None:
    world = World()
    _, slot = begun(world)
    world.run(lambda: over(world), limit_s=3 * TIMEOUTS.move_floor_s)
    assert "no progress" in failed(world.prefill) + failed(world.decode)
    assert [p.nccl.calls.count("comm_init") for p in world.processes] == [2, 2]
    assert world.decode.bytes_of(slot) != b"\x42" * SLOT_BYTES
    world.fabric.is_held = False
    assert world.move("t:1", 9) == b"\x09" * SLOT_BYTES
    world.assert_quiet()


def test_the_second_try_brings_what_the_first_did_not() -> None:
    world = World()
    _, slot = begun(world)
    world.run(lambda: "abort" in world.decode.nccl.calls)
    world.fabric.is_held = False
    world.run(lambda: over(world))
    assert world.decode.outcome("t:0") == Ended("t:0", "", False)
    assert world.decode.bytes_of(slot) == b"\x42" * SLOT_BYTES
    world.assert_quiet()


def test_slow_peer() -> None:
    world = World()
    world.fabric.wire_polls = int(TIMEOUTS.move_floor_s / 0.01 * 0.6)
    assert world.move("t:0", 5) == b"\x05" * SLOT_BYTES
    assert [p.nccl.calls.count("abort") for p in world.processes] == [0, 0]
    world.assert_quiet()


def test_slow_init() -> None:
    world = World()
    world.fabric.init_polls = int(TIMEOUTS.init_s / 0.01 * 0.8)
    assert world.move("t:0", 5) == b"\x05" * SLOT_BYTES
    assert world.prefill.pool.stats().made == 1
    world.assert_quiet()


def test_init_that_does_not_end() -> None:
    world = World()
    world.fabric.init_polls = 10**9
    world.prefill.ask(world.decode, "t:0", 1)
    world.decode.ask(world.prefill, "t:0", within_s=15.0)
    world.run(lambda: over(world))
    assert "initialising" in failed(world.prefill)
    assert failed(world.decode)
    assert world.prefill.pool.stats().made == 2
    world.assert_quiet()
