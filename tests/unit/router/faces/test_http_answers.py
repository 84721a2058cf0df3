"""Answers over HTTP, byte for byte, and as the official client reads them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from scripted import (
    ANSWER,
    ANSWER_TEXT,
    CHAT,
    COMPLETIONS,
    MAX_MODEL_LEN,
    RECEIPT,
    chat,
    completion,
    events,
)

from pdserve.errors import Overloaded
from router.answer import AnswerDelta
from router.http.fields import CHAT as CHAT_FIELDS
from router.http.fields import COMPLETIONS as COMPLETION_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from scripted import Faces

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def undated(text: str) -> str:
    """The stream with its one changing value taken out."""
    created = events(text)[0]["created"]
    return text.replace(f'"created":{created}', '"created":0')


RECEIPT_JSON = json.dumps(asdict(RECEIPT), separators=(",", ":"))
CHAT_HEAD = '{"id":"chatcmpl-7","object":"chat.completion.chunk","created":0,"model":"demo"'
CHAT_STREAM = (
    f"data: {CHAT_HEAD},"
    '"choices":[{"index":0,"delta":{"role":"assistant","content":"Leaves"},'
    '"logprobs":null,"finish_reason":null}]}\n\n'
    f"data: {CHAT_HEAD},"
    '"choices":[{"index":0,"delta":{"content":" turn \\"réd\\"\\n"},'
    '"logprobs":null,"finish_reason":null}]}\n\n'
    f"data: {CHAT_HEAD},"
    '"choices":[{"index":0,"delta":{"content":"."},'
    '"logprobs":null,"finish_reason":"stop","stop_reason":null}],'
    f'"pdserve":{{"receipt":{RECEIPT_JSON}}}}}\n\n'
    "data: [DONE]\n\n"
)
COMPLETION_HEAD = '{"id":"cmpl-7","object":"text_completion","created":0,"model":"demo"'
COMPLETION_STREAM = (
    f'data: {COMPLETION_HEAD},"choices":[{{"index":0,"text":"Leaves",'
    '"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    f'data: {COMPLETION_HEAD},"choices":[{{"index":0,"text":" turn \\"réd\\"\\n",'
    '"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    f'data: {COMPLETION_HEAD},"choices":[{{"index":0,"text":".",'
    '"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":null}\n\n'
    f'data: {COMPLETION_HEAD},"choices":[],"usage":{json.dumps(USAGE, separators=(",", ":"))},'
    f'"pdserve":{{"receipt":{RECEIPT_JSON}}}}}\n\n'
    "data: [DONE]\n\n"
)


@pytest.mark.parametrize(
    ("path", "body", "golden"),
    [
        (CHAT, chat(stream=True), CHAT_STREAM),
        (
            COMPLETIONS,
            completion(stream=True, stream_options={"include_usage": True}),
            COMPLETION_STREAM,
        ),
    ],
)
async def test_stream_is_this_byte_for_byte(
    faces: Faces, path: str, body: dict[str, Any], golden: str
) -> None:
    headers = {"x-request-id": "7"}
    async with faces.session.post(faces.url + path, json=body, headers=headers) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-request-id"] == "7"
        assert undated((await response.read()).decode()) == golden


async def test_whole_chat_answer_has_usage_and_receipt(faces: Faces) -> None:
    status, answer = await faces.post(CHAT, chat(), {"x-request-id": "7"})
    assert status == 200
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER_TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": USAGE,
        "pdserve": {"receipt": {**asdict(RECEIPT), "fallbacks": []}},
    }


async def test_minted_request_ids_differ_and_are_told(faces: Faces) -> None:
    ids: set[str] = set()
    for path, body, prefix in ((CHAT, chat(), "chatcmpl-"), (COMPLETIONS, completion(), "cmpl-")):
        for _ in range(2):
            async with faces.session.post(faces.url + path, json=body) as response:
                answer = await response.json()
                assert answer["id"].startswith(prefix)
                assert response.headers["x-request-id"] == answer["id"]
                ids.add(answer["id"])
    assert len(ids) == 4
    assert {request.request_id for request in faces.generator.requests} == ids


async def test_delta_without_text_makes_no_event(faces: Faces) -> None:
    faces.generator.script = (ANSWER[0], AnswerDelta(token_ids=(11,)), ANSWER[2])
    chunks = events(await faces.stream(CHAT, chat(stream=True)))
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1]]
    assert texts == ["Leaves", "."]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_official_client_streams_chat(
    official: openai.AsyncOpenAI, include_usage: bool
) -> None:
    stream = await official.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": include_usage},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ANSWER_TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    last_choice = next(chunk for chunk in reversed(chunks) if chunk.choices)
    assert last_choice.choices[0].finish_reason == "stop"
    assert (chunks[-1].usage is not None) == include_usage
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["pdserve"]["receipt"]["decode_worker"] == "decode-0"


async def test_official_client_gets_a_whole_chat_answer(official: openai.AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(
        model="demo",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        max_completion_tokens=8,
        metadata={"team": "a"},
        store=False,
        user="me",
    )
    assert answer.choices[0].message.content == ANSWER_TEXT
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_official_client_completes_text_and_token_ids(
    faces: Faces, official: openai.AsyncOpenAI, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    whole = await official.completions.create(model="demo", prompt="hi")
    assert whole.choices[0].text == ANSWER_TEXT
    prompts: list[Any] = ["hi", ["hi"], [5, 6, 7], [[5, 6, 7]]]
    for prompt in prompts:
        stream = await official.completions.create(model="demo", prompt=prompt, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == ANSWER_TEXT
    made = [request.prompt_token_ids for request in faces.generator.requests]
    assert made == [token_ids("hi")] * 3 + [(5, 6, 7)] * 2


async def test_official_client_raises_its_own_errors(
    faces: Faces, official: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await official.chat.completions.create(
            model="none", messages=[{"role": "user", "content": "hi"}]
        )
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    faces.generator.refusal = Overloaded("full")
    with pytest.raises(openai.RateLimitError):
        await official.completions.create(model="demo", prompt="hi")


async def test_official_client_lists_models(official: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in official.models.list()] == ["demo"]
    card = await official.models.retrieve("demo")
    assert card.model_extra == {"max_model_len": MAX_MODEL_LEN, "vocab_size": 300}


async def test_health_readiness_and_metrics(faces: Faces) -> None:
    async def get(path: str) -> tuple[int, str]:
        async with faces.session.get(faces.url + path) as response:
            return response.status, await response.text()

    assert await get("/health") == (200, '{"status":"ok"}')
    assert await get("/ready") == (200, '{"status":"ready"}')
    assert await get("/metrics") == (200, "pdserve_up 1\n")
    faces.generator.not_ready = Overloaded("no decode worker")
    status, text = await get("/ready")
    assert status == 429
    assert "no decode worker" in text


@pytest.mark.parametrize(
    ("fields", "base"),
    [
        (CHAT_FIELDS, chat_params.CompletionCreateParamsBase),
        (COMPLETION_FIELDS, CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_official_api_is_in_the_table(
    fields: Mapping[str, object], base: Any
) -> None:
    defined = {*base.__annotations__, "stream"}
    assert defined - set(fields) == set()
