"""Answers, errors and endings over HTTP, on real sockets and with the official client."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
from msgspec import structs, to_builtins

from pdserve.errors import InternalError, Overloaded, Refusal, TransferFailed, Unavailable
from pdserve.net.http_server import HttpServer, bind
from pdserve.types import FinishReason, PositionLogprobs, StaleKv, TokenLogprob, Usage
from router.api.answer_sinks import EventStream
from router.attempt.answer import AnswerDelta
from router.dialects import fields as shared_fields
from router.dialects import openai_writer
from router.dialects.openai_writer import AnswerForm, WholeAnswer
from tests.support.router_apis import (
    ANSWER,
    ANSWER_TEXT,
    CHAT,
    COMPLETIONS,
    CORS_ORIGIN,
    JSON,
    MAX_MODEL_LEN,
    MODEL,
    RECEIPT,
    Hold,
    chat,
    completion,
    events,
)
from tests.support.timeouts import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from pdserve.errors import PdserveError
    from tests.support.router_apis import RouterApis

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def undated(text: str) -> str:
    """Return the stream without its one changing value."""
    created = events(text)[0]["created"]
    return text.replace(f'"created":{created}', '"created":0')


RECEIPT_JSON = json.dumps(to_builtins(RECEIPT), separators=(",", ":"))
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
    apis: RouterApis, path: str, body: dict[str, Any], golden: str
) -> None:
    headers = {"x-request-id": "7"}
    async with apis.session.post(apis.url + path, json=body, headers=headers) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-request-id"] == "7"
        assert undated((await response.read()).decode()) == golden


async def test_each_chunk_has_the_usage_so_far_if_asked(apis: RouterApis) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat(stream=True, stream_options=options)
    async with apis.session.post(apis.url + CHAT, json=body) as response:
        lines = (await response.text()).split("\n\n")
    usages = [
        json.loads(x.removeprefix("data: "))["usage"] for x in lines if x.startswith("data: {")
    ]
    tokens = [x["completion_tokens"] for x in usages]
    assert tokens == sorted(tokens)
    assert tokens[-2] == tokens[-1] > tokens[0]
    assert {x["prompt_tokens"] for x in usages[:-1]} == {4}


async def test_the_root_points_to_what_is_there(apis: RouterApis) -> None:
    async with apis.session.get(f"{apis.url}/") as response:
        page = await response.text()
        assert (response.status, response.content_type) == (200, "text/html")
    for path in re.findall('href="(.*?)"', page):
        async with apis.session.get(f"{apis.url}{path}") as response:
            assert response.status == 200, path


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
async def test_probes_may_ask_for_the_head_alone(apis: RouterApis, path: str) -> None:
    async with apis.session.head(apis.url + path) as response:
        assert (response.status, await response.read()) == (200, b"")
    async with apis.session.get(apis.url + path) as response:
        assert response.status == 200
        assert await response.json()


async def test_whole_chat_answer_has_usage_and_receipt(apis: RouterApis) -> None:
    status, answer = await apis.post(CHAT, chat(), {"x-request-id": "7"})
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
        "pdserve": {"receipt": json.loads(RECEIPT_JSON)},
        "prompt_logprobs": None,
        "system_fingerprint": None,
    }


async def test_generated_request_ids_differ_and_are_returned(apis: RouterApis) -> None:
    ids: set[str] = set()
    for path, body, prefix in ((CHAT, chat(), "chatcmpl-"), (COMPLETIONS, completion(), "cmpl-")):
        for _ in range(2):
            async with apis.session.post(apis.url + path, json=body) as response:
                answer = await response.json()
                assert answer["id"].startswith(prefix)
                assert response.headers["x-request-id"] == answer["id"]
                ids.add(answer["id"])
    assert len(ids) == 4
    assert {request.request_id for request in apis.generator.requests} == ids


async def test_delta_without_text_makes_no_event(apis: RouterApis) -> None:
    apis.generator.script = (ANSWER[0], AnswerDelta(token_ids=(11,)), ANSWER[2])
    chunks = events(await apis.stream(CHAT, chat(stream=True)))
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1]]
    assert texts == ["Leaves", "."]


async def test_official_client_completes_text_and_token_ids(
    apis: RouterApis, official: openai.AsyncOpenAI, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    whole = await official.completions.create(model="demo", prompt="hi")
    assert whole.choices[0].text == ANSWER_TEXT
    prompts: list[Any] = ["hi", ["hi"], [5, 6, 7], [[5, 6, 7]]]
    for prompt in prompts:
        stream = await official.completions.create(model="demo", prompt=prompt, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == ANSWER_TEXT
    made = [request.prompt_token_ids for request in apis.generator.requests]
    assert made == [token_ids("hi")] * 3 + [(5, 6, 7)] * 2


async def test_the_token_ids_of_prompts_come_with_those_of_answers(
    apis: RouterApis, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    asked, said = chat(return_token_ids=True), [10, 11, 12, 13]
    prompt = list(token_ids("<|user|>hi<|assistant|>"))
    _, whole = await apis.post(CHAT, asked)
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, said)
    assert (whole["prompt_logprobs"], whole["system_fingerprint"]) == (None, None)
    *chunks, _ = events(await apis.stream(CHAT, {**asked, "stream": True}))
    assert [x.get("prompt_token_ids") for x in chunks] == [prompt, *[None] * (len(chunks) - 1)]

    many = completion(prompt=[[5, 6], [7]], return_token_ids=True)
    _, whole = await apis.post(COMPLETIONS, many)
    assert [x["prompt_token_ids"] for x in whole["choices"]] == [[5, 6], [7]]
    assert [x["token_ids"] for x in whole["choices"]] == [said, said]
    *chunks, _ = events(await apis.stream(COMPLETIONS, {**many, "stream": True}))
    choices = [x["choices"][0] for x in chunks]
    streamed = [(x["index"], x["prompt_token_ids"]) for x in choices if "prompt_token_ids" in x]
    assert sorted(streamed) == [(0, [5, 6]), (1, [7])]


async def test_official_client_lists_models(official: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in official.models.list()] == ["demo"]
    card = (await official.models.retrieve("demo")).model_extra or {}
    assert (card["max_model_len"], card["vocab_size"]) == (MAX_MODEL_LEN, 300)
    assert (card["root"], card["parent"]) == ("demo", None)
    assert card["permission"][0]["allow_sampling"] is True


async def test_official_client_names_an_adapter_as_its_model(
    apis: RouterApis, official: openai.AsyncOpenAI
) -> None:
    body = {"lora_name": "red", "lora_path": "/red"}
    async with apis.session.post(f"{apis.url}/v1/load_lora_adapter", json=body) as response:
        assert response.status == 200
    demo, red = [model.model_extra async for model in official.models.list()]
    assert red is not None
    assert demo is not None
    assert (red["root"], red["parent"]) == ("demo", "demo")  # and no path
    assert red.keys() == demo.keys()
    answer = await official.completions.create(model="red", prompt=[5, 6, 7])
    assert answer.model == "red"
    (request,) = apis.generator.requests
    assert (request.model, request.adapter_key) == ("demo", "red@d1")


async def test_health_readiness_and_metrics(apis: RouterApis) -> None:
    async def get(path: str) -> tuple[int, str]:
        async with apis.session.get(apis.url + path) as response:
            return response.status, await response.text()

    assert await get("/health") == (200, '{"status":"ok"}')
    assert await get("/ready") == (200, '{"status":"ready"}')
    assert await get("/metrics") == (200, "pdserve_up 1\n")
    apis.generator.not_ready = Overloaded("no decode worker")
    status, text = await get("/ready")
    assert status == 429
    assert "no decode worker" in text


def position(text: str, logprob: float, *top: tuple[str, float]) -> PositionLogprobs:
    return PositionLogprobs(
        TokenLogprob(1, text, logprob, 1), tuple(TokenLogprob(2, t, p, 1) for t, p in top)
    )


LOGPROBS_SCRIPT = (
    AnswerDelta((1,), "é", (position("é", -0.5, ("é", -0.5), ("x", -2.0)),)),
    AnswerDelta((2,), "", (position("\ufffd", float("-inf"), ("a", -0.1)),)),
    AnswerDelta((3,), "!", (position("!", -1.0),), FinishReason.LENGTH, usage=Usage(1, 3)),
)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs_have_bytes_and_alternatives(apis: RouterApis, stream: bool) -> None:
    apis.generator.script = LOGPROBS_SCRIPT
    body = chat(logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        chunks = [x for x in events(await apis.stream(CHAT, body)) if x != "[DONE]"]
        content = [p for chunk in chunks for p in chunk["choices"][0]["logprobs"]["content"]]
    else:
        _, answer = await apis.post(CHAT, body)
        content = answer["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "x", "logprob": -2.0, "bytes": [120]},
            ],
        },
        {
            "token": "\ufffd",
            "logprob": -9999.0,
            "bytes": [239, 191, 189],
            "top_logprobs": [{"token": "a", "logprob": -0.1, "bytes": [97]}],
        },
        {"token": "!", "logprob": -1.0, "bytes": [33], "top_logprobs": []},
    ]
    assert apis.generator.requests[0].sampling.logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_are_parallel_lists(apis: RouterApis, stream: bool) -> None:
    apis.generator.script = LOGPROBS_SCRIPT
    body = completion(logprobs=2, stream=stream)
    if stream:
        chunks = [x for x in events(await apis.stream(COMPLETIONS, body)) if x != "[DONE]"]
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    else:
        _, answer = await apis.post(COMPLETIONS, body)
        parts = [answer["choices"][0]["logprobs"]]
    assert {name: [x for part in parts for x in part[name]] for name in parts[0]} == {
        "tokens": ["é", "\ufffd", "!"],
        "token_logprobs": [-0.5, -9999.0, -1.0],
        "top_logprobs": [{"é": -0.5, "x": -2.0}, {"a": -0.1, "\ufffd": -9999.0}, {"!": -1.0}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/audio/speech", 404, "not_found"),
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/demo", 405, "method_not_allowed"),
    ],
)
async def test_wrong_path_or_method(
    apis: RouterApis, method: str, path: str, status: int, code: str
) -> None:
    async with apis.session.request(method, apis.url + path, data=b"{}") as response:
        answer = json.loads(await response.read())
        assert (response.status, answer["error"]["code"]) == (status, code)
        assert (response.headers.get("allow") is None) == (status != 405)


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"x-request-id": "a b"}, "x-request-id"),
        ({"x-request-id": "x" * 129}, "x-request-id"),
        ({"content-encoding": "gzip"}, "content-encoding"),
        ({"x-session-id": "x" * 257}, "x-session-id"),
    ],
)
async def test_bad_header_is_refused(apis: RouterApis, headers: dict[str, str], field: str) -> None:
    status, answer = await apis.post(CHAT, chat(), headers)
    assert (status, answer["error"]["param"]) == (400, field)
    assert (await apis.post(CHAT, chat()))[0] == 200


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (
            Overloaded("full", retry_after_s=2.2, reason=Refusal.QUEUE_FULL),
            429,
            "rate_limit_error",
            "3",
        ),
        (Unavailable("none", retry_after_s=0.0), 503, "service_unavailable_error", "1"),
    ],
)
async def test_a_refusal_has_its_reason_and_retry_after(
    apis: RouterApis, error: PdserveError, status: int, kind: str, retry_after: str
) -> None:
    apis.generator.refusal = error
    data = json.dumps(chat(stream=True))
    async with apis.session.post(apis.url + CHAT, data=data, headers=JSON) as response:
        assert response.status == status
        assert response.headers["retry-after"] == retry_after
        told = json.loads(await response.read())["error"]
        assert (told["type"], told.get("reason", "")) == (kind, error.reason)


async def test_endless_body_without_a_length_is_refused(apis: RouterApis) -> None:
    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * (1 << 20)

    async with apis.session.post(apis.url + CHAT, data=pieces(), headers=JSON) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    assert (await apis.post(CHAT, chat()))[0] == 200


async def test_error_before_the_first_delta_is_a_status(apis: RouterApis) -> None:
    apis.generator.script = (TransferFailed("no KV came"),)
    status, answer = await apis.post(CHAT, chat(stream=True))
    error = answer["error"]
    assert (status, error["code"], error["type"]) == (502, "transfer_failed", "server_error")


async def test_official_client_raises_an_error_out_of_the_stream(
    apis: RouterApis, official: openai.AsyncOpenAI
) -> None:
    apis.generator.script = (ANSWER[0], TransferFailed("no KV came"))
    stream = await official.completions.create(model="demo", prompt="hi", stream=True)
    with pytest.raises(openai.APIError, match="no KV came"):
        _ = [chunk async for chunk in stream]


@pytest.mark.parametrize("script", [(), ANSWER[:2]])
@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_breaks_off_in_silence_is_an_error(
    apis: RouterApis, script: tuple[AnswerDelta, ...], stream: bool
) -> None:
    apis.generator.script = script
    data = json.dumps(chat(stream=stream))
    async with apis.session.post(apis.url + CHAT, data=data, headers=JSON) as response:
        text = (await response.read()).decode()
    assert InternalError.code in text
    assert "[DONE]" not in text


async def asked(
    apis: RouterApis, *, stream: bool = True, version: str = "1.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection with a small receive buffer, and send a chat request."""
    body = json.dumps(chat(stream=stream))
    reader, writer = await asyncio.open_connection(apis.host, apis.port, limit=1024)
    head = (
        f"POST {CHAT} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    return reader, writer


@pytest.mark.parametrize("script", [(Hold.FOR_EVER,), (ANSWER[0], Hold.FOR_EVER)])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_leaves_the_answer(
    apis: RouterApis, script: tuple[Any, ...], stream: bool
) -> None:
    apis.generator.script = script
    _, writer = await asked(apis, stream=stream)
    await apis.generator.waiting.wait()
    assert not apis.generator.left.is_set()
    writer.close()
    await apis.generator.left.wait()
    await writer.wait_closed()


async def test_a_token_for_a_client_that_is_leaving_is_dropped() -> None:
    """An error here would reach the connection of the worker that sends the token."""
    sent = []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        stream = EventStream(request, {})
        assert request.transport is not None
        request.transport.close()  # as at the client's end, of which the handler learns later
        sent.extend([stream.send(b"data: 1\n\n"), stream.send(b"data: 2\n\n")])
        return stream.response

    listener = bind("127.0.0.1", 0)
    server = HttpServer(handler, listener)
    await server.start()
    _, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await wait_until(lambda: len(sent) == 2)
    writer.close()
    await server.stop()
    assert sent == [True, True]


async def test_stream_to_a_client_of_http_1_0_ends_with_its_connection(apis: RouterApis) -> None:
    reader, writer = await asked(apis, version="1.0")
    head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    assert "chunked" not in head
    assert events(text)[-1] == "[DONE]"
    writer.close()


async def test_drain_lets_an_answer_end_and_refuses_new_ones(apis: RouterApis) -> None:
    go_on = asyncio.Event()
    apis.generator.script = (ANSWER[0], go_on, *ANSWER[1:])
    running = asyncio.create_task(apis.stream(CHAT, chat(stream=True)))
    await apis.generator.waiting.wait()
    draining = asyncio.create_task(apis.open_requests.drain(30.0))
    await asyncio.sleep(0)
    status, answer = await apis.post(COMPLETIONS, completion())
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    async with apis.session.get(f"{apis.url}/ready") as response:
        assert response.status == 503
    assert not draining.done()
    go_on.set()
    assert events(await running)[-1] == "[DONE]"
    await draining


async def test_a_stream_that_outlives_the_grace_ends_with_an_error_event(apis: RouterApis) -> None:
    apis.generator.script = (ANSWER[0], Hold.FOR_EVER)
    running = asyncio.create_task(apis.stream(CHAT, chat(stream=True)))
    await apis.generator.waiting.wait()
    await apis.open_requests.drain(0.0)
    assert events(await running)[-1]["error"]["code"] == "unavailable"
    assert apis.generator.left.is_set()


def scored(*texts: str) -> tuple[PositionLogprobs, ...]:
    """Return logprobs of a prompt whose tokens have these texts."""
    return tuple(
        PositionLogprobs(TokenLogprob(i, text, -float(i), min(i, 1)))
        for i, text in enumerate(texts)
    )


def answer_with(prompt_logprobs: tuple[PositionLogprobs, ...] = ()) -> tuple[AnswerDelta, ...]:
    last = AnswerDelta((2,), "!", scored("!", "!")[1:], FinishReason.LENGTH)
    last.usage, last.receipt = Usage(2, 2, 1), RECEIPT
    return AnswerDelta((1,), "yo", scored("yo", "yo")[1:], prompt_logprobs=prompt_logprobs), last


async def test_several_prompts_have_their_answers_side_by_side(apis: RouterApis) -> None:
    first, last = answer_with()
    two = [structs.replace(x, index=1, usage=None, receipt=None) for x in (first, last)]
    apis.generator.script = (first, *two, last)
    body = completion(prompt=["hi", [7, 8], "you"], n=2)
    status, answer = await apis.post(COMPLETIONS, body, {"x-request-id": "7"})
    assert status == 200, answer
    assert [(x["index"], x["text"]) for x in answer["choices"]] == [(i, "yo!") for i in range(6)]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 6,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    asked = [(x.request_id, len(x.prompt_token_ids)) for x in apis.generator.requests]
    assert asked == [("cmpl-7-0", 2), ("cmpl-7-1", 2), ("cmpl-7-2", 3)]
    chunks = events(await apis.stream(COMPLETIONS, {**body, "stream": True}))
    assert {x["index"] for chunk in chunks[:-1] for x in chunk["choices"]} == set(range(6))
    assert sum("pdserve" in chunk for chunk in chunks[:-1]) == 1
    assert chunks[-1] == "[DONE]"


async def test_one_prompt_that_fails_fails_all(apis: RouterApis) -> None:
    apis.generator.script = (Overloaded("no room"),)
    status, answer = await apis.post(COMPLETIONS, completion(prompt=["a", "b"]))
    assert (status, answer["error"]["message"]) == (429, "no room")


@pytest.mark.parametrize("prompt", ["hi", [[71, 72]]])
async def test_echo_scores_the_prompt_as_evaluation_harnesses_ask(
    apis: RouterApis, prompt: object, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    apis.generator.script = answer_with(scored("h", "i"))
    ids = list(token_ids("hi"))
    body = completion(prompt="hi" if prompt == "hi" else [ids], echo=True, logprobs=0, max_tokens=2)
    status, answer = await apis.post(COMPLETIONS, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert choice["text"] == "hiyo!"
    assert choice["logprobs"] == {
        "tokens": ["h", "i", "yo", "!"],
        "token_logprobs": [None, -1.0, -1.0, -1.0],
        "top_logprobs": [None, {"i": -1.0}, {"yo": -1.0}, {"!": -1.0}],
        "text_offset": [0, 1, 2, 4],
    }
    assert apis.generator.requests[0].sampling.prompt_logprobs == 0
    chunks = events(await apis.stream(COMPLETIONS, {**body, "stream": True}))
    assert [x["choices"][0]["text"] for x in chunks[:-1]] == ["hiyo", "!"]


async def test_echo_of_the_prompt_alone_generates_nothing(apis: RouterApis) -> None:
    apis.generator.script = answer_with(scored("h", "i"))
    body = completion(echo=True, logprobs=1, max_tokens=0)
    status, answer = await apis.post(COMPLETIONS, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert answer["usage"]["completion_tokens"] == 0
    assert apis.generator.requests[0].sampling.max_tokens == 1


@pytest.mark.parametrize("is_chat", [True, False])
def test_logprobs_are_encoded_as_they_come(is_chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    form = AnswerForm(
        "id", MODEL, is_chat=is_chat, token_ids=False, names_function=False, prompts=(), n=1
    )
    answer = WholeAnswer(form)
    for delta in LOGPROBS_SCRIPT:
        answer.write(delta)
    for name in ("_token", "finite"):
        monkeypatch.setattr(shared_fields, name, None)
    monkeypatch.setattr(openai_writer, "finite", None)
    (choice,) = msgspec.json.decode(answer.end())["choices"]
    assert len(choice["logprobs"]["content" if is_chat else "tokens"]) == 3


async def test_the_cache_salt_goes_with_the_request(apis: RouterApis) -> None:
    await apis.post(CHAT, chat(cache_salt="s"))
    assert apis.generator.requests[0].cache_salt == "s"


async def test_what_happens_to_the_answer_if_weights_change_goes_with_the_request(
    apis: RouterApis,
) -> None:
    for value in StaleKv:
        await apis.post(CHAT, chat(stale_kv=value))
        assert apis.generator.requests[-1].stale_kv is value
    status, body = await apis.post(CHAT, chat(stale_kv="later"))
    assert (status, body["error"]["param"]) == (400, "stale_kv")
    assert "must be one of recompute, allow, abort" in body["error"]["message"]


CLAUDE_CODE = "user_5f_account__session_3d0c7b1e-7f4e-4c56-9d0e-2b1f6f3a9c11"
IN_JSON = '{"device_id":"d","session_id":"3d0c7b1e-7f4e-4c56-9d0e-2b1f6f3a9c11"}'


@pytest.mark.parametrize(
    ("path", "fields", "headers", "session"),
    [
        (CHAT, {}, {}, ""),
        (CHAT, {"prompt_cache_key": "k"}, {}, "k"),
        (CHAT, {"prompt_cache_key": "k", "session_id": "s"}, {}, "s"),
        (CHAT, {"prompt_cache_key": "k"}, {"session_id": "codex"}, "codex"),
        (CHAT, {}, {"x-session-affinity": "a", "X-Session-Id": "b"}, "b"),
        ("/v1/messages", {"metadata": {"user_id": CLAUDE_CODE}}, {}, CLAUDE_CODE[-36:]),
        ("/v1/messages", {"metadata": {"user_id": IN_JSON}}, {}, CLAUDE_CODE[-36:]),
        ("/v1/messages", {"metadata": {"user_id": "somebody"}}, {}, ""),
    ],
)
async def test_the_session_that_a_client_names_goes_with_the_request(
    apis: RouterApis, path: str, fields: dict[str, Any], headers: dict[str, str], session: str
) -> None:
    assert (await apis.post(path, chat(max_tokens=4, **fields), headers))[0] == 200
    assert apis.generator.requests[0].session == session


async def test_tokens_and_text_are_turned_into_each_other(
    apis: RouterApis, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    chatted = chat(), "<|user|>hi<|assistant|>"
    for body, text in (({"prompt": "hi"}, "hi"), ({"prompt": ""}, ""), chatted):
        status, answer = await apis.post("/tokenize", body)
        ids = list(token_ids(text))
        assert (status, answer["tokens"], answer["count"]) == (200, ids, len(ids))
        assert answer["max_model_len"] == MAX_MODEL_LEN
        assert await apis.post("/detokenize", {"tokens": ids}) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **chat()}, "messages"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_input_that_cannot_be_tokenised_is_refused_by_field(
    apis: RouterApis, path: str, body: object, field: str
) -> None:
    status, answer = await apis.post(path, body)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_the_page_of_the_api_loads_nothing_from_elsewhere(apis: RouterApis) -> None:
    async with apis.session.get(f"{apis.url}/docs") as response:
        assert response.content_type == "text/html"
        page = await response.text()
    assert 'fetch("/openapi.json")' in page
    assert "//" not in page.replace("</", "")


async def test_pages_of_a_configured_origin_alone_may_read_answers(apis: RouterApis) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    for origin, allowed in ((CORS_ORIGIN, CORS_ORIGIN), ("https://evil.example", None)):
        headers = {"origin": origin}
        url = apis.url + CHAT
        async with apis.session.options(url, headers={**headers, **asked}) as response:
            assert response.status == (204 if allowed else 403)
            assert response.headers.get("access-control-allow-origin") == allowed
            assert response.headers.get("access-control-allow-headers") == (allowed and "x-a")
        for body in (chat(), chat(stream=True), {}):
            async with apis.session.post(url, json=body, headers=headers) as response:
                assert response.headers.get("access-control-allow-origin") == allowed
                assert "access-control-allow-credentials" not in response.headers
                assert response.headers["vary"] == "origin"
