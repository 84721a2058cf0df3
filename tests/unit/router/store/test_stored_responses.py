"""Stored responses: each keeps its own items, and what goes when there are too many."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pdserve.config import QuotaConfig
from pdserve.errors import InvalidRequest, QuotaExceeded
from router.store import responses
from router.store.responses import NewResponse

if TYPE_CHECKING:
    from router.store.store import Store
    from tests.unit.router.conftest import OpenStore

DAY_S = 86_400


async def keep(store: Store, name: str, previous: str | None = None, size: int = 1) -> None:
    body = json.dumps({"id": name, "output": [{"text": f"to {name}"}]}).encode()
    items = json.dumps([{"content": name * size}]).encode()
    await store.responses.keep(NewResponse(name, "acme", body, items, previous))


async def items(store: Store, name: str) -> list[str] | None:
    found = await store.responses.items(name, "acme")
    return None if found is None else [next(iter(x.values())) for x in json.loads(found[0])]


async def test_a_conversation_is_read_from_its_beginning(open_store: OpenStore) -> None:
    store = open_store()
    await keep(store, "a")
    await keep(store, "b", "a")
    await keep(store, "c", "a")
    await keep(store, "d", "c")
    assert await items(store, "d") == ["a", "to a", "c", "to c", "d", "to d"]
    assert await items(store, "b") == ["a", "to a", "b", "to b"]
    assert await store.responses.items("a", "other") is None
    assert (await store.responses.items("d", "acme") or ("", ""))[1] == "a"
    assert json.loads(await store.responses.body("d", "acme") or b"")["id"] == "d"


async def test_a_long_conversation_is_stored_once(open_store: OpenStore) -> None:
    """Ten requests of 10 kB each take 100 kB, not the sum of all conversations."""
    store = open_store(quotas=QuotaConfig(responses_mib=1))
    for i in range(10):
        await keep(store, f"{i}", f"{i - 1}" if i else None, size=10_000)
    rows = responses.select(responses.responses.c.bytes)
    sizes = await store.database.read(lambda db: db.scalars(rows).all())
    assert sum(sizes) < 110_000


async def test_a_conversation_whose_beginning_was_deleted_is_not_continued(
    open_store: OpenStore,
) -> None:
    store = open_store()
    await keep(store, "a")
    await keep(store, "b", "a")
    assert await store.responses.delete("a", "acme")
    assert not await store.responses.delete("a", "acme")
    with pytest.raises(InvalidRequest, match="was deleted"):
        await items(store, "b")
    await keep(store, "b")
    assert await items(store, "b") == ["b", "to b"]


async def test_conversations_that_continue_themselves_or_are_too_long_are_refused(
    open_store: OpenStore,
) -> None:
    store = open_store()
    await keep(store, "a")
    await keep(store, "b", "a")
    await keep(store, "a", "b")
    with pytest.raises(InvalidRequest, match="1001 responses"):
        await items(store, "b")
    most = responses.MAX_CONVERSATION_BYTES
    await keep(store, "c", size=most)
    with pytest.raises(InvalidRequest, match=f"the limits are 1000 and {most}"):
        await items(store, "c")


async def test_the_conversation_that_was_not_used_for_longest_goes_first(
    open_store: OpenStore,
) -> None:
    store = open_store(quotas=QuotaConfig(responses=3))
    for name, previous in (("a", None), ("b", None), ("a2", "a"), ("c", None)):
        await keep(store, name, previous)
    assert [bool(await items(store, name)) for name in ("a", "b", "a2", "c")] == [1, 0, 1, 1]
    await keep(store, "a3", "a2")
    assert await items(store, "c") is None
    with pytest.raises(QuotaExceeded, match="has 4 responses"):
        await keep(store, "a4", "a3")
    assert await items(store, "a3") is not None


async def test_conversations_expire_after_their_last_use(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    now = store.database.now
    await keep(store, "a")
    await keep(store, "b")
    monkeypatch.setattr(store.database, "now", lambda: now() + 20 * DAY_S)
    await keep(store, "a2", "a")
    monkeypatch.setattr(store.database, "now", lambda: now() + 40 * DAY_S)
    await store.responses.sweep()
    assert [bool(await items(store, name)) for name in ("a2", "b")] == [True, False]
