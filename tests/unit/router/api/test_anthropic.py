"""Anthropic's Messages API, with Anthropic's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from pdserve.errors import Overloaded, TransferFailed, Unavailable
from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput, Usage
from router.request.answer import AnswerDelta
from tests.support.router_apis import ANSWER, ANSWER_TEXT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.errors import PdserveError
    from tests.support.router_apis import RouterApis

MESSAGES = "/v1/messages"
SAID: dict[str, Any] = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 9, "messages": [SAID]}


@pytest.fixture
async def claude(apis: RouterApis) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=apis.url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_whole_message_is_what_the_client_expects(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.messages.create(**ASKED)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "demo")
    assert [(x.type, x.text) for x in message.content if x.type == "text"] == [
        ("text", ANSWER_TEXT)
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 2, 4)
    assert (message.model_extra or {})["pdserve"]["receipt"]["prefill_worker"] == "prefill-0"


async def test_a_streamed_message_is_the_whole_one(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(**ASKED) as stream:
        kinds = [event.type async for event in stream if event.type != "text"]
        message = await stream.get_final_message()
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    whole = await claude.messages.create(**ASKED)
    assert [x.to_dict() for x in message.content] == [x.to_dict() for x in whole.content]
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 4)


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        (FinishReason.LENGTH, None, "max_tokens"),
        (FinishReason.STOP, ".", "stop_sequence"),
        (FinishReason.STOP, 7, "end_turn"),
    ],
)
async def test_the_reason_of_an_end_has_anthropics_name(
    apis: RouterApis,
    claude: anthropic.AsyncAnthropic,
    finish: FinishReason,
    stop: str | int | None,
    reason: str,
) -> None:
    last = AnswerDelta((1,), "", finish_reason=finish, stop_reason=stop, usage=Usage(1, 1))
    apis.generator.script = (last,)
    whole = await claude.messages.create(**ASKED)
    async with claude.messages.stream(**ASKED) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        found = (message.stop_reason, message.stop_sequence, message.content)
        assert found == (reason, stop if isinstance(stop, str) else None, [])


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"system": "be brief"}, "<|system|>be brief<|user|>hi<|assistant|>"),
        (
            {
                "system": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "b"},
                ]
            },
            "<|system|>a\nb<|user|>hi<|assistant|>",
        ),
        # The answer continues what the assistant has begun.
        ({"messages": [SAID, {"role": "assistant", "content": "I"}]}, "<|user|>hi<|assistant|>I"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "so ", "signature": "x"},
                            {"type": "redacted_thinking", "data": "y"},
                            {"type": "text", "text": "yo"},
                        ],
                    },
                    SAID,
                ]
            },
            "<|assistant|>so yo<|user|>hi<|assistant|>",
        ),
        ({"output_config": {"effort": "low"}}, "<|user|>hilow<|assistant|>"),
    ],
)
async def test_a_conversation_is_rendered_by_the_models_template_and_counted(
    apis: RouterApis,
    token_ids: Callable[[str], tuple[int, ...]],
    fields: dict[str, Any],
    rendered: str,
) -> None:
    status, answer = await apis.post(MESSAGES, {**ASKED, **fields})
    assert status == 200, answer
    expected = token_ids(rendered)
    assert apis.generator.requests[0].prompt_token_ids == expected
    body = {"model": "demo", "messages": [SAID], **fields}
    counted = await apis.post(f"{MESSAGES}/count_tokens", body)
    assert counted == (200, {"input_tokens": len(expected)})


async def test_sampling_reaches_the_generator(
    apis: RouterApis, claude: anthropic.AsyncAnthropic
) -> None:
    await claude.messages.create(
        **ASKED,
        stop_sequences=["."],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": {}}},
    )
    schema = StructuredOutput(Constraint.JSON_SCHEMA, "{}")
    assert apis.generator.requests[0].sampling == SamplingParams(
        max_tokens=9, stop=(".",), temperature=0.5, top_p=0.9, top_k=3, structured_output=schema
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "f"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"surprise": 1}, "surprise"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": 2}, "temperature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
async def test_a_bad_field_is_named_in_anthropics_error(
    apis: RouterApis, fields: dict[str, Any], named: str
) -> None:
    status, answer = await apis.post(MESSAGES, {**ASKED, **fields})
    assert status == 400
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]


@pytest.mark.parametrize(
    ("refusal", "kind", "status"),
    [
        (Overloaded("busy"), anthropic.RateLimitError, 429),
        (Unavailable("no worker"), anthropic.InternalServerError, 503),
    ],
)
async def test_a_refusal_has_the_status_and_the_clients_error(
    apis: RouterApis,
    claude: anthropic.AsyncAnthropic,
    refusal: PdserveError,
    kind: type[anthropic.APIStatusError],
    status: int,
) -> None:
    apis.generator.refusal = refusal
    with pytest.raises(kind) as caught:
        await claude.messages.create(**ASKED)
    assert caught.value.status_code == status
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**{**ASKED, "model": "other"})


async def test_a_stream_that_fails_ends_with_an_error_event(
    apis: RouterApis, claude: anthropic.AsyncAnthropic
) -> None:
    apis.generator.script = (ANSWER[0], TransferFailed("lost"))
    with pytest.raises(anthropic.APIStatusError, match="lost"):
        async with claude.messages.stream(**ASKED) as stream:
            await stream.get_final_message()
