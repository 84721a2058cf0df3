"""When a router counts as dead to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.store.claims import LEASE_S, Claims
from tests.unit.router.conftest import beat

if TYPE_CHECKING:
    from tests.unit.router.conftest import Clock, Open


async def test_a_router_that_renews_lives_and_one_that_does_not_is_dead_after_a_lease(
    open_database: Open, clock: Clock
) -> None:
    database = open_database()
    first, second = Claims(database, "a", clock=clock), Claims(database, "b", clock=clock)
    for _ in range(3 * int(LEASE_S)):
        await beat(first)
        assert not await database.read(lambda db: second.is_dead(db, "a"))
        clock.now_s += 1
    for _ in range(int(LEASE_S) - 1):
        assert not await database.read(lambda db: second.is_dead(db, "a"))
        clock.now_s += 1
    assert await database.read(lambda db: second.is_dead(db, "a"))
    await beat(first)
    assert not await database.read(lambda db: second.is_dead(db, "a"))


async def test_a_blocked_event_loop_ends_no_lease(open_database: Open, clock: Clock) -> None:
    database = open_database()
    first, second = Claims(database, "a", clock=clock), Claims(database, "b", clock=clock)
    await beat(first)
    for _ in range(2):
        assert not await database.read(lambda db: second.is_dead(db, "a"))
        clock.now_s += 3600
