"""Anthropic's Messages API, with Anthropic's own client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from pdserve.errors import Overloaded, TransferFailed, Unavailable, UnsupportedField
from pdserve.types import Constraint, FinishReason, SamplingParams, StructuredOutput, Usage
from router.attempt.answer import AnswerDelta
from router.dialects.anthropic import MessagesRequest
from router.dialects.fields import read
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


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=0af3;"
BLOCKS = [{"type": "text", "text": BILLING}, {"type": "text", "text": "a"}]
SYSTEM = {"role": "system", "content": BLOCKS}
ITEMS = [{**x, "type": "input_text"} for x in BLOCKS]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {**ASKED, "system": BLOCKS}),
        (MESSAGES, {**ASKED, "system": f"{BILLING}\na"}),
        (MESSAGES, {**ASKED, "system": BILLING, "messages": [SYSTEM, SAID]}),
        ("/v1/chat/completions", {"messages": [SYSTEM, SAID]}),
        ("/v1/responses", {"input": "hi", "instructions": f"{BILLING}\na"}),
        ("/v1/responses", {"input": [{"role": "developer", "content": ITEMS}, SAID]}),
    ],
)
async def test_the_billing_line_of_claude_code_does_not_change_the_prompt(
    apis: RouterApis, token_ids: Callable[[str], tuple[int, ...]], path: str, fields: dict[str, Any]
) -> None:
    status, answer = await apis.post(path, fields)
    assert status == 200, answer
    expected = token_ids("<|system|>a<|user|>hi<|assistant|>")
    assert apis.generator.requests[0].prompt_token_ids == expected


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


async def test_anthropics_tool_runner_goes_on_without_a_thread(
    apis: RouterApis, claude: anthropic.AsyncAnthropic
) -> None:
    runner = claude.beta.messages.tool_runner(**ASKED, tools=[])
    message = await runner.until_done()
    assert [x.text for x in message.content if x.type == "text"] == [ANSWER_TEXT]
    status, answer = await apis.post(MESSAGES, {**ASKED, "thread": {"type": "create"}})
    assert (status, answer["error"]["details"]["error_code"]) == (400, "thread_unsupported_request")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", MESSAGES, 200),
        ("POST", f"{MESSAGES}/count_tokens", 200),
        ("GET", MESSAGES, 405),
        ("POST", f"{MESSAGES}/batches", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/files", 400),
    ],
)
async def test_every_response_to_anthropics_client_has_its_form_and_an_id(
    apis: RouterApis, method: str, path: str, status: int
) -> None:
    # A path below /v1/messages needs no header.
    sent = {} if path.startswith(MESSAGES) else {"anthropic-version": "2023-06-01"}
    body = {x: y for x, y in ASKED.items() if x != "max_tokens" or path == MESSAGES}
    url = apis.url + path
    async with apis.session.request(method, url, json=body, headers=sent) as response:
        answer = await response.json()
        assert response.status == status, answer
        request_id = response.headers["request-id"]
    assert request_id == response.headers["x-request-id"]
    if status >= 400:
        assert answer["type"] == "error"
        assert answer["error"]["message"]
        assert answer.get("request_id", request_id) == request_id
    for streamed in (False, True):
        headers = {"x-request-id": "mine"}
        body = {**ASKED, "stream": streamed}
        async with apis.session.post(apis.url + MESSAGES, json=body, headers=headers) as response:
            assert response.headers["request-id"] == "mine"


async def test_anthropics_client_lists_models(
    apis: RouterApis, claude: anthropic.AsyncAnthropic
) -> None:
    models = [model async for model in claude.models.list()]
    assert [(x.id, x.type, x.display_name) for x in models] == [("demo", "model", "demo")]
    assert await claude.models.retrieve("demo") == models[0]
    assert models[0].created_at.year > 2000
    async with apis.session.get(f"{apis.url}/v1/models") as response:
        assert (await response.json())["object"] == "list"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input_examples": [{}], "defer_loading": False, "allowed_callers": ["direct"]}, ""),
        ({"defer_loading": None, "allowed_callers": None, "type": None}, ""),
        ({"defer_loading": True}, "tools[0].defer_loading"),
        ({"allowed_callers": ["code_execution_20250825"]}, "tools[0].allowed_callers"),
    ],
)
def test_fields_of_custom_tools(fields: dict[str, Any], field: str) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, **fields}
    body = read(MessagesRequest, json.dumps({**ASKED, "tools": [tool]}).encode())
    if not field:
        assert body.read_tools()[0]
        return
    with pytest.raises(UnsupportedField) as caught:
        body.read_tools()
    assert caught.value.field == field
