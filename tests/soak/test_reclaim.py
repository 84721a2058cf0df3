"""Blocks come back when either side gives a transfer up, when its process dies, and when it says
nothing any more. Deadlines that are not what a test is about are an hour away."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.soak.soak_driver import Driver
from tests.soak.soak_peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.soak.soak_driver import Transfer

HOUR_S = 3600.0
PATIENT = {
    "lease_s": HOUR_S,
    "receive_timeout_s": HOUR_S,
    "cancel_timeout_s": HOUR_S,
    "handshake_timeout_s": HOUR_S,
    "send_timeout_s": HOUR_S,
}


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@contextmanager
def pair(transport: str, **settings: float) -> Iterator[tuple[Driver, Peer, Peer]]:
    """(driver, prefill, decode); leaving it asserts that nothing is left of either."""
    values = {**PATIENT, **settings}
    prefill, decode = (Peer(name, (transport,), values, 0.0) for name in ("prefill-0", "decode-0"))
    driver = Driver([prefill], [decode], random.Random(1))
    try:
        driver.begin()
        yield driver, prefill, decode
        for peer in (prefill, decode):
            if peer.is_frozen:
                peer.thaw()
            until(driver, peer, is_clean)
        for peer in (decode, prefill):
            left = driver.ask(peer, "close")
            assert left == {"event": "closed", "threads": [], "descriptors": 0, "shared_memory": 0}
    finally:
        driver.end()


def is_clean(status: dict[str, Any]) -> bool:
    return (
        not (status["in_flight"] or status["leased"] or status["running"])
        and status["free"] == status["total"]
        and status["is_empty"]
        and not status["quarantined"]
    )


def until(driver: Driver, peer: Peer, what: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The peer's status, once `what` holds of it."""
    seen: list[dict[str, Any]] = []

    def look() -> object:
        seen.append(driver.ask(peer))
        return what(seen[-1])

    driver.until(look)
    return seen[-1]


def granted(driver: Driver, prefill: Peer, decode: Peer) -> Transfer:
    """Its decode has reserved blocks that nobody fills; the source knows of the grant."""
    transfer = driver.launch("never prefilled", prefill, decode)
    until(driver, prefill, lambda status: status["transfers"])
    assert driver.ask(decode)["in_flight"]
    return transfer


def held(driver: Driver, prefill: Peer, decode: Peer) -> Transfer:
    """Its blocks wait at the source for a decode that has granted others, and stands still."""
    transfer = granted(driver, prefill, decode)
    decode.freeze()
    driver.prefill_late(transfer)
    # Where the lease is short, a slow driver sees no more than that it is over.
    until(driver, prefill, lambda x: x["leased"] or x["totals"]["expired_leases"])
    return transfer


def test_an_aborted_decode_frees_both_sides(transport: str) -> None:
    with pair(transport) as (driver, prefill, decode):
        transfer = granted(driver, prefill, decode)
        driver.abort(transfer, "decode")
        driver.until(lambda: not transfer.is_open)
        assert transfer.outcome == "failed"


def test_an_aborted_prefill_frees_both_sides(transport: str) -> None:
    with pair(transport) as (driver, prefill, decode):
        transfer = held(driver, prefill, decode)
        driver.abort(transfer, "prefill")
        until(driver, prefill, is_clean)
        decode.thaw()
        driver.until(lambda: not transfer.is_open)


def test_a_prefill_aborted_before_it_began_fails_its_decode(transport: str) -> None:
    with pair(transport) as (driver, prefill, decode):
        transfer = granted(driver, prefill, decode)
        driver.prefill_late(transfer)
        driver.abort(transfer, "prefill")
        driver.until(lambda: not transfer.is_open)


def test_a_prefill_that_nobody_takes_is_freed_by_its_abort(transport: str) -> None:
    with pair(transport) as (driver, prefill, decode):
        transfer = driver.launch("never taken", prefill, decode)
        until(driver, prefill, lambda status: status["leased"])
        driver.abort(transfer, "prefill")
        driver.until(lambda: not transfer.is_open)


def test_a_killed_decode_frees_its_prefill(transport: str) -> None:
    with pair(transport) as (driver, prefill, decode):
        held(driver, prefill, decode)
        driver.kill(decode)
        until(driver, prefill, is_clean)
        driver.until(lambda: decode.address)


def test_a_killed_prefill_frees_its_decode(transport: str) -> None:
    with pair(transport) as (driver, prefill, decode):
        transfer = granted(driver, prefill, decode)
        driver.kill(prefill)
        driver.until(lambda: not transfer.is_open and prefill.address)
        assert transfer.outcome == "failed"
        until(driver, decode, is_clean)


def test_a_decode_that_says_nothing_frees_its_prefill_when_the_lease_ends(transport: str) -> None:
    with pair(transport, lease_s=0.5) as (driver, prefill, decode):
        transfer = held(driver, prefill, decode)
        status = until(driver, prefill, is_clean)
        assert decode.is_frozen
        assert status["totals"]["expired_leases"] == 1
        decode.thaw()
        driver.until(lambda: not transfer.is_open)


def test_a_prefill_that_says_nothing_frees_its_decode_when_time_is_up(transport: str) -> None:
    with pair(transport, receive_timeout_s=3.0, cancel_timeout_s=0.1) as (driver, prefill, decode):
        transfer = granted(driver, prefill, decode)
        prefill.freeze()
        driver.until(lambda: not transfer.is_open)
        assert prefill.is_frozen
        assert transfer.outcome == "failed"
        status = until(driver, decode, is_clean)
        assert status["totals"]["receive_timeouts"] == 1


def test_an_old_life_can_have_nothing_of_the_next(transport: str) -> None:
    """A frozen decode is given up; what it granted is refused by the source that came after."""
    with pair(transport) as (driver, prefill, decode):
        transfer = granted(driver, prefill, decode)
        decode.freeze()
        driver.kill(prefill)
        driver.until(lambda: prefill.address)
        decode.thaw()
        driver.until(lambda: not transfer.is_open)
        assert transfer.outcome == "failed"
