"""Thousands of transfers between processes that are killed, frozen and started again, under
requests that are aborted at any moment: every completed one is right to the byte, and in the end
nothing is pinned, quarantined, open or left."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from kv_transfer.source import MAX_TOMBSTONES
from tests.patience import HUNG_S
from tests.soak.soak_driver import FATES, FROZEN_S, MAX_OPEN, Driver
from tests.soak.soak_peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

TRANSFERS = 2200
KILL_EVERY = 150
FREEZE_EVERY = 110
SEED = 20261121


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Two workers a role; over shm where both can, over tcp else."""
    both, tcp = ("shm", "tcp"), ("tcp",)
    prefills = [Peer("prefill-0", both), Peer("prefill-1", tcp)]
    decodes = [Peer("decode-0", both), Peer("decode-1", both)]
    made = Driver(prefills, decodes, random.Random(SEED))
    try:
        made.begin()
        yield made
    finally:
        made.end()


def storm(driver: Driver, transfers: int) -> None:
    """So many transfers, and all that can happen to them."""
    rng = driver.rng
    for i in range(1, transfers + 1):
        prefills = [x for x in driver.prefills if x.address]
        decodes = [x for x in driver.decodes if x.address]
        (fate,) = rng.choices([*FATES], [*FATES.values()])
        driver.launch(fate, rng.choice(prefills), rng.choice(decodes))
        if i % KILL_EVERY == 0:
            driver.kill(driver.peers[i // KILL_EVERY % 4])
        if i % FREEZE_EVERY == 0:
            driver.freeze(rng.choice(driver.peers), rng.choice(FROZEN_S))
        driver.until(
            lambda: (
                len(driver.transfers) < MAX_OPEN
                and any(x.address for x in driver.prefills)
                and any(x.address for x in driver.decodes)
            )
        )
    driver.until(lambda: not driver.transfers and not any(x.is_frozen for x in driver.peers))
    driver.until(lambda: all(x.address for x in driver.peers))


def all_pairs_serve(driver: Driver) -> None:
    """Each pair moves KV, in the end: whatever happened before has left no trace."""
    for prefill in driver.prefills:
        for decode in driver.decodes:
            for _ in range(20):
                transfer = driver.launch("nothing", prefill, decode)
                driver.until(lambda t=transfer: not t.is_open)  # type: ignore[misc]
                if transfer.outcome == "received":
                    break
            assert transfer.outcome == "received"
            wanted = "shm" if prefill.transports == decode.transports else "tcp"
            assert transfer.transport == wanted


def is_clean(status: dict[str, Any], living: set[str]) -> bool:
    """Nothing is pinned, quarantined or open, every link leads to somebody who lives, and nobody's
    memory is mapped but over a link."""
    pinned = status["in_flight"] + status["leased"] + status["running"]
    assert status["free"] + pinned == status["total"]
    assert status["tombstones"] <= MAX_TOMBSTONES
    links = status["links"]
    peers = [instance_id for _, instance_id, _ in links]
    return (
        not pinned
        and status["is_empty"]
        and not status["transfers"]
        and not status["quarantined"]
        and all(state == "up" for state, _, _ in links)
        and set(peers) <= living
        and len(set(peers)) == len(peers)
        and max(status["mapped_caches"], status["mapped_boards"])
        <= 1 + sum(over == "shm" for _, _, over in links)
    )


def until_clean(driver: Driver, peer: Peer) -> dict[str, Any]:
    living = {x.instance_id for x in driver.peers}
    seen: list[dict[str, Any]] = []

    def look() -> bool:
        seen.append(driver.ask(peer))
        return is_clean(seen[-1], living)

    driver.until(look)
    return seen[-1]


def assert_nothing_is_left(driver: Driver) -> None:
    for peer in (*driver.decodes, *driver.prefills):
        left = driver.ask(peer, "close")
        assert left == {"event": "closed", "threads": [], "descriptors": 0, "shared_memory": 0}


@pytest.mark.timeout(HUNG_S)
def test_no_storm_leaves_a_block_pinned(driver: Driver) -> None:
    storm(driver, TRANSFERS)
    assert driver.tally["over"] == TRANSFERS >= 2000
    all_pairs_serve(driver)
    totals = [until_clean(driver, peer)["totals"] for peer in driver.peers]

    # The storm was one: all of it happened, and some of the transfers went well all the same.
    for fate in FATES:
        assert driver.tally[fate] >= 40, driver.tally
    assert driver.tally["prefill killed"] + driver.tally["decode killed"] == TRANSFERS // KILL_EVERY
    assert driver.tally["frozen"] >= 10
    assert driver.tally["received shm"] >= 100, driver.tally
    assert driver.tally["received tcp"] >= 100, driver.tally
    assert sum(x["refused_capabilities"] for x in totals) > 0
    assert sum(x["expired_leases"] for x in totals) > 0
    assert_nothing_is_left(driver)
