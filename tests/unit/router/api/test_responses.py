"""OpenAI's Responses API, with OpenAI's own client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, patch

import openai
import pydantic
import pytest

from pdserve.errors import PdserveError, QuotaExceeded, TransferFailed
from pdserve.types import (
    Constraint,
    FinishReason,
    PositionLogprobs,
    SamplingParams,
    ServiceClass,
    StructuredOutput,
    TokenLogprob,
    Usage,
)
from router.attempt.answer import AnswerDelta
from router.store.database import StoreUnavailable
from router.store.responses import ResponseStore
from tests.support.router_apis import ANSWER, ANSWER_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.router_apis import RouterApis

RESPONSES = "/v1/responses"
HI = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"model": "demo", "input": "hi"}


async def test_a_whole_response_is_what_the_client_expects(official: openai.AsyncOpenAI) -> None:
    response = await official.responses.create(
        **ASKED, metadata={"a": "b"}, store=True, max_output_tokens=9, temperature=0.5
    )
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text) == ("completed", ANSWER_TEXT)
    assert (response.metadata, response.max_output_tokens) == ({"a": "b"}, 9)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 4, 11)
    assert usage.input_tokens_details.cached_tokens == 2
    assert (response.model_extra or {})["pdserve"]["receipt"]["prefill_worker"] == "prefill-0"


async def test_a_streamed_response_is_the_whole_one(official: openai.AsyncOpenAI) -> None:
    async with official.responses.stream(**ASKED) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * 3,
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert [x.sequence_number for x in events] == list(range(len(events)))
    whole = await official.responses.create(**ASKED)
    assert response.output_text == whole.output_text == ANSWER_TEXT
    assert response.usage == whole.usage


async def test_a_response_that_is_cut_is_incomplete(
    apis: RouterApis, official: openai.AsyncOpenAI
) -> None:
    last = AnswerDelta((1,), "a", finish_reason=FinishReason.LENGTH, usage=Usage(1, 1))
    apis.generator.script = (last,)
    response = await official.responses.create(**ASKED)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events = [x async for x in await official.responses.create(**ASKED, stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_logprobs_come_where_they_are_included(
    apis: RouterApis, official: openai.AsyncOpenAI
) -> None:
    logprobs = (PositionLogprobs(TokenLogprob(1, "a", -0.5, 1)),)
    last = AnswerDelta((1,), "a", logprobs, FinishReason.STOP, usage=Usage(1, 1))
    apis.generator.script = (last,)
    included: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await official.responses.create(**ASKED, **included)
    (item,) = response.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert [(x.token, x.logprob) for x in part.logprobs or ()] == [("a", -0.5)]
    assert apis.generator.requests[0].sampling.logprobs == 2
    events = [x async for x in await official.responses.create(**ASKED, **included, stream=True)]
    (delta,) = [x for x in events if x.type == "response.output_text.delta"]
    assert [x.logprob for x in delta.logprobs] == [-0.5]


class City(pydantic.BaseModel):
    name: str


async def test_an_answer_follows_the_clients_schema(
    apis: RouterApis, official: openai.AsyncOpenAI
) -> None:
    last = AnswerDelta((1,), '{"name":"Oslo"}', finish_reason=FinishReason.STOP, usage=Usage(1, 1))
    apis.generator.script = (last,)
    response = await official.responses.parse(**ASKED, text_format=City)
    assert response.output_parsed == City(name="Oslo")
    constraint = apis.generator.requests[0].sampling.structured_output
    assert constraint is not None
    assert constraint.kind is Constraint.JSON_SCHEMA


HISTORY = [
    {"role": "developer", "content": "a"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "so "}],
    },
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
    },
    {"role": "user", "content": "d"},
]


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"instructions": "x"}, "<|system|>x<|user|>hi<|assistant|>"),
        (
            {"input": HISTORY},
            "<|system|>a<|user|>b<|assistant|>so c<|user|>d<|assistant|>",
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "<|user|>hilow<|assistant|>"),
    ],
)
async def test_items_are_rendered_by_the_models_template(
    apis: RouterApis,
    token_ids: Callable[[str], tuple[int, ...]],
    fields: dict[str, Any],
    rendered: str,
) -> None:
    status, answer = await apis.post(RESPONSES, {**ASKED, **fields})
    assert status == 200, answer
    assert apis.generator.requests[0].prompt_token_ids == token_ids(rendered)


async def test_sampling_and_order_reach_the_generator(apis: RouterApis) -> None:
    fields = {"top_p": 0.9, "top_k": 3, "priority": 2, "service_tier": "flex", "cache_salt": "s"}
    form = {"format": {"type": "json_object"}}
    status, answer = await apis.post(
        RESPONSES, {**ASKED, **fields, "max_output_tokens": 9, "text": form}
    )
    assert status == 200, answer
    made = apis.generator.requests[0]
    constraint = StructuredOutput(Constraint.JSON_OBJECT)
    assert made.sampling == SamplingParams(
        max_tokens=9, top_p=0.9, top_k=3, structured_output=constraint
    )
    assert (made.priority, made.service_class) == (2, ServiceClass.BATCH)
    assert made.cache_salt == "s"


async def test_a_request_has_the_sampling_fields_of_vllm(
    apis: RouterApis, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    plain = {
        "seed": 5,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    more = {
        "stop": ["."],
        "stop_token_ids": [7],
        "logit_bias": {"3": 1.0},
        "request_id": "mine",
        "structured_outputs": {"regex": "a+"},
        "chat_template_kwargs": {"style": "!"},
    }
    status, answer = await apis.post(RESPONSES, {**ASKED, "max_output_tokens": 9, **plain, **more})
    assert status == 200, answer
    assert answer["id"] == "resp_mine"
    made = apis.generator.requests[0]
    constraint = StructuredOutput(Constraint.REGEX, "a+")
    others: Any = {"stop": (".",), "stop_token_ids": (7,), "logit_bias": {3: 1.0}}
    assert made.sampling == SamplingParams(
        max_tokens=9, structured_output=constraint, **others, **plain
    )
    assert made.prompt_token_ids == token_ids("<|user|>hi!<|assistant|>")


async def test_what_is_not_done_with_stored_responses_is_named(
    official: openai.AsyncOpenAI,
) -> None:
    stored = await official.responses.create(**ASKED)
    for asked, named in (
        (official.responses.retrieve(stored.id, stream=True), "stream"),
        (official.responses.cancel(stored.id), "background"),
        (official.responses.input_items.list(stored.id), "input_items"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await asked
        assert caught.value.param == named


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": "a" * 100}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [HISTORY[0], {"type": "item_reference", "id": "x"}]}, "input[1].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
        ),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 64}, "max_output_tokens"),
        ({"surprise": 1}, "surprise"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        (
            {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
            "structured_outputs",
        ),
    ],
)
async def test_a_bad_field_is_named(apis: RouterApis, fields: dict[str, Any], field: str) -> None:
    status, answer = await apis.post(RESPONSES, {**ASKED, **fields})
    assert (status, answer["error"]["param"]) == (400, field)


async def test_a_failed_stream_ends_with_its_error(
    apis: RouterApis, official: openai.AsyncOpenAI
) -> None:
    apis.generator.script = (ANSWER[0], TransferFailed("lost"))
    events = [x async for x in await official.responses.create(**ASKED, stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "lost"


async def test_a_stored_response_is_shown_continued_and_deleted(
    apis: RouterApis, official: openai.AsyncOpenAI, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    apis.generator.script = (
        AnswerDelta((1,), "yo", finish_reason=FinishReason.STOP, usage=Usage(1, 1)),
    )
    first = await official.responses.create(**ASKED, instructions="x")
    assert await official.responses.retrieve(first.id) == first
    # Streamed answers are stored too, and their conversation is that of all before.
    stream = await official.responses.create(
        model="demo", input="so?", previous_response_id=first.id, stream=True
    )
    last = [event async for event in stream][-1]
    assert last.type == "response.completed"
    assert last.response.previous_response_id == first.id
    await official.responses.create(
        model="demo",
        input=[{"role": "user", "content": "ok"}],
        previous_response_id=last.response.id,
    )
    said = "<|user|>hi<|assistant|>yo<|user|>so?<|assistant|>"
    prompts = [x.prompt_token_ids for x in apis.generator.requests]
    assert prompts[1:] == [token_ids(said), token_ids(f"{said}yo<|user|>ok<|assistant|>")]
    assert [x.session for x in apis.generator.requests] == [first.id] * 3
    await official.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await official.responses.retrieve(first.id)


async def test_a_response_with_store_false_is_not_stored(official: openai.AsyncOpenAI) -> None:
    response = await official.responses.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError):
        await official.responses.retrieve(response.id)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), QuotaExceeded("too many")])
async def test_an_answer_that_cannot_be_stored_is_delivered_with_a_note(
    apis: RouterApis,
    official: openai.AsyncOpenAI,
    monkeypatch: pytest.MonkeyPatch,
    error: PdserveError,
) -> None:
    monkeypatch.setattr(ResponseStore, "keep", AsyncMock(side_effect=error))
    whole = await official.responses.create(**ASKED)
    assert (whole.status, (whole.model_extra or {})["store"]) == ("completed", False)
    stream = await apis.stream(RESPONSES, {**ASKED, "stream": True})
    events = [line for line in stream.splitlines() if line.startswith(("event", ":"))]
    assert events[-2:] == ["event: response.completed", f": not stored: {error.message}"]


async def test_fields_without_effect_are_not_stored(apis: RouterApis) -> None:
    asked = {"input": [{"type": "reasoning", "encrypted_content": "x" * 1000}, HI]}
    kept = AsyncMock()
    with patch.object(ResponseStore, "keep", kept):
        assert (await apis.post(RESPONSES, asked))[0] == 200
    (response,) = kept.await_args.args
    assert json.loads(response.items) == [{"type": "reasoning"}, HI]
