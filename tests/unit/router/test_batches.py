"""Batches on a store of their own: what is refused, answered, ended early and taken over."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ContextLengthExceeded, WorkerFailed
from router.background import background
from router.batch import runner
from router.batch import store as store_module
from router.batch.runner import Answered, BatchRunner
from router.batch.store import OPEN, BatchStore, LeaseLost, Status, StoredResponse
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from router.batch.store import StoredBatch

ENDPOINT = "/v1/completions"
HOUR_S = 3600


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_LOOK_S", 0.01)
    monkeypatch.setattr(runner, "_RENEW_S", 0.01)
    monkeypatch.setattr(runner, "_RETRY_S", (0.01, 0.01))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BatchStore]:
    store = BatchStore(tmp_path / "batches", "router-a")
    yield store
    await store.close()


class Answers:
    """Answers each line with its own prompt, or as `faults` say; `asked` counts."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.faults: dict[str, list[Exception]] = {}
        self.hanging = asyncio.Event()
        self.hang: set[str] = set()

    async def __call__(self, path: str, data: bytes, tenant: str, timeout_s: float) -> Answered:
        assert (path, tenant) == (ENDPOINT, "acme")
        assert 0 < timeout_s <= HOUR_S
        prompt = json.loads(data)["prompt"]
        self.asked[prompt] += 1
        if prompt in self.hang:
            self.hanging.set()
            await asyncio.Event().wait()
        if self.faults.get(prompt):
            raise self.faults[prompt].pop()
        return Answered(f"cmpl-{prompt}", json.dumps({"text": prompt}).encode())


def row(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"prompt": custom_id}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body} | changes


async def create(store: BatchStore, *rows: object, window_s: int = HOUR_S) -> StoredBatch:
    upload = store.upload()
    for each in rows:
        upload.write((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n")
    file = await store.keep(upload, "acme", "in.jsonl", "batch")
    return await store.create(file, ENDPOINT, f"{window_s}s", window_s, {"k": "v"})


async def until(
    store: BatchStore, batch: StoredBatch, what: Callable[[StoredBatch], object]
) -> StoredBatch:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await store.batch(batch.id, "acme")
            assert found is not None
            if what(found):
                return found
            await asyncio.sleep(0.01)


async def ended(store: BatchStore, batch: StoredBatch) -> StoredBatch:
    return await until(store, batch, lambda found: found.status not in OPEN)


@asynccontextmanager
async def running(store: BatchStore, answers: Answers) -> AsyncIterator[None]:
    async with background("batches", BatchRunner(store, answers).run):
        yield


async def rows_of(store: BatchStore, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    file = await store.file(file_id, "acme")
    assert file is not None
    found = [json.loads(line) for line in store.path(file).read_bytes().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


async def test_answers_and_errors_are_in_files_of_their_own(store: BatchStore) -> None:
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


async def test_lines_with_a_prefix_in_common_are_asked_together(store: BatchStore) -> None:
    answers, names = Answers(), ["b 1", "a 1", "b 2", "a 2"]
    batch = await create(store, *map(row, names))
    async with running(store, answers):
        batch = await ended(store, batch)
    assert list(answers.asked) == sorted(names)
    assert list(await rows_of(store, batch.output_file_id)) == names


async def test_an_input_that_is_wrong_is_refused_whole_with_its_lines(store: BatchStore) -> None:
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


async def test_an_empty_input_is_refused(store: BatchStore) -> None:
    batch = await create(store)
    async with running(store, Answers()):
        batch = await ended(store, batch)
    assert [problem["message"] for problem in batch.errors] == ["the file has no lines"]


@pytest.mark.parametrize(
    ("window_s", "status", "code"),
    [(HOUR_S, "cancelled", "batch_cancelled"), (0, "expired", "batch_expired")],
)
async def test_what_ends_early_keeps_its_answers_and_names_the_other_lines(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, window_s: int, status: str, code: str
) -> None:
    answers = Answers()
    answers.hang = {"b"}
    batch = await create(store, row("a"), row("b"), window_s=window_s or HOUR_S)
    async with running(store, answers):
        await asyncio.wait_for(answers.hanging.wait(), WAIT_S)
        await until(store, batch, lambda found: found.completed)
        if window_s:
            await store.cancel(batch)
        else:
            now = runner.time.time
            monkeypatch.setattr(runner.time, "time", lambda: now() + 2 * HOUR_S)
        batch = await ended(store, batch)
    assert batch.status == status
    assert set(await rows_of(store, batch.output_file_id)) == {"a"}
    assert (await rows_of(store, batch.error_file_id))["b"]["error"]["code"] == code


async def test_a_batch_whose_lease_ran_out_goes_on_at_another_router(
    store: BatchStore, tmp_path: Path
) -> None:
    batch = await create(store, row("a"), row("b"))
    claimed = await store.claim(0.0)
    assert claimed is not None
    first = [runner.Line(1, "a", b'{"prompt": "a"}'), runner.Line(2, "b", b'{"prompt": "b"}')]
    await store.start(batch.id, first)
    await store.answer(batch.id, 1, b'{"custom_id": "a", "by": "router-a"}', succeeded=True)
    other, answers = BatchStore(tmp_path / "batches", "router-b"), Answers()
    try:
        async with running(other, answers):
            batch = await ended(store, batch)
    finally:
        await other.close()
    assert answers.asked == {"b": 1}
    output = await rows_of(store, batch.output_file_id)
    assert output["a"]["by"] == "router-a"
    assert batch.completed == 2
    with pytest.raises(LeaseLost):
        await store.answer(batch.id, 2, b"{}", succeeded=True)


async def test_tenants_do_not_see_each_other(store: BatchStore) -> None:
    batch = await create(store, row("a"))
    assert await store.batch(batch.id, "other") is None
    assert await store.file(batch.input_file_id, "other") is None
    assert (await store.files("other"), await store.batches("other")) == ([], [])


async def test_stored_responses_are_of_one_tenant_and_the_oldest_go(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 2)
    now = int(time.time())
    for name in "abc":
        await store.keep_response(StoredResponse(name, "t", now, b"{}", b"[]"))
    found = [await store.response(name, "t") for name in "abc"]
    assert [x.id for x in found if x is not None] == ["b", "c"]
    await store.keep_response(StoredResponse("c", "u", now, b"other", b"[]"))
    assert await store.response("c", "t") == StoredResponse("c", "t", now, b"{}", b"[]")
    old = StoredResponse("old", "t", now - store_module.RESPONSE_S - 1, b"{}", b"[]")
    await store.keep_response(old)
    assert await store.response("old", "t") is None
