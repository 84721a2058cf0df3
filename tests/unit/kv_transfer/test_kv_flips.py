"""Flipped bits in transferred KV, over every transport: found, sent again, or named."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kv_transfer.digest import SAMPLED_EVERY, DigestMode
from pdserve.errors import TransferCorrupted
from tests.unit.kv_transfer.caches import geometry
from tests.unit.kv_transfer.flips import FlippingTransport, FlippingWire, Flips
from tests.unit.kv_transfer.rig import (
    FROM,
    TO,
    TOKENS,
    N,
    Rig,
    Worker,
    by_name,
    check_exact,
    settle,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.transport.loopback import LoopbackTransport

TRANSPORTS = ("loopback", "shm", "tcp")
LAST_BYTES = 100
LAST_BIT = 8 * geometry().block_bytes - 1


@pytest.fixture
def flips() -> Flips:
    return Flips()


PairOf = Callable[..., tuple[Worker, Worker]]


@pytest.fixture(params=TRANSPORTS)
def pair_of(
    request: pytest.FixtureRequest, loopback: LoopbackTransport, flips: Flips, clean: None
) -> Iterator[PairOf]:
    """Makes (source, target) whose chunks are one block each; settings are the caller's."""
    inner = by_name(request.param, loopback)
    rig = Rig(lambda: FlippingTransport(inner(), flips))

    def make(**settings: object) -> tuple[Worker, Worker]:
        return rig.pair(chunk_bytes=geometry().block_bytes, **settings)

    yield make
    rig.close()


def transfer(source: Worker, target: Worker) -> None:
    target.start(source, "t", TO, N)
    source.prefill("t", FROM, N)
    until(lambda: target.ended, source, target)
    settle(source, target)


@pytest.mark.parametrize("bit", [0, 7, LAST_BIT])
def test_one_flipped_bit_is_sent_again_and_exact(pair_of: PairOf, flips: Flips, bit: int) -> None:
    source, target = pair_of()
    before = target.cache.blocks()
    flips.left, flips.bit = 1, bit
    transfer(source, target)
    check_exact(source, target, before)
    arrival = target.arrivals["d-t"]
    assert arrival.token_ids == TOKENS
    assert arrival.report.digest_mismatches == target.half.counters.digest_mismatches == 1
    assert arrival.report.blocks == len(TO)
    assert source.sent == ["p-t"]


def test_the_last_block_flipped_behind_done_is_sent_again(pair_of: PairOf, flips: Flips) -> None:
    """The source has said Done when it is asked again, and says it once more."""
    source, target = pair_of()
    before = target.cache.blocks()
    target.start(source, "t", TO, N)
    source.expect("t")
    source.compute("t", FROM[:3], 12)
    until(lambda: flips.seen == 3, target)
    flips.left = 1
    source.compute("t", FROM, N)
    source.finish("t")
    until(lambda: target.ended, source, target)
    settle(source, target)
    check_exact(source, target, before)
    assert target.arrivals["d-t"].report.digest_mismatches == 1


def test_bits_that_flip_each_time_fail_the_transfer_by_its_name(
    pair_of: PairOf, flips: Flips
) -> None:
    source, target = pair_of()
    flips.left = 1000
    transfer(source, target)
    assert target.failed == target.ended == ["d-t"]
    assert target.codes == {"d-t": TransferCorrupted.code}
    assert "came damaged" in target.failures["d-t"]
    assert target.half.counters.digest_mismatches == 2
    assert source.sent == ["p-t"]
    # The link lives, and what comes next over it is whole.
    flips.left = 0
    before = target.cache.blocks()
    target.start(source, "u", TO, N)
    source.prefill("u", FROM, N)
    until(lambda: "d-u" in target.ended, source, target)
    settle(source, target)
    check_exact(source, target, before)
    assert target.failed == ["d-t"]


def test_memory_of_the_source_that_changes_under_its_copy_is_found(
    loopback_rig: Rig, loopback: LoopbackTransport
) -> None:
    source, target = loopback_rig.pair()
    before = target.cache.blocks()
    pushes = []

    def change_once(*push: object) -> None:
        pushes.append(push)
        if len(pushes) == 1:
            source.cache.write(FROM[1], seed=99)

    loopback.on_push = change_once
    transfer(source, target)
    check_exact(source, target, before)
    assert target.arrivals["d-t"].report.digest_mismatches == 1


def test_a_link_that_breaks_while_a_chunk_comes_again_fails_the_transfer(
    loopback_rig: Rig, loopback: LoopbackTransport
) -> None:
    source, target = loopback_rig.pair()
    pushes = []

    def change_and_break(*push: object) -> None:
        pushes.append(push)
        if len(pushes) == 2:
            raise OSError("the link broke")
        source.cache.write(FROM[1], seed=99)

    loopback.on_push = change_and_break
    transfer(source, target)
    assert target.failed == ["d-t"]
    assert target.half.counters.digest_mismatches == 1
    assert source.sent == ["p-t"]


def test_sampled_chunks_are_checked_and_the_others_are_not(pair_of: PairOf, flips: Flips) -> None:
    """Of one chunk in sixteen the first is taken; what comes after damage is always checked."""
    source, target = pair_of(digest=DigestMode.SAMPLED)
    before = target.cache.blocks()
    flips.left = 1
    transfer(source, target)
    check_exact(source, target, before)
    assert len(TO) < SAMPLED_EVERY
    target.start(source, "u", TO, N)
    flips.left = 1
    source.prefill("u", FROM, N)
    until(lambda: "d-u" in target.ended, source, target)
    settle(source, target)
    assert target.arrivals["d-u"].report.digest_mismatches == 0
    assert target.half.counters.digest_mismatches == 1


def test_switched_off_nothing_is_checked(pair_of: PairOf, flips: Flips) -> None:
    source, target = pair_of(digest=DigestMode.OFF)
    flips.left = 1000
    transfer(source, target)
    assert target.failed == []
    assert target.half.counters.digest_mismatches == 0
    assert source.half.counters.digest_s == 0.0


def test_a_target_checks_what_its_source_marked_whatever_its_own_setting(
    pair_of: PairOf, flips: Flips
) -> None:
    source, _ = pair_of()
    _, target = pair_of(digest=DigestMode.OFF)
    before = target.cache.blocks()
    flips.left = 1
    transfer(source, target)
    check_exact(source, target, before)
    assert target.half.counters.digest_mismatches == 1


def over_wire(tcp_rig: Rig, way: str, bit: int) -> dict[str, int]:
    """One transfer over a wire that flips a bit: exact, or failed. Returns what was carried."""
    source, target = tcp_rig.pair(receive_timeout_s=0.5, cancel_timeout_s=0.2)
    before = target.cache.blocks()
    with FlippingWire(source.half.address, way, bit) as wire:
        target.start(wire.address, "t", TO, N, instance_id=source.instance_id)
        source.prefill("t", FROM, N)
        until(lambda: target.ended, source, target)
    if target.failed:
        assert target.arrivals == {}
    else:
        check_exact(source, target, before)
        assert target.arrivals["d-t"].token_ids == TOKENS
    source.close()
    target.close()
    return wire.carried


@pytest.mark.parametrize("way", ["to source", "to target"])
def test_whatever_bit_flips_on_the_wire_what_is_received_is_exact(tcp_rig: Rig, way: str) -> None:
    """In each byte of the last messages, Done among them, and here and there before."""
    said = over_wire(tcp_rig, "", 0)[way]
    rng = random.Random(way)
    tail = range(said - LAST_BYTES, said)
    for byte in (*rng.sample(range(said - LAST_BYTES), 20), *tail):
        over_wire(tcp_rig, way, 8 * byte + rng.randrange(8))
