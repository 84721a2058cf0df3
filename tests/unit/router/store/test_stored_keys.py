"""Idempotency keys that two routers share."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import KeyReused
from router.store.claims import LEASE_S, Claims
from router.store.keys import IdempotencyKeys
from tests.support.timeouts import wait_until

if TYPE_CHECKING:
    from tests.unit.router.conftest import Clock, Open

NAME = ("acme", "key")


@pytest.fixture
def routers(open_database: Open, clock: Clock) -> list[IdempotencyKeys]:
    made = [(open_database(), name) for name in ("a", "b")]
    return [
        IdempotencyKeys(database, Claims(database, name, clock=clock), max_tenant_bytes=100)
        for database, name in made
    ]


async def test_an_answer_of_one_router_is_found_at_the_other(
    routers: list[IdempotencyKeys],
) -> None:
    first, second = routers
    claim = (await first.claim(*NAME, b"body", "r1")).claim
    assert claim
    assert await second.claim(*NAME, b"body", "r2") == ("r1", "", None)
    assert (await second.claim("other", "key", b"body", "r3")).claim
    with pytest.raises(KeyReused):
        await second.claim(*NAME, b"another body", "r2")
    assert await first.finish(claim, b"answer", 60)
    assert await second.claim(*NAME, b"body", "r2") == ("r1", "", b"answer")


async def test_a_key_without_an_answer_is_generated_again(routers: list[IdempotencyKeys]) -> None:
    first, second = routers
    await first.release((await first.claim(*NAME, b"body", "r1")).claim)
    assert (await second.claim(*NAME, b"another body", "r2")).claim


async def test_a_key_whose_client_left_while_it_was_claimed_is_free(
    routers: list[IdempotencyKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = routers
    begun, may_go, now = threading.Event(), threading.Event(), first._database.now

    def wait() -> float:
        begun.set()
        may_go.wait()
        return now()

    monkeypatch.setattr(first._database, "now", wait)
    claiming = asyncio.create_task(first.claim(*NAME, b"body", "r1"))
    await asyncio.to_thread(begun.wait)
    claiming.cancel()
    await asyncio.wait([claiming])
    may_go.set()
    await wait_until(lambda: not first._undoing)
    assert (await second.claim(*NAME, b"body", "r2")).claim


async def test_a_key_of_a_dead_router_is_claimed_after_its_lease(
    routers: list[IdempotencyKeys], clock: Clock
) -> None:
    first, second = routers
    lost = (await first.claim(*NAME, b"body", "r1")).claim
    for _ in range(int(LEASE_S)):
        assert not (await second.claim(*NAME, b"body", "r2")).claim
        clock.now_s += 1
    assert (await second.claim(*NAME, b"body", "r2")).claim
    assert not await first.finish(lost, b"late", 60)


async def test_a_key_that_is_taken_over_is_no_longer_held(
    routers: list[IdempotencyKeys],
) -> None:
    first, second = routers
    old = (await first.claim(*NAME, b"body", "r1")).claim
    assert await first.held([old]) == {old}
    new = (await second.claim(*NAME, b"resumed", "r1", take_over=True)).claim
    assert await first.held([old]) == set()
    assert await first.held([new]) == {new}


async def test_answers_expire_and_a_tenant_keeps_its_newest(
    routers: list[IdempotencyKeys],
) -> None:
    first, second = routers
    for i, lifetime_s in enumerate((60, 61, -1)):
        state = await first.claim("acme", f"key-{i}", b"body", "r1")
        assert await first.finish(state.claim, b"x" * 60, lifetime_s)
    await second.sweep()
    states = [await second.claim("acme", f"key-{i}", b"body", "r2") for i in range(3)]
    assert [bool(state.claim) for state in states] == [True, False, True]
