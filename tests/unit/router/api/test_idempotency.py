"""A request with an idempotency key is answered once, however often it comes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from scripted import ANSWER, CHAT, COMPLETIONS, chat, completion

from pdserve.errors import KeyReused, Overloaded, TransferFailed
from router.api import idempotency
from router.api.idempotency import Recorded, StoredAnswers

if TYPE_CHECKING:
    from scripted import Apis

KEY = {"idempotency-key": "k"}


async def post(apis: Apis, body: object, path: str = CHAT) -> tuple[int, bytes, str | None, str]:
    async with apis.session.post(apis.url + path, json=body, headers=KEY) as response:
        replayed = response.headers.get("idempotent-replayed")
        request_id = response.headers.get("x-request-id", "")
        return response.status, await response.read(), replayed, request_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_gets_the_same_answer(apis: Apis, stream: bool) -> None:
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
async def test_a_request_repeated_while_it_is_answered_joins_it(apis: Apis, stream: bool) -> None:
    go = asyncio.Event()
    apis.generator.script = (ANSWER[0], go, *ANSWER[1:])
    first = asyncio.create_task(post(apis, chat(stream=stream)))
    await apis.generator.waiting.wait()
    second = asyncio.create_task(post(apis, chat(stream=stream)))
    go.set()
    assert (await first)[1] == (await second)[1]
    assert len(apis.generator.requests) == 1


async def test_the_answer_is_there_though_its_client_has_left(apis: Apis) -> None:
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


async def test_another_request_with_the_key_is_refused(apis: Apis) -> None:
    assert (await post(apis, chat()))[0] == 200
    for body, path in ((chat(n=2), CHAT), (completion(), COMPLETIONS)):
        status, answer, *_ = await post(apis, body, path)
        assert status == 422
        assert b'"code":"idempotency_key_reused"' in answer


async def test_a_failure_is_not_kept(apis: Apis) -> None:
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


class Bytes:
    """A writer whose answer is so many bytes."""

    def __init__(self, size: int) -> None:
        self.write = self.fail = lambda _: b""
        self.end = lambda: b"a" * size


async def keep(answers: StoredAnswers, tenant: str, key: str, size: int = 1) -> None:
    recorded = Recorded(b"digest", "r")

    async def answer() -> Recorded:
        recorded.open(Bytes(size)).end()
        return recorded

    answers.record(tenant, key, recorded, answer())
    await asyncio.gather(*answers._tasks)


async def test_keys_are_of_one_tenant() -> None:
    answers = StoredAnswers()
    await keep(answers, "a", "k")
    assert answers.find("b", "k", b"other") is None
    with pytest.raises(KeyReused):
        answers.find("a", "k", b"other")


async def test_old_answers_make_room_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = StoredAnswers(max_bytes=10)
    found: dict[str, Any] = {}
    for key in "abc":
        await keep(answers, "", key, 5)
    found = {key: answers.find("", key, b"digest") for key in "abc"}
    assert [key for key, x in found.items() if x is None] == ["a"]
    assert answers._bytes == 10
    monkeypatch.setattr(idempotency, "LIFETIME_S", 0.0)
    assert answers.find("", "c", b"digest") is None
    assert (answers._bytes, answers._answers, answers._complete) == (0, {}, {})
