"""Batches on a store of their own: what is refused, answered, ended early and taken over."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest
from sqlalchemy import func, select

from pdserve.background import background
from pdserve.config import QuotaConfig, StoreConfig
from pdserve.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    ParserFailed,
    QuotaExceeded,
    WorkerFailed,
)
from router.api.answer_sinks import AnsweredLine
from router.api.batch import runner
from router.api.batch.runner import BatchLimits, BatchRunner
from router.store.batches import OPEN, BatchStore, ClaimLost, Status
from router.store.database import StoreUnavailable
from router.store.schema import lines
from router.store.store import make_store
from tests.support.postgres import needs_postgres, running_postgres
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from router.store.batches import StoredBatch
    from router.store.store import Store
    from tests.unit.router.conftest import Clock, OpenStore

ENDPOINT = "/v1/completions"
HOUR_S = 3600
MAX_LINE_BYTES = 1024
LIMITS = BatchLimits(look_s=0.01, retry_min_s=0.01, retry_max_s=0.01)


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    return open_store()


class Answers:
    """Answers each line with its own prompt, or as `faults` say; `asked` counts."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.faults: dict[str, list[Exception]] = {}
        self.hanging = asyncio.Event()
        self.hang: set[str] = set()
        self.goes_on = asyncio.Event()

    async def __call__(self, path: str, data: bytes, tenant: str, timeout_s: float) -> AnsweredLine:
        assert path == ENDPOINT
        assert 0 < timeout_s <= HOUR_S
        prompt = json.loads(data)["prompt"]
        self.asked[prompt] += 1
        if prompt in self.hang:
            self.hanging.set()
            await self.goes_on.wait()
        if self.faults.get(prompt):
            raise self.faults[prompt].pop()
        return AnsweredLine(f"cmpl-{prompt}", json.dumps({"text": prompt}).encode())


def row(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"prompt": custom_id}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body} | changes


async def create(
    store: Store, *rows: object, window_s: int = HOUR_S, tenant: str = "acme"
) -> StoredBatch:
    upload = await store.files.upload(tenant)
    for each in rows:
        await upload.write((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n")
    file = await store.files.keep(upload, tenant, "in.jsonl")
    return await store.batches.create(file, ENDPOINT, f"{window_s}s", window_s, {"k": "v"})


async def until(
    store: Store, batch: StoredBatch, what: Callable[[StoredBatch], object]
) -> StoredBatch:

    async def look() -> StoredBatch | None:
        found = await store.batches.batch(batch.id, batch.tenant)
        assert found is not None
        return found if what(found) else None

    found = await wait_until(look)
    assert found is not None
    return found


async def ended(store: Store, batch: StoredBatch) -> StoredBatch:
    return await until(store, batch, lambda found: found.status not in OPEN)


@asynccontextmanager
async def running(
    store: Store, answers: Answers, limits: BatchLimits = LIMITS
) -> AsyncIterator[None]:
    batches = BatchRunner(
        store.files, store.batches, answers, max_line_bytes=MAX_LINE_BYTES, limits=limits
    )
    async with background("batches", batches.run):
        yield


async def rows_of(store: Store, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    file = await store.files.file(file_id, "acme")
    assert file is not None
    data = b"".join([chunk async for chunk in store.files.chunks(file)])
    found = [json.loads(line) for line in data.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


async def test_answers_and_errors_are_in_files_of_their_own(store: Store) -> None:
    answers = Answers()
    answers.faults = {"b": [WorkerFailed("gone")] * 2, "c": [ContextLengthExceeded("too long")]}
    batch = await create(store, row("a"), row("b"), row("c"))
    async with running(store, answers):
        batch = await ended(store, batch)
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 3, 2, 1)
    output = await rows_of(store, batch.output_file_id)
    assert {k: v["response"]["body"] for k, v in output.items()} == {
        "a": {"text": "a"},
        "b": {"text": "b"},
    }
    response = (await rows_of(store, batch.error_file_id))["c"]["response"]
    assert response["status_code"] == 400
    assert response["body"]["error"]["code"] == "context_length_exceeded"
    assert answers.asked == {"a": 1, "b": 3, "c": 1}


async def test_a_line_that_always_fails_is_given_up_and_one_that_waits_for_room_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "wait_s", lambda _: 0.0)
    answers = Answers()
    answers.faults = {"bug": [ParserFailed("stuck")] * 50, "busy": [Overloaded("full")] * 9}
    batch = await create(store, row("bug"), row("busy"))
    async with running(store, answers):
        batch = await ended(store, batch)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 1, 1)
    assert answers.asked == {"bug": 5, "busy": 10}
    error = (await rows_of(store, batch.error_file_id))["bug"]["response"]["body"]["error"]
    assert (error["type"], error["code"]) == ("server_error", "parser_failed")


async def test_lines_with_a_prefix_in_common_are_asked_together(store: Store) -> None:
    answers, names = Answers(), ["b 1", "a 1", "b 2", "a 2"]
    batch = await create(store, *map(row, names))
    async with running(store, answers):
        batch = await ended(store, batch)
    assert list(answers.asked) == sorted(names)
    assert list(await rows_of(store, batch.output_file_id)) == names


async def test_an_invalid_input_is_refused_as_a_whole_with_its_lines(store: Store) -> None:
    wrong = (
        *(row("a"), row("a"), b"no json", row("b", url="/v1/other"), row("c", method="GET")),
        *(row("d", body=[]), row("")),
    )
    batch = await create(store, *wrong)
    async with running(store, Answers()):
        batch = await ended(store, batch)
    assert batch.status is Status.FAILED
    found = [(problem["line"], problem["param"]) for problem in batch.errors]
    assert found == [
        *((2, "custom_id"), (3, None), (4, "url"), (5, "method"), (6, None), (7, "custom_id"))
    ]


async def test_a_line_larger_than_a_body_is_refused_and_those_after_it_are_read(
    store: Store,
) -> None:
    large = row("b", body={"a": [{}] * MAX_LINE_BYTES})
    batch = await create(store, row("a"), large, row("c", method="GET"))
    async with running(store, Answers()):
        batch = await ended(store, batch)
    assert [(x["line"], x["message"]) for x in batch.errors] == [
        (2, f"the line is larger than {MAX_LINE_BYTES} bytes"),
        (3, "'method' must be POST"),
    ]


async def test_an_empty_input_is_refused(store: Store) -> None:
    batch = await create(store)
    async with running(store, Answers()):
        batch = await ended(store, batch)
    assert [problem["message"] for problem in batch.errors] == ["the file has no lines"]


@pytest.mark.parametrize(
    ("window_s", "status", "code"),
    [(HOUR_S, "cancelled", "batch_cancelled"), (0, "expired", "batch_expired")],
)
async def test_a_batch_that_ends_early_keeps_answers_and_lists_other_lines(
    store: Store, monkeypatch: pytest.MonkeyPatch, window_s: int, status: str, code: str
) -> None:
    answers = Answers()
    answers.hang = {"b"}
    batch = await create(store, row("a"), row("b"), window_s=window_s or HOUR_S)
    async with running(store, answers):
        await asyncio.wait_for(answers.hanging.wait(), WAIT_S)
        await until(store, batch, lambda found: found.completed)
        if window_s:
            await store.batches.cancel(batch)
        else:
            now = store.database.now
            monkeypatch.setattr(store.database, "now", lambda: now() + 2 * HOUR_S)
        batch = await ended(store, batch)
    assert batch.status == status
    assert set(await rows_of(store, batch.output_file_id)) == {"a"}
    assert (await rows_of(store, batch.error_file_id))["b"]["error"]["code"] == code


async def test_a_batch_of_a_dead_router_continues_at_another(
    store: Store, open_store: OpenStore, clock: Clock
) -> None:
    batch = await create(store, row("a"), row("b"))
    assert await store.batches.claim({}, 1) is not None
    first = [runner.Line(1, "a", b'{"prompt": "a"}'), runner.Line(2, "b", b'{"prompt": "b"}')]
    await store.batches.start(batch.id, first)
    own = b'{"custom_id": "a", "by": "router-a"}'
    await store.batches.answer(batch.id, 1, own, succeeded=True)
    other, answers = open_store("router-b"), Answers()
    clock.step_s = 1.0
    other.claims._clock = clock
    async with running(other, answers):
        batch = await ended(store, batch)
    assert answers.asked == {"b": 1}
    output = await rows_of(store, batch.output_file_id)
    assert output["a"]["by"] == "router-a"
    assert batch.completed == 2
    with pytest.raises(ClaimLost):
        await store.batches.answer(batch.id, 2, b"{}", succeeded=True)


async def test_tenants_do_not_see_each_other(store: Store) -> None:
    batch = await create(store, row("a"))
    assert await store.batches.batch(batch.id, "other") is None
    assert await store.files.file(batch.input_file_id, "other") is None
    assert await store.files.files("other", None, 10, None) == ([], False)
    assert await store.batches.batches("other", None, 10) == ([], False)


async def test_a_tenant_with_many_batches_does_not_keep_others_waiting(store: Store) -> None:
    """The lines of the first tenant never end."""
    answers = Answers()
    for i in range(3 * runner._BATCHES):
        await create(store, *(row(f"{i}-{j}") for j in range(3)))
        answers.faults |= {f"{i}-{j}": [Overloaded("full")] * 1000 for j in range(3)}
    batch = await create(store, row("a"), tenant="other")
    async with running(store, answers, replace(LIMITS, lines=2)):
        assert (await ended(store, batch)).completed == 1


async def test_errors_of_the_store_neither_lose_nor_repeat_what_is_under_way(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call fails at first; later its result is lost after the commit."""
    answers, seen = Answers(), Counter[str]()
    call = store.database._call

    def failing(work: Callable[..., object], *, is_write: bool) -> object:
        seen[work.__qualname__] += 1
        if seen[work.__qualname__] == 1:
            raise StoreUnavailable("away")
        result = call(work, is_write=is_write)
        if seen[work.__qualname__] == 2 and is_write:
            raise StoreUnavailable("cut off", may_be_done=True)
        return result

    batch = await create(store, *map(row, "abcdef"))
    monkeypatch.setattr(store.database, "_call", failing)
    async with running(store, answers):
        await wait_until(lambda: _has_ended(store, batch))
    monkeypatch.undo()
    batch = await ended(store, batch)
    assert (batch.status, batch.total, batch.completed) == ("completed", 6, 6)
    assert set(answers.asked.values()) == {1}
    assert list(await rows_of(store, batch.output_file_id)) == list("abcdef")


@needs_postgres
async def test_a_batch_survives_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    with running_postgres() as server:
        config = StoreConfig(database=server.new_database(), files=str(tmp_path))
        store, answers = make_store(config, tmp_path, "router"), Answers()
        answers.hang = {"b"}
        batch = await create(store, row("a"), row("b"), row("c"))
        async with running(store, answers):
            await asyncio.wait_for(answers.hanging.wait(), WAIT_S)
            await until(store, batch, lambda found: found.completed == 2)
            await asyncio.to_thread(server.stop)
            answers.goes_on.set()
            with pytest.raises(StoreUnavailable):
                await store.batches.batch(batch.id, "acme")
            await asyncio.to_thread(server.start)
            batch = await ended(store, batch)
        assert answers.asked == {"a": 1, "b": 1, "c": 1}
        assert list(await rows_of(store, batch.output_file_id)) == ["a", "b", "c"]
        await store.files.close()
        await store.database.close()


async def _has_ended(store: Store, batch: StoredBatch) -> bool:
    try:
        found = await store.batches.batch(batch.id, batch.tenant)
    except StoreUnavailable:
        return False
    return found is not None and found.status not in OPEN


async def test_lines_go_when_their_files_are_durable(store: Store) -> None:
    batch = await create(store, row("a"), row("b"))
    count = select(func.count()).select_from(lines)
    async with running(store, Answers()):
        await ended(store, batch)
        await wait_until(lambda: store.database.read(lambda db: not db.scalar(count)))


async def test_a_killed_router_leaves_lines_to_the_sweeper(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await create(store, row("a"))
    monkeypatch.setattr(BatchStore, "_drop_lines", AsyncMock())
    async with running(store, Answers()):
        batch = await ended(store, batch)
    monkeypatch.undo()
    count = select(func.count()).select_from(lines)
    assert await store.database.read(lambda db: db.scalar(count)) == 1
    await store.batches.sweep()
    assert await store.database.read(lambda db: db.scalar(count)) == 0
    assert (await store.batches.batches("acme", None, 10))[0] == [batch]


async def test_quotas_name_limit_and_usage(open_store: OpenStore) -> None:
    store = open_store(quotas=QuotaConfig(files=4, batches=3, batch_lines=5, files_mib=1))
    await create(store, row("a"), row("b"))
    await create(store, row("a"), row("b"))
    with pytest.raises(QuotaExceeded, match="have 4 lines and the file 2; the limit is 5"):
        await create(store, row("a"), row("b"))
    await create(store, row("a"), tenant="other")
    await create(store, row("a"))
    with pytest.raises(QuotaExceeded, match="has 4 files; the limit is 4"):
        await create(store, row("a"))
    upload = await store.files.upload("third")
    with pytest.raises(QuotaExceeded, match="may have 1048576 bytes more"):
        await upload.write(bytes((1 << 20) + 1))
    upload.discard()
    files, _ = await store.files.files("acme", None, 1, None)
    with pytest.raises(QuotaExceeded, match="has 3 batches; the limit is 3"):
        await store.batches.create(files[0], ENDPOINT, "1h", HOUR_S, {})


async def test_batches_go_some_time_after_their_end(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    batch = await create(store, row("a"))
    async with running(store, Answers()):
        await ended(store, batch)
    now = store.database.now
    for days, left in ((29, 1), (31, 0)):
        monkeypatch.setattr(store.database, "now", lambda days=days: now() + days * 24 * HOUR_S)
        await store.batches.sweep()
        found, _ = await store.batches.batches("acme", None, 10)
        assert len(found) == left


async def test_lists_are_paged(store: Store) -> None:
    made = {(await create(store, row("a"))).id for _ in range(5)}
    seen: list[str] = []
    has_more = True
    while has_more:
        page, has_more = await store.batches.batches("acme", seen[-1] if seen else None, 2)
        seen += [batch.id for batch in page]
    assert (len(seen), set(seen)) == (5, made)
    with pytest.raises(InvalidRequest):
        await store.batches.batches("acme", "unknown", 2)
