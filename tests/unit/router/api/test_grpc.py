"""The gRPC API over a real channel: answers, bad input row by row, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pdserve.client import ChatMessage, ModelCard, SyncClient
from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TransferFailed,
    Unavailable,
)
from pdserve.net import rpc
from pdserve.types import (
    Constraint,
    FinishReason,
    PositionLogprobs,
    SamplingParams,
    ServiceClass,
    StaleKv,
    StructuredOutput,
    TokenLogprob,
    Usage,
)
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub
from router.attempt.answer import AnswerDelta
from tests.support.router_apis import ANSWER, ANSWER_TEXT, MAX_MODEL_LEN, RECEIPT, TIMEOUT_S, Hold

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import GenerateRequest
    from router.attempt.answer import Out
    from tests.support.router_apis import RouterApis

VALUE, UNSUPPORTED, UNKNOWN = "invalid_value", "unsupported_parameter", "unknown_parameter"
TOO_LONG = "context_length_exceeded"
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def ask(**changes: Any) -> g.GenerateRequest:
    return g.GenerateRequest(**{"text": "hi", **changes})


def sampled(**values: Any) -> g.GenerateRequest:
    return ask(sampling=c.SamplingParams(**values))


def ids(*values: int) -> g.GenerateRequest:
    return g.GenerateRequest(token_ids=g.TokenIds(ids=values))


def says(role: str, content: str = "hi") -> g.GenerateRequest:
    return chats(g.ChatMessage(role=role, content=content))


def chats(*messages: g.ChatMessage) -> g.GenerateRequest:
    return g.GenerateRequest(messages=g.ChatMessages(messages=messages))


def with_unknown_field(request: g.GenerateRequest) -> g.GenerateRequest:
    """Return `request` with the unknown field 99, as a client of later protos would send it."""
    return g.GenerateRequest.FromString(request.SerializeToString() + b"\x98\x06\x01")


def with_unknown_sampling() -> g.GenerateRequest:
    sampling = c.SamplingParams.FromString(b"\x98\x06\x01")
    return ask(sampling=sampling)


BAD_REQUESTS: list[tuple[g.GenerateRequest, grpc.StatusCode, str, str]] = [
    (g.GenerateRequest(), INVALID, VALUE, "prompt"),
    (ask(text=""), INVALID, VALUE, "text"),
    (g.GenerateRequest(token_ids=g.TokenIds()), INVALID, VALUE, "token_ids"),
    (g.GenerateRequest(messages=g.ChatMessages()), INVALID, VALUE, "messages"),
    (chats(*[g.ChatMessage()] * 4097), INVALID, VALUE, "messages"),
    (chats(g.ChatMessage(tool_calls=[g.ToolCall()] * 4097)), INVALID, VALUE, "messages.tool_calls"),
    (ask(tools=[g.Tool()] * 513), INVALID, VALUE, "tools"),
    (says("robot"), INVALID, VALUE, "messages[0].role"),
    (says(""), INVALID, VALUE, "messages[0].role"),
    (ids(1, 300), INVALID, VALUE, "token_ids"),
    (ids(*[1] * 64), INVALID, TOO_LONG, "token_ids"),
    (ask(text="a" * 5000), INVALID, TOO_LONG, "text"),
    (says("user", "a" * 5000), INVALID, TOO_LONG, "messages"),
    (sampled(max_tokens=63), INVALID, TOO_LONG, "max_tokens"),
    (ask(model="none"), grpc.StatusCode.NOT_FOUND, "model_not_found", "model"),
    (ask(request_id="a b"), INVALID, VALUE, "request_id"),
    (ask(service_class=9), INVALID, VALUE, "service_class"),
    (with_unknown_field(ask()), INVALID, UNKNOWN, "99"),
    (with_unknown_sampling(), INVALID, UNKNOWN, "sampling.99"),
    (sampled(n=2, seed=-3), INVALID, VALUE, "seed"),
    # Both APIs check sampling in one place; test_http_fields.py has its limits.
    (sampled(temperature=float("nan")), INVALID, VALUE, "temperature"),
    (sampled(stop_token_ids=[300]), INVALID, VALUE, "stop_token_ids"),
    (sampled(structured_output=c.StructuredOutput()), INVALID, VALUE, "structured_output"),
]


async def assert_served(apis: RouterApis) -> None:
    assert "".join([delta.text async for delta in apis.client.generate("hi")]) == ANSWER_TEXT


async def test_the_client_without_asyncio_has_the_same_methods(apis: RouterApis) -> None:
    def use() -> None:
        with SyncClient(apis.grpc_address) as client:
            deltas = list(client.generate([ChatMessage("user", "hi")], max_tokens=5))
            assert "".join(delta.text for delta in deltas) == ANSWER_TEXT
            assert apis.generator.requests[-1].sampling.max_tokens == 5
            assert client.list_models() == [ModelCard("demo", 64, 300)]
            with pytest.raises(InvalidRequest, match="max_tokens"):
                next(client.generate("hi", max_tokens=-1))
            apis.generator.script = (*ANSWER[:1], Hold.FOR_EVER)
            with closing(client.generate("hi")) as answer:
                assert next(answer).text == ANSWER[0].text

    apis.generator.left.clear()
    await asyncio.to_thread(use)
    await apis.generator.left.wait()


async def test_bad_requests_are_refused_by_name_and_hurt_no_other(apis: RouterApis) -> None:
    wrong: list[object] = []
    async with rpc.open_channel(apis.grpc_address) as channel:
        stub = GenerationStub(channel)
        for request, status, code, field in BAD_REQUESTS:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [message async for message in stub.Generate(request)]
            error = rpc.error_from_rpc(caught.value)
            got = (caught.value.code(), error.code, error.field)
            if got != (status, code, field):
                wrong.append((request, got))
            if apis.generator.requests:
                wrong.append((request, "it reached the generator"))
            await assert_served(apis)
            apis.generator.requests.clear()
    assert not wrong


async def test_answer_comes_delta_by_delta_with_usage_and_receipt(apis: RouterApis) -> None:
    deltas = [delta async for delta in apis.client.generate("hi", request_id="r-1")]
    assert [delta.text for delta in deltas] == [delta.text for delta in ANSWER]
    assert [delta.token_ids for delta in deltas] == [delta.token_ids for delta in ANSWER]
    assert {delta.request_id for delta in deltas} == {"r-1"}
    assert [delta.finish_reason for delta in deltas] == [None, None, FinishReason.STOP]
    assert (deltas[-1].usage, deltas[-1].receipt) == (Usage(7, 4, 2), RECEIPT)
    assert deltas[0].usage is None
    assert deltas[0].receipt is None


@pytest.mark.parametrize("reason", [None, ".", 7])
async def test_stop_reason_and_logprobs_arrive(apis: RouterApis, reason: str | int | None) -> None:
    logprobs = (PositionLogprobs(TokenLogprob(1, "a", -0.5, 1), (TokenLogprob(2, "b", -1, 2),)),)
    apis.generator.script = (
        AnswerDelta((1,), "a", logprobs, FinishReason.STOP, reason, Usage(1, 1), RECEIPT),
    )
    (delta,) = [delta async for delta in apis.client.generate("hi")]
    assert (delta.logprobs, delta.stop_reason) == (logprobs, reason)


async def test_each_kind_of_prompt_is_tokenised_once_here(
    apis: RouterApis, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    prompts: list[tuple[Any, tuple[int, ...]]] = [
        ("hi", token_ids("hi")),
        ([5, 6, 7], (5, 6, 7)),
        ([ChatMessage("user", "hi")], token_ids("<|user|>hi<|assistant|>")),
    ]
    for prompt, expected in prompts:
        async with aclosing(apis.client.generate(prompt, model="demo")) as answer:
            await anext(answer)
        made = apis.generator.requests.pop()
        assert (made.prompt_token_ids, made.model) == (expected, "demo")
        # No length was given: the answer may fill the context.
        assert made.sampling == SamplingParams(max_tokens=MAX_MODEL_LEN - len(expected))


async def test_sampling_and_order_arrive_as_they_were_given(apis: RouterApis) -> None:
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.0,
        top_k=3,
        seed=-1,
        stop=("a", "b"),
        logit_bias={1: 2.0},
        logprobs=0,
        structured_output=StructuredOutput(Constraint.CHOICE, choices=("a", "b")),
        skip_special_tokens=False,
    )
    batch = ServiceClass.BATCH
    answer = apis.client.generate(
        "hi", sampling, priority=-2, service_class=batch, stale_kv=StaleKv.ABORT
    )
    assert [delta async for delta in answer]
    made = apis.generator.requests[0]
    assert (made.sampling, made.priority, made.service_class) == (sampling, -2, batch)
    assert made.stale_kv is StaleKv.ABORT


async def test_models_are_listed(apis: RouterApis) -> None:
    assert await apis.client.list_models() == [ModelCard("demo", 64, 300)]


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("full", retry_after_s=2.5),
        InvalidRequest("the grammar is broken", field="structured_output"),
        TransferFailed("no KV came"),
    ],
)
@pytest.mark.parametrize("before", [(), ANSWER[:1]])
async def test_error_keeps_class_field_and_retry_after(
    apis: RouterApis, error: Any, before: tuple[AnswerDelta, ...]
) -> None:
    apis.generator.script = (*before, error)
    texts: list[str] = []

    async def read() -> None:
        nonlocal texts
        async for delta in apis.client.generate("hi"):
            texts += [delta.text]

    with pytest.raises(type(error)) as caught:
        await read()
    assert texts == [delta.text for delta in before]
    got = caught.value
    assert (got.message, got.field) == (error.message, error.field)
    assert got.retry_after_s == error.retry_after_s


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("no worker")])
async def test_a_rejection_has_retry_after_even_without_a_prediction(
    apis: RouterApis, error: Any
) -> None:
    apis.generator.script = (error,)
    with pytest.raises(type(error)) as caught:
        _ = [delta async for delta in apis.client.generate("hi")]
    assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize("script", [(Hold.FOR_EVER,), (ANSWER[0], Hold.FOR_EVER)])
async def test_cancelled_call_leaves_the_answer(apis: RouterApis, script: tuple[Any, ...]) -> None:
    apis.generator.script = script

    async def read() -> None:
        async with aclosing(apis.client.generate("hi")) as answer:
            async for _ in answer:
                pass

    reader = asyncio.create_task(read())
    await apis.generator.waiting.wait()
    assert not apis.generator.left.is_set()
    reader.cancel()
    await apis.generator.left.wait()
    with pytest.raises(asyncio.CancelledError):
        await reader


async def test_an_error_after_a_cancelled_call_is_read(
    apis: RouterApis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio logs one that nobody reads."""
    unread: list[dict[str, Any]] = []
    began, ended = asyncio.Event(), asyncio.Event()

    async def serve(request: GenerateRequest, out: Out) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
            raise DeadlineExceeded("the deadline passed")

    monkeypatch.setattr(apis.generator, "serve", serve)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    stream = apis.client.generate("hi")
    reader = asyncio.ensure_future(anext(stream))
    await began.wait()
    reader.cancel()
    await asyncio.wait([reader])
    await ended.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    gc.collect()
    assert unread == []


async def test_deadline_of_the_call_is_the_requests(apis: RouterApis) -> None:
    before = time.monotonic()
    _ = [delta async for delta in apis.client.generate("hi", timeout_s=20.0)]
    _ = [delta async for delta in apis.client.generate("hi")]
    after = time.monotonic()
    first, second = (request.deadline for request in apis.generator.requests)
    assert first is not None
    assert second is not None
    # gRPC rounds a timeout up on its way.
    assert before < first < before + TIMEOUT_S
    assert before + TIMEOUT_S <= second <= after + TIMEOUT_S


async def test_passed_deadline_ends_the_call_and_leaves_the_answer(apis: RouterApis) -> None:
    apis.generator.script = (Hold.FOR_EVER,)
    # On a slow machine it may pass before the call has come to the generator.
    while not apis.generator.requests:
        with pytest.raises(DeadlineExceeded):
            _ = [delta async for delta in apis.client.generate("hi", timeout_s=0.2)]
    await apis.generator.left.wait()
