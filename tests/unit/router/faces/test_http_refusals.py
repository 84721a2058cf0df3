"""Bad input over HTTP: each row its status, code and named field, and the next request is fine."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from scripted import CHAT, COMPLETIONS, chat, completion

from pdserve.errors import Overloaded, Refusal, Unavailable

if TYPE_CHECKING:
    from scripted import Faces

    from pdserve.errors import PdserveError


def messages(*values: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": list(values)}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


VALUE, UNSUPPORTED, UNKNOWN = "invalid_value", "unsupported_parameter", "unknown_parameter"
TOO_LONG = "context_length_exceeded"

# (path, body, code, field); the status is 400.
BAD_REQUESTS: list[tuple[str, object, str, str | None]] = [
    # Bodies that are no request at all.
    (CHAT, b"", VALUE, None),
    (CHAT, b"{", VALUE, None),
    (CHAT, b"\x00\xff\xfe garbage", VALUE, None),
    (CHAT, b'{"model": "\xff"}', VALUE, None),
    (CHAT, b"[]", VALUE, None),
    (CHAT, b"null", VALUE, None),
    (CHAT, b'"text"', VALUE, None),
    (CHAT, b"[" * 30_000, VALUE, None),
    (COMPLETIONS, b'{"model":"demo","prompt":"hi","temperature":NaN}', VALUE, None),
    (COMPLETIONS, b'{"model":"demo","prompt":"hi","temperature":-Infinity}', VALUE, None),
    (COMPLETIONS, b'{"model":"demo","prompt":"hi","temperature":1e999}', VALUE, "temperature"),
    (COMPLETIONS, b'{"model":"demo","prompt":"hi","seed":' + b"9" * 5000 + b"}", VALUE, None),
    (COMPLETIONS, b'{"model":"demo","prompt":"hi","prompt":"ho"}', VALUE, "prompt"),
    (COMPLETIONS, b'{"model":"demo","prompt":"\\ud800"}', VALUE, None),
    # Names.
    (CHAT, chat(temprature=0), UNKNOWN, "temprature"),
    (CHAT, chat(prompt="hi"), UNKNOWN, "prompt"),
    (COMPLETIONS, completion(messages=[]), UNKNOWN, "messages"),
    (COMPLETIONS, completion(guided_json={}), UNKNOWN, "guided_json"),
    (CHAT, chat(stream=True, stream_options={"usage": True}), UNKNOWN, "stream_options.usage"),
    (CHAT, chat(response_format={"type": "text", "x": 1}), UNKNOWN, "response_format.x"),
    # What the API defines and we do not do.
    (CHAT, chat(tools=[{"type": "function"}]), UNSUPPORTED, "tools"),
    (CHAT, chat(tools=[]), UNSUPPORTED, "tools"),
    (CHAT, chat(tool_choice="auto"), UNSUPPORTED, "tool_choice"),
    (CHAT, chat(functions=[]), UNSUPPORTED, "functions"),
    (CHAT, chat(function_call="auto"), UNSUPPORTED, "function_call"),
    (CHAT, chat(parallel_tool_calls=True), UNSUPPORTED, "parallel_tool_calls"),
    (CHAT, chat(audio={"voice": "x", "format": "wav"}), UNSUPPORTED, "audio"),
    (CHAT, chat(modalities=["text", "audio"]), UNSUPPORTED, "modalities"),
    (CHAT, chat(prediction={"type": "content"}), UNSUPPORTED, "prediction"),
    (CHAT, chat(reasoning_effort="low"), UNSUPPORTED, "reasoning_effort"),
    (CHAT, chat(service_tier="priority"), UNSUPPORTED, "service_tier"),
    (COMPLETIONS, completion(service_tier=1), VALUE, "service_tier"),
    (CHAT, chat(priority=1 << 63), VALUE, "priority"),
    (COMPLETIONS, completion(priority="low"), VALUE, "priority"),
    (CHAT, chat(store=True), UNSUPPORTED, "store"),
    (CHAT, chat(store=0), UNSUPPORTED, "store"),
    (CHAT, chat(verbosity="low"), UNSUPPORTED, "verbosity"),
    (CHAT, chat(web_search_options={}), UNSUPPORTED, "web_search_options"),
    (COMPLETIONS, completion(n=2, best_of=2), UNSUPPORTED, "best_of"),
    (COMPLETIONS, completion(best_of=2), UNSUPPORTED, "best_of"),
    (COMPLETIONS, completion(best_of=True), UNSUPPORTED, "best_of"),
    (COMPLETIONS, completion(echo=True), UNSUPPORTED, "echo"),
    (COMPLETIONS, completion(suffix="end"), UNSUPPORTED, "suffix"),
    (COMPLETIONS, completion(prompt=["a", "b"]), UNSUPPORTED, "prompt"),
    (COMPLETIONS, completion(prompt=[[1], [2]]), UNSUPPORTED, "prompt"),
    # Model.
    (CHAT, {"messages": [user("hi")]}, VALUE, "model"),
    (CHAT, chat(model=None), VALUE, "model"),
    (CHAT, chat(model=7), VALUE, "model"),
    # Prompts.
    (COMPLETIONS, {"model": "demo"}, VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=""), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=[]), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=[[]]), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=7), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt={}), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=[1, True]), VALUE, "prompt[1]"),
    (COMPLETIONS, completion(prompt=[1, 2.0]), VALUE, "prompt[1]"),
    (COMPLETIONS, completion(prompt=[1, "a"]), VALUE, "prompt[1]"),
    (COMPLETIONS, completion(prompt=[1, -1]), VALUE, "prompt[1]"),
    (COMPLETIONS, completion(prompt=[1, 300]), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=[1 << 70]), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=[1] * 64), TOO_LONG, "prompt"),
    (COMPLETIONS, completion(prompt="a" * 60_000), TOO_LONG, "prompt"),
    (COMPLETIONS, completion(prompt=[1] * 60, max_tokens=5), TOO_LONG, "max_tokens"),
    (CHAT, chat(max_completion_tokens=63), TOO_LONG, "max_completion_tokens"),
    (CHAT, messages(user("a" * 100)), TOO_LONG, "messages"),
    # Messages.
    (CHAT, {"model": "demo"}, VALUE, "messages"),
    (CHAT, messages(), VALUE, "messages"),
    (CHAT, {"model": "demo", "messages": "hi"}, VALUE, "messages"),
    (CHAT, messages("hi"), VALUE, "messages[0]"),
    (CHAT, messages({"content": "hi"}), VALUE, "messages[0].role"),
    (CHAT, messages(user("a"), {"role": "robot", "content": "hi"}), VALUE, "messages[1].role"),
    (CHAT, messages({"role": "tool", "content": "hi"}), UNSUPPORTED, "messages[0].role"),
    (CHAT, messages({"role": "user"}), VALUE, "messages[0].content"),
    (CHAT, messages(user(None)), VALUE, "messages[0].content"),
    (CHAT, messages(user([])), VALUE, "messages[0].content"),
    (CHAT, messages(user(["hi"])), VALUE, "messages[0].content[0]"),
    (CHAT, messages(user([{"type": "text"}])), VALUE, "messages[0].content[0].text"),
    (
        CHAT,
        messages(user("a"), user([{"type": "image_url", "image_url": {"url": "x"}}])),
        UNSUPPORTED,
        "messages[1].content[0].type",
    ),
    (CHAT, messages(user("a", weight=1)), UNKNOWN, "messages[0].weight"),
    (CHAT, messages(user("a", name=1)), VALUE, "messages[0].name"),
    (
        CHAT,
        messages({"role": "assistant", "content": "a", "tool_calls": [{}]}),
        UNSUPPORTED,
        "messages[0].tool_calls",
    ),
    # Sampling.
    (CHAT, chat(temperature=True), VALUE, "temperature"),
    (CHAT, chat(temperature="1"), VALUE, "temperature"),
    (CHAT, chat(temperature=-0.1), VALUE, "temperature"),
    (CHAT, chat(top_p=0), VALUE, "top_p"),
    (CHAT, chat(top_p=1.1), VALUE, "top_p"),
    (CHAT, chat(top_k=-2), VALUE, "top_k"),
    (CHAT, chat(top_k=1.5), VALUE, "top_k"),
    (CHAT, chat(min_p=2), VALUE, "min_p"),
    (CHAT, chat(presence_penalty=3), VALUE, "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), VALUE, "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), VALUE, "repetition_penalty"),
    (CHAT, chat(seed=1.5), VALUE, "seed"),
    (CHAT, chat(seed=1 << 63), VALUE, "seed"),
    (CHAT, chat(max_tokens=0), VALUE, "max_tokens"),
    (CHAT, chat(max_tokens=True), VALUE, "max_tokens"),
    (CHAT, chat(max_tokens=2.0), VALUE, "max_tokens"),
    (CHAT, chat(max_completion_tokens=-1), VALUE, "max_completion_tokens"),
    (CHAT, chat(max_tokens=3, max_completion_tokens=4), VALUE, "max_tokens"),
    (CHAT, chat(min_tokens=5, max_tokens=4), VALUE, "min_tokens"),
    (CHAT, chat(min_tokens=64), VALUE, "min_tokens"),
    (CHAT, chat(n=0), VALUE, "n"),
    (COMPLETIONS, completion(n=129), VALUE, "n"),
    (CHAT, chat(n=2, seed=-3), VALUE, "seed"),
    (CHAT, chat(n=2, seed=(1 << 63) - 1), VALUE, "seed"),
    (CHAT, chat(stop=""), VALUE, "stop"),
    (CHAT, chat(stop=["a"] * 17), VALUE, "stop"),
    (CHAT, chat(stop=["a", 1]), VALUE, "stop[1]"),
    (CHAT, chat(stop=1), VALUE, "stop"),
    (CHAT, chat(stop_token_ids=[300]), VALUE, "stop_token_ids"),
    (CHAT, chat(stop_token_ids=["1"]), VALUE, "stop_token_ids[0]"),
    (CHAT, chat(logit_bias={"x": 1}), VALUE, "logit_bias"),
    (CHAT, chat(logit_bias={"300": 1}), VALUE, "logit_bias"),
    (CHAT, chat(logit_bias={"1": 101}), VALUE, "logit_bias"),
    (CHAT, chat(logit_bias={"1": "2"}), VALUE, "logit_bias.1"),
    (CHAT, chat(logit_bias=[1]), VALUE, "logit_bias"),
    (CHAT, chat(ignore_eos=1), VALUE, "ignore_eos"),
    (CHAT, chat(skip_special_tokens="no"), VALUE, "skip_special_tokens"),
    (CHAT, chat(logprobs=5), VALUE, "logprobs"),
    (CHAT, chat(top_logprobs=5), VALUE, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), VALUE, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=True), VALUE, "top_logprobs"),
    (COMPLETIONS, completion(logprobs=True), VALUE, "logprobs"),
    (COMPLETIONS, completion(logprobs=21), VALUE, "logprobs"),
    # Streams.
    (CHAT, chat(stream="yes"), VALUE, "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), VALUE, "stream_options"),
    (CHAT, chat(stream=True, stream_options=[]), VALUE, "stream_options"),
    (
        CHAT,
        chat(stream=True, stream_options={"include_usage": 1}),
        VALUE,
        "stream_options.include_usage",
    ),
    # Structured outputs.
    (CHAT, chat(response_format="json_object"), VALUE, "response_format"),
    (CHAT, chat(response_format={"type": "xml"}), VALUE, "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), VALUE, "response_format.json_schema"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
        VALUE,
        "response_format.json_schema.schema",
    ),
    (CHAT, chat(structured_outputs={}), VALUE, "structured_outputs"),
    (CHAT, chat(structured_outputs={"regex": "a", "json": {}}), VALUE, "structured_outputs"),
    (CHAT, chat(structured_outputs={"json": "{"}), VALUE, "structured_outputs.json"),
    (CHAT, chat(structured_outputs={"json": 7}), VALUE, "structured_outputs.json"),
    (CHAT, chat(structured_outputs={"choice": []}), VALUE, "structured_outputs.choice"),
    (CHAT, chat(structured_outputs={"choice": ["a", 1]}), VALUE, "structured_outputs.choice[1]"),
    (CHAT, chat(structured_outputs={"regex": 1}), VALUE, "structured_outputs.regex"),
    (
        CHAT,
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        VALUE,
        "structured_outputs",
    ),
]


async def assert_served(faces: Faces) -> None:
    status, answer = await faces.post(CHAT, chat())
    assert status == 200, answer


async def test_bad_requests_are_refused_by_name_and_hurt_no_other(faces: Faces) -> None:
    wrong: list[object] = []
    for path, body, code, field in BAD_REQUESTS:
        status, answer = await faces.post(path, body)
        error = answer.get("error", {})
        got = (status, error.get("code"), error.get("param"), error.get("type"))
        if got != (400, code, field, "invalid_request_error") or not error["message"]:
            wrong.append((path, body, got))
        if faces.generator.requests:
            wrong.append((path, body, "it reached the generator"))
        await assert_served(faces)
        faces.generator.requests.clear()
    assert not wrong


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        (completion(prompt=[1] * 60, max_tokens=5), ("60", "5", "64")),
        (completion(prompt=[1] * 70), ("70", "64")),
    ],
)
async def test_context_length_error_has_both_lengths(
    faces: Faces, body: object, lengths: tuple[str, ...]
) -> None:
    _, answer = await faces.post(COMPLETIONS, body)
    assert all(length in answer["error"]["message"] for length in lengths), answer


async def test_unknown_model_is_404(faces: Faces) -> None:
    status, answer = await faces.post(CHAT, chat(model="gpt-9"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["param"] == "model"
    await assert_served(faces)


async def test_without_any_worker_the_service_is_unavailable(faces: Faces) -> None:
    served, faces.generator.served = faces.generator.served, {}
    status, answer = await faces.post(CHAT, chat())
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    faces.generator.served = served
    await assert_served(faces)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/demo", 405, "method_not_allowed"),
    ],
)
async def test_wrong_path_or_method(
    faces: Faces, method: str, path: str, status: int, code: str
) -> None:
    async with faces.session.request(method, faces.url + path, data=b"{}") as response:
        answer = json.loads(await response.read())
        assert (response.status, answer["error"]["code"]) == (status, code)
        assert (response.headers.get("allow") is None) == (status != 405)


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"x-request-id": "a b"}, "x-request-id"),
        ({"x-request-id": "x" * 129}, "x-request-id"),
        ({"content-encoding": "gzip"}, "content-encoding"),
    ],
)
async def test_bad_header_is_refused(faces: Faces, headers: dict[str, str], field: str) -> None:
    status, answer = await faces.post(CHAT, chat(), headers)
    assert (status, answer["error"]["param"]) == (400, field)
    await assert_served(faces)


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
async def test_refusal_of_the_service_says_why_and_when_to_retry(
    faces: Faces, error: PdserveError, status: int, kind: str, retry_after: str
) -> None:
    faces.generator.refusal = error
    data = json.dumps(chat(stream=True))
    async with faces.session.post(faces.url + CHAT, data=data) as response:
        assert response.status == status
        assert response.headers["retry-after"] == retry_after
        told = json.loads(await response.read())["error"]
        assert (told["type"], told.get("reason", "")) == (kind, error.reason)


async def test_body_of_100_mb_is_refused(faces: Faces) -> None:
    body = io.BytesIO(b"x" * (100 << 20))
    async with faces.session.post(faces.url + CHAT, data=body) as response:
        assert response.status == 413
        assert json.loads(await response.read())["error"]["code"] == "request_too_large"
    await assert_served(faces)


async def test_endless_body_without_a_length_is_refused(faces: Faces) -> None:
    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * (1 << 20)

    async with faces.session.post(faces.url + CHAT, data=pieces()) as response:
        assert response.status == 413
    await assert_served(faces)


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 4096],
)
async def test_bytes_that_are_not_http_hurt_no_other(faces: Faces, garbage: bytes) -> None:
    reader, writer = await asyncio.open_connection(faces.host, faces.port)
    writer.write(garbage)
    writer.write_eof()
    answer = await reader.read()
    assert not answer or answer.startswith(b"HTTP/1.1 400")
    writer.close()
    await writer.wait_closed()
    await assert_served(faces)
