"""A request with an idempotency key is answered once, however often it comes."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve.background import background
from pdserve.errors import Conflict, KeyReused, Overloaded, TransferFailed, Unavailable
from router.api import idempotency
from router.api.answer_sinks import DeltaEncoder
from router.api.idempotency import StoredAnswers
from router.api.open_requests import OpenRequests
from router.api.stored_responses import ResponseApi
from router.attempt.answer import AnswerDelta
from router.dialects.openai_writer import AnswerForm, WholeAnswer
from router.store.claims import Claims
from router.store.database import Database, StoreUnavailable
from router.store.keys import IdempotencyKeys
from tests.support.router_apis import ANSWER, CHAT, COMPLETIONS, MODEL, chat, completion
from tests.support.timeouts import WAIT_S, skip, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection
    from pathlib import Path

    from router.api.idempotency import Generate, Name, Recorded
    from tests.support.router_apis import RouterApis

KEY = {"idempotency-key": "k"}


async def post(
    apis: RouterApis, body: object, path: str = CHAT
) -> tuple[int, bytes, str | None, str]:
    async with apis.session.post(apis.url + path, json=body, headers=KEY) as response:
        replayed = response.headers.get("idempotent-replayed")
        request_id = response.headers.get("x-request-id", "")
        return response.status, await response.read(), replayed, request_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_gets_the_same_answer(apis: RouterApis, stream: bool) -> None:
    body = chat(stream=stream)
    status, answer, replayed, request_id = await post(apis, body)
    assert (status, replayed) == (200, None)
    assert await post(apis, body) == (200, answer, "true", request_id)
    assert len(apis.generator.requests) == 1
    if stream:
        assert answer.endswith(b"data: [DONE]\n\n")
    # Without the key it is another request.
    assert (await apis.post(CHAT, chat()))[0] == 200
    assert len(apis.generator.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_repeated_while_it_is_answered_joins_it(
    apis: RouterApis, stream: bool
) -> None:
    go = asyncio.Event()
    apis.generator.script = (ANSWER[0], go, *ANSWER[1:])
    first = asyncio.create_task(post(apis, chat(stream=stream)))
    await apis.generator.waiting.wait()
    second = asyncio.create_task(post(apis, chat(stream=stream)))
    go.set()
    assert (await first)[1] == (await second)[1]
    assert len(apis.generator.requests) == 1


async def test_the_answer_is_there_though_its_client_has_left(apis: RouterApis) -> None:
    go = asyncio.Event()
    apis.generator.script = (ANSWER[0], go, *ANSWER[1:])
    first = asyncio.create_task(post(apis, chat()))
    await apis.generator.waiting.wait()
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(post(apis, chat()))
    go.set()
    status, _, replayed, _ = await second
    assert (status, replayed) == (200, "true")
    assert len(apis.generator.requests) == 1


async def test_another_request_with_the_key_is_refused(apis: RouterApis) -> None:
    assert (await post(apis, chat()))[0] == 200
    for body, path in ((chat(n=2), CHAT), (completion(), COMPLETIONS)):
        status, answer, *_ = await post(apis, body, path)
        assert status == 422
        assert b'"code":"idempotency_key_reused"' in answer


async def test_a_failure_is_not_kept(apis: RouterApis) -> None:
    for error, body in (
        (Overloaded("later"), chat()),
        (TransferFailed("lost"), chat(stream=True)),
    ):
        apis.generator.script = (ANSWER[0], error) if body.get("stream") else (error,)
        _, answer, *_ = await post(apis, body)
        assert error.code.encode() in answer
        apis.generator.script = ANSWER
        status, _, replayed, _ = await post(apis, body)
        assert (status, replayed) == (200, None)
        KEY["idempotency-key"] += "x"


async def test_an_answer_that_fails_after_its_end_is_not_kept(
    apis: RouterApis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response could not be stored."""

    async def keep(*_: object) -> None:
        raise Unavailable("no store")

    body = {"model": MODEL, "input": "hi", "stream": True}
    with monkeypatch.context() as patch:
        patch.setattr(ResponseApi, "keep", keep)
        _, answer, *_ = await post(apis, body, "/v1/responses")
        assert b"response.failed" in answer
    status, answer, replayed, _ = await post(apis, body, "/v1/responses")
    assert (status, replayed, b"response.failed" in answer) == (200, None, False)


class Hanging:
    """Generates nothing until `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, _: object) -> None:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


async def keep(answers: StoredAnswers, tenant: str, key: str, size: int = 1) -> Recorded:
    async def generate(recorded: Recorded) -> None:
        recorded.end(b"a" * size, is_good=True)

    recorded = answers.answer((tenant, key), b"digest", "r", generate)
    await asyncio.gather(*answers._tasks.values())
    return recorded


def kept(answers: StoredAnswers) -> list[Name]:
    return sorted(answers._answers)


async def test_keys_are_of_one_tenant() -> None:
    answers = StoredAnswers()
    first = await keep(answers, "a", "k")
    assert await keep(answers, "b", "k") is not first
    assert await keep(answers, "a", "k") is first
    with pytest.raises(KeyReused):
        answers.answer(("a", "k"), b"other", "r", Hanging())


async def test_a_tenant_with_many_answers_drops_none_of_another() -> None:
    answers = StoredAnswers(max_bytes=4 * (idempotency._ENTRY_BYTES + 5))
    await keep(answers, "b", "k", 5)
    for key in "cdefg":
        await keep(answers, "a", key, 5)
    assert kept(answers) == [("a", "e"), ("a", "f"), ("a", "g"), ("b", "k")]


async def test_answers_expire() -> None:
    answers = StoredAnswers()
    await keep(answers, "a", "k")
    skip(idempotency.LIFETIME_S)
    await keep(answers, "b", "new")
    assert kept(answers) == [("b", "new")]
    assert answers._kept_bytes == Counter(b=idempotency._ENTRY_BYTES + 1)


async def test_an_abandoned_answer_ends_after_a_while() -> None:
    answers, work = StoredAnswers(), Hanging()
    recorded = answers.answer(("a", "k"), b"digest", "r", work)
    await asyncio.sleep(0)
    with answers.reading(recorded):
        pass
    skip(idempotency.ABANDONED_S)
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait([*answers._tasks.values()])
    assert work.was_cancelled
    assert await keep(answers, "a", "k") is not recorded


async def test_the_counted_size_of_a_stored_answer_is_its_real_size() -> None:
    """The writer of an answer holds all of its deltas."""
    answers = StoredAnswers()
    form = AnswerForm(
        "id", "m", is_chat=True, token_ids=False, names_function=False, prompts=(), n=1
    )

    async def generate(recorded: Recorded) -> None:
        sink = DeltaEncoder(WholeAnswer(form), recorded)
        for i in range(1000):
            sink.write(AnswerDelta(token_ids=(1000 + i,), text=f" word {i}"))
        sink.write(ANSWER[-1])
        sink.end()

    async def fill(count: int) -> None:
        for i in range(count):
            answers.answer(("", f"{count}-{i}"), b"digest", "r", generate)
        await asyncio.gather(*answers._tasks.values())

    await fill(1)
    tracemalloc.start()
    before = answers._kept_bytes.total()
    await fill(20)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    counted = answers._kept_bytes.total() - before
    assert counted / 2 < held < 1.5 * counted


async def test_answers_under_way_are_limited() -> None:
    answers = StoredAnswers(max_bytes=1000)
    hanging = Hanging()

    async def generate(recorded: Recorded) -> None:
        recorded.end(b"a" * 1001, is_good=True)
        await hanging(None)

    answers.answer(("a", "k"), b"digest", "r", generate)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="take more than 1000 bytes"):
        answers.answer(("a", "new"), b"digest", "r", Hanging())
    hanging.go.set()
    await asyncio.gather(*answers._tasks.values())
    assert not answers._open_bytes["a"]


async def test_a_tenant_has_a_limited_number_of_abandoned_answers() -> None:
    answers, work = StoredAnswers(), [Hanging() for _ in range(idempotency.MAX_ABANDONED + 2)]
    for i, each in enumerate(work):
        recorded = answers.answer(("a", f"{i}"), b"digest", "r", each)
        await asyncio.sleep(0)
        with answers.reading(recorded):
            pass
    await asyncio.sleep(0)
    assert [x.was_cancelled for x in work[:4]] == [True, True, False, False]
    # Somebody waits for this one again.
    with answers.reading(answers.answer(("a", "2"), b"digest", "r", Hanging())):
        assert len(answers._abandoned) == idempotency.MAX_ABANDONED - 1
    for each in work:
        each.go.set()
    await asyncio.gather(*answers._tasks.values())
    assert not answers._abandoned


@pytest.fixture
async def routers(tmp_path: Path) -> AsyncIterator[list[StoredAnswers]]:
    """Return the answers of two routers that share a database."""
    database = Database(tmp_path / "store.sqlite")
    claims = [Claims(database, name, lease_s=0.05) for name in "ab"]
    yield [StoredAnswers(IdempotencyKeys(database, x), look_s=0.01) for x in claims]
    await database.close()


def ask(answers: StoredAnswers, generate: Generate, request_id: str = "r") -> Recorded:
    return answers.answer(("acme", "k"), b"digest", request_id, generate)


async def test_another_router_waits_for_the_answer(routers: list[StoredAnswers]) -> None:
    first, second = routers
    hanging = Hanging()

    async def generate(recorded: Recorded) -> None:
        await hanging(None)
        recorded.end(b"aaaaa", is_good=True)

    ask(first, generate, "r1")
    await wait_until(lambda: first._claims)
    waiting = ask(second, Hanging(), "r2")
    await wait_until(lambda: waiting.is_elsewhere)
    hanging.go.set()
    await asyncio.gather(*first._tasks.values(), *second._tasks.values())
    assert (waiting.body, waiting.request_id, waiting.is_good) == (b"aaaaa", "r1", True)
    assert not first._claims


async def test_another_router_generates_failed_answers_and_those_of_a_dead_router(
    routers: list[StoredAnswers],
) -> None:
    first, second = routers

    async def fail(_: object) -> None:
        raise Unavailable("no worker")

    ask(first, fail)
    await asyncio.gather(*first._tasks.values())
    hanging = Hanging()
    ask(first, hanging)
    await wait_until(lambda: first._claims)  # and nothing renews it

    async def generate(recorded: Recorded) -> None:
        recorded.end(b"aaaaa", is_good=True)

    found = ask(second, generate, "r2")
    await asyncio.gather(*second._tasks.values())
    assert (found.body, found.request_id) == (b"aaaaa", "r2")
    hanging.go.set()
    await asyncio.gather(*first._tasks.values())


async def test_a_request_ends_where_it_is_resumed_elsewhere(routers: list[StoredAnswers]) -> None:
    first, second = routers
    opened = OpenRequests()

    async def generate(_: object) -> None:
        with opened.enter() as request:
            opened.claim(request, "acme", "k", resumes=False)
            await asyncio.Event().wait()

    recorded = ask(first, generate)
    await wait_until(lambda: first._claims)
    async with (
        background("claims", partial(first.end_taken_over, opened)),
        second.taken_over(("acme", "k"), b"resumed", "r2"),
    ):
        await asyncio.gather(*first._tasks.values())
    assert isinstance(recorded.error, Conflict)
    assert not second._claims


async def test_a_request_that_ends_slowly_does_not_end_the_one_that_resumes_it(
    routers: list[StoredAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, opened, name = routers[0], OpenRequests(), ("acme", "k")
    shared = answers._shared
    assert shared is not None
    release, held = shared.release, shared.held
    may_release, looks = asyncio.Event(), 0

    async def release_later(claim: str) -> None:
        await may_release.wait()
        await release(claim)

    async def count(claims: Collection[str]) -> set[str]:
        nonlocal looks
        looks += 1
        return await held(claims)

    async def generate(_: object) -> None:
        with opened.enter() as request:
            opened.claim(request, *name, resumes=False)
            await asyncio.Event().wait()

    monkeypatch.setattr(shared, "release", release_later)
    recorded = ask(answers, generate)
    await wait_until(lambda: name in opened._claimed)
    async with answers.taken_over(name, b"resumed", "r2"):
        try:
            with opened.enter() as request:
                opened.claim(request, *name, resumes=True)
                await wait_until(lambda: recorded.is_done)
                monkeypatch.setattr(shared, "held", count)
                async with background("claims", partial(answers.end_taken_over, opened)):
                    await wait_until(lambda: looks > 2)
        finally:
            may_release.set()
    await asyncio.gather(*answers._tasks.values())


async def test_keys_hold_at_one_router_if_the_store_is_away(
    routers: list[StoredAnswers], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(Database, "write", away)
    answers = routers[0]
    first = await keep(answers, "acme", "k", 5)
    assert first.body == b"aaaaa"
    assert await keep(answers, "acme", "k", 5) is first
