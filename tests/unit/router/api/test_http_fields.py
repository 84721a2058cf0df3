"""Fields of the OpenAI API: each is honoured as the table says, or refused by name."""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from pdserve.errors import InvalidRequest
from pdserve.types import Constraint, SamplingParams, ServiceClass, StructuredOutput
from router.api.openapi import openapi
from router.api.route_table import ROUTES
from router.dialects.anthropic import CountTokensRequest, MessagesRequest
from router.dialects.fields import Strict, read
from router.dialects.openai import ChatRequest, CompletionRequest
from router.dialects.responses import ResponsesRequest
from router.dialects.tokens import TokenizeRequest
from tests.support.router_apis import CHAT, COMPLETIONS, JSON, MAX_MODEL_LEN, chat, completion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from router.dialects.fields import Body
    from tests.support.router_apis import RouterApis

VALUE, UNSUPPORTED, UNKNOWN = "invalid_value", "unsupported_parameter", "unknown_parameter"
TOO_LONG = "context_length_exceeded"

# Values of a field that either endpoint refuses with its name.
BAD_VALUES: dict[str, list[Any]] = {
    "model": [7, ""],
    "temperature": [True, "1", -0.1],
    "top_p": [0, 1.1],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "seed": [1.5, 1 << 63],
    "max_tokens": [0, True, 2.0],
    "min_tokens": [64],
    "n": [0, 129],
    "stop": ["", ["a"] * 17, 1],
    "stop_token_ids": [[300]],
    "logit_bias": [{"x": 1}, {"300": 1}, {"1": 101}, {"1": "2"}, [1]],
    "ignore_eos": [1],
    "skip_special_tokens": ["no"],
    "priority": [1 << 63, "low"],
    "service_tier": ["fast", 1],
    "request_id": ["a b", 7],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],  # without a stream
    "response_format": ["json_object"],
    "structured_outputs": [{}, {"regex": "a", "json": {}}],
}
# Values that the API defines and pdserve refuses.
NOT_DONE: dict[str, list[Any]] = {
    "functions": [[]],
    "function_call": ["auto"],
    "audio": [{"voice": "x", "format": "wav"}],
    "modalities": [["text", "audio"]],
    "prediction": [{"type": "content"}],
    "bad_words": [["a"]],
    "length_penalty": [0.5],
    "prompt_logprobs": [1],
    "verbosity": ["low"],
    "web_search_options": [{}],
}


def messages(*values: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": list(values)}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def raw(text: bytes) -> bytes:
    return b'{"model":"demo","prompt":"hi",' + text + b"}"


VIDEO = {"type": "video_url", "video_url": {"url": "x"}}
# (path, body, code, field); the status is 400.
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
NOT_A_TOOL = {"type": "function", "function": {"name": "get_weather"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def nested(depth: int) -> dict[str, Any]:
    return {"properties": {"a": nested(depth - 1)}} if depth else {}


DEEP_TOOL = {"type": "function", "function": {"name": "f", "parameters": nested(40)}}
BAD_REQUESTS: list[tuple[str, object, str, str | None]] = [
    *((CHAT, chat(**{name: x}), VALUE, name) for name, xs in BAD_VALUES.items() for x in xs),
    *(
        (COMPLETIONS, completion(**{name: x}), VALUE, name)
        for name, xs in BAD_VALUES.items()
        for x in xs
    ),
    *((CHAT, chat(**{name: x}), UNSUPPORTED, name) for name, xs in NOT_DONE.items() for x in xs),
    # Bodies that are no request at all.
    *((CHAT, body, VALUE, None) for body in (b"", b"{", b"\x00\xff garbage", b"[]", b"null")),
    (CHAT, b'{"model": "\xff"}', VALUE, None),
    (CHAT, b"[" * 30_000, VALUE, None),
    (COMPLETIONS, raw(b'"temperature":NaN'), VALUE, None),
    (COMPLETIONS, raw(b'"temperature":1e999'), VALUE, "temperature"),
    (COMPLETIONS, raw(b'"seed":' + b"9" * 5000), VALUE, "seed"),
    (COMPLETIONS, b'{"model":"demo","prompt":"\\ud800"}', VALUE, None),
    # Names.
    (CHAT, chat(temprature=0), UNKNOWN, "temprature"),
    (CHAT, chat(prompt="hi"), UNKNOWN, "prompt"),
    (COMPLETIONS, completion(messages=[]), UNKNOWN, "messages"),
    (CHAT, chat(stream=True, stream_options={"usage": True}), UNKNOWN, "stream_options.usage"),
    (CHAT, chat(response_format={"type": "text", "x": 1}), UNKNOWN, "response_format.x"),
    # Prompts.
    (COMPLETIONS, completion(best_of=2), UNSUPPORTED, "best_of"),
    (COMPLETIONS, completion(max_tokens=0), VALUE, "max_tokens"),
    (
        COMPLETIONS,
        completion(echo=True, logprobs=1, resume_token_ids=[1]),
        VALUE,
        "resume_token_ids",
    ),
    (COMPLETIONS, completion(suffix="end"), UNSUPPORTED, "suffix"),
    (COMPLETIONS, completion(prompt=["a", [2]], n=65), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=["a", "b"], resume_token_ids=[1]), VALUE, "resume_token_ids"),
    (COMPLETIONS, completion(prompt=["a", ""]), VALUE, "prompt[1]"),
    (COMPLETIONS, completion(prompt=[[1], [300]]), VALUE, "prompt[1]"),
    (COMPLETIONS, completion(prompt=["a", 1]), VALUE, "prompt[1]"),
    (COMPLETIONS, completion(prompt=[[1], [2, "a"]]), VALUE, "prompt[1][1]"),
    (COMPLETIONS, {"model": "demo"}, VALUE, "prompt"),
    *((COMPLETIONS, completion(prompt=x), VALUE, "prompt") for x in ("", [], [[]], 7, {})),
    *((COMPLETIONS, completion(prompt=[1, x]), VALUE, "prompt[1]") for x in (True, 2.0, "a", -1)),
    (COMPLETIONS, completion(prompt=[1, 300]), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=[1 << 70]), VALUE, "prompt"),
    (COMPLETIONS, completion(prompt=[1] * 64), TOO_LONG, "prompt"),
    (COMPLETIONS, completion(prompt="a" * 60_000), TOO_LONG, "prompt"),
    (COMPLETIONS, completion(prompt=[1] * 60, max_tokens=5), TOO_LONG, "max_tokens"),
    (COMPLETIONS, completion(logprobs=True), VALUE, "logprobs"),
    (COMPLETIONS, completion(logprobs=21), VALUE, "logprobs"),
    # Conversations.
    (CHAT, chat(reasoning_effort="huge"), VALUE, "reasoning_effort"),
    (CHAT, chat(chat_template_kwargs={"tools": []}), VALUE, "chat_template_kwargs.tools"),
    (
        CHAT,
        chat(add_generation_prompt=True, continue_final_message=True),
        VALUE,
        "add_generation_prompt",
    ),
    (CHAT, chat(max_completion_tokens=63), TOO_LONG, "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=-1), VALUE, "max_completion_tokens"),
    (CHAT, chat(max_tokens=3, max_completion_tokens=4), VALUE, "max_tokens"),
    (CHAT, chat(min_tokens=5, max_tokens=4), VALUE, "min_tokens"),
    (CHAT, chat(n=2, seed=(1 << 63) - 1), VALUE, "seed"),
    (CHAT, messages(user("a" * 100)), TOO_LONG, "messages"),
    (CHAT, {"model": "demo"}, VALUE, "messages"),
    (CHAT, messages(), VALUE, "messages"),
    (CHAT, messages("hi"), VALUE, "messages[0]"),
    (CHAT, messages({"content": "hi"}), VALUE, "messages[0].role"),
    (CHAT, messages(user("a"), {"role": "robot", "content": "hi"}), VALUE, "messages[1].role"),
    (CHAT, messages({"role": "system"}), VALUE, "messages[0].content"),
    (CHAT, messages(user([{"type": "refusal", "refusal": "x"}])), VALUE, "messages[0].content"),
    *((CHAT, messages(user(x)), VALUE, "messages[0].content") for x in (None, [], 7)),
    (CHAT, messages(user(["hi"])), VALUE, "messages[0].content[0]"),
    (CHAT, messages(user([{"type": "text"}])), VALUE, "messages[0].content[0].text"),
    (CHAT, messages(user("a"), user([VIDEO])), VALUE, "messages[1].content[0].type"),
    (CHAT, messages(user("a", weight=1)), UNKNOWN, "messages[0].weight"),
    (CHAT, messages(user("a", name=1)), VALUE, "messages[0].name"),
    (CHAT, messages(user("a", tool_calls=[{}])), VALUE, "messages[0].tool_calls[0].function"),
    (CHAT, messages(user("a", tool_calls=[CALL])), VALUE, "messages[0].tool_calls"),
    (CHAT, messages(user("a", tool_call_id="1")), VALUE, "messages[0].tool_call_id"),
    # Tools. This model's template takes none.
    (CHAT, chat(tools=[{"type": "function"}]), VALUE, "tools[0].function"),
    (CHAT, chat(tools=[{**TOOL, "type": "web_search"}]), VALUE, "tools[0].type"),
    (CHAT, chat(tools=[TOOL, TOOL]), VALUE, "tools"),
    (CHAT, chat(tools=[TOOL] * 513), VALUE, "tools"),
    (CHAT, chat(tools=[DEEP_TOOL]), VALUE, "tools[0].function.parameters"),
    (CHAT, chat(tools=[TOOL], tool_choice="any"), VALUE, "tool_choice"),
    (CHAT, chat(tools=[TOOL], tool_choice=NOT_A_TOOL), VALUE, "tool_choice.function.name"),
    (CHAT, chat(tool_choice="required"), VALUE, "tool_choice"),
    (CHAT, chat(tools=[TOOL], parallel_tool_calls="no"), VALUE, "parallel_tool_calls"),
    (CHAT, chat(stop=["a", 1]), VALUE, "stop[1]"),
    (CHAT, chat(stop_token_ids=["1"]), VALUE, "stop_token_ids[0]"),
    (CHAT, chat(logprobs=5), VALUE, "logprobs"),
    (CHAT, chat(top_logprobs=5), VALUE, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), VALUE, "top_logprobs"),
    # Constraints.
    (CHAT, chat(response_format={"type": "xml"}), VALUE, "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), VALUE, "response_format.json_schema"),
    (CHAT, chat(structured_outputs={"json": "{"}), VALUE, "structured_outputs.json"),
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


async def test_bad_requests_are_refused_by_name_and_hurt_no_other(apis: RouterApis) -> None:
    wrong: list[object] = []
    for path, body, code, field in BAD_REQUESTS:
        status, answer = await apis.post(path, body)
        error = answer.get("error", {})
        got = (status, error.get("code"), error.get("param"), error.get("type"))
        if got != (400, code, field, "invalid_request_error") or apis.generator.requests:
            wrong.append((path, body, got))
        apis.generator.requests.clear()
    assert not wrong, "\n".join(map(repr, wrong))
    assert (await apis.post(CHAT, chat()))[0] == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(bad_words=["a"]), "'bad_words' is not supported"),
        (chat(temprature=0), "unknown field 'temprature'"),
        (chat(n=0), "'n': expected int >= 1"),
        (chat(messages=[]), "'messages': expected array of length >= 1"),
        (
            chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="any"),
            "'tool_choice': must be one of none, auto, required, not 'any'",
        ),
        (
            chat(max_tokens=63),
            "'messages' has 4 tokens and 'max_tokens' is 63; the model's context is 64 tokens",
        ),
    ],
)
async def test_message_of_a_refusal_names_field_value_and_limit_once(
    apis: RouterApis, body: object, message: str
) -> None:
    _, answer = await apis.post(CHAT, body)
    assert answer["error"]["message"] == message


def constrained(kind: Constraint, value: str = "", *choices: str) -> dict[str, Any]:
    return {"structured_output": StructuredOutput(kind, value, choices)}


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
# Fields of a body, and the sampling parameters that differ from the defaults.
HONOURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_tokens": None, "stop": None}, {}),
    ({"model": None}, {}),
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"max_completion_tokens": 3}, {"max_tokens": 3}),
    ({"stop": "."}, {"stop": (".",)}),
    ({"stop": [".", "!"]}, {"stop": (".", "!")}),
    ({"stop_token_ids": [7]}, {"stop_token_ids": (7,)}),
    ({"logit_bias": {"5": -100}}, {"logit_bias": {5: -100.0}}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
    ({"logprobs": False}, {}),
    *(
        (given, given)
        for given in (
            {"n": 3, "temperature": 0.0, "top_p": 0.5},
            {"top_k": 5, "min_p": 0.1, "seed": -3},
            {"min_tokens": 2, "ignore_eos": True},
            {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5},
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
        )
    ),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {"type": "json_object"}}, constrained(Constraint.JSON_OBJECT)),
    ({"response_format": SCHEMA}, constrained(Constraint.JSON_SCHEMA, "{}")),
    (
        {"structured_outputs": {"json": '{"type": "object"}'}},
        constrained(Constraint.JSON_SCHEMA, '{"type":"object"}'),
    ),
    ({"structured_outputs": {"json_object": True}}, constrained(Constraint.JSON_OBJECT)),
    ({"structured_outputs": {"regex": "a+"}}, constrained(Constraint.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, constrained(Constraint.CHOICE, "", "a", "b")),
    (
        {"structured_outputs": {"grammar": "root ::= x"}},
        constrained(Constraint.GRAMMAR, "root ::= x"),
    ),
    # Values that ask for what pdserve does anyway.
    ({"n": 1, "store": False, "modalities": ["text"], "tool_choice": "none", "tools": None}, {}),
    ({"store": True, "service_tier": "priority", "documents": None, "prompt_logprobs": None}, {}),
    ({"bad_words": [], "length_penalty": 1.0, "truncate_prompt_tokens": None}, {}),
    ({"service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "user": "u"}, {}),
]


async def test_sampling_reaches_the_generator_as_it_was_asked_for(apis: RouterApis) -> None:
    for given, expected in HONOURED:
        status, answer = await apis.post(CHAT, chat(**given))
        made = apis.generator.requests.pop() if status == 200 else None
        assert made is not None, (given, answer)
        plain = {"max_tokens": MAX_MODEL_LEN - 4, **expected}
        assert made.sampling == SamplingParams(**plain), given


async def test_the_order_is_asked_for_under_the_names_of_vllm_and_openai(apis: RouterApis) -> None:
    for path, body in (
        (CHAT, chat(priority=-3, service_tier="flex")),
        (CHAT, chat(service_tier="default")),
        (COMPLETIONS, completion(priority=7, service_tier="flex")),
    ):
        status, answer = await apis.post(path, body)
        assert status == 200, answer
    interactive, batch = ServiceClass.INTERACTIVE, ServiceClass.BATCH
    asked = [(r.priority, r.service_class) for r in apis.generator.requests]
    assert asked == [(-3, batch), (0, interactive), (7, batch)]
    assert apis.generator.requests[-1].sampling.max_tokens == 16, "OpenAI's default"


async def test_chat_is_rendered_by_the_models_template(
    apis: RouterApis, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    conversation = [
        {"role": "developer", "content": "a"},
        user([{"type": "text", "text": x, "cache_control": {"type": "ephemeral"}} for x in "bc"]),
        {"role": "assistant", "content": "d", "refusal": None, "tool_calls": [], "parsed": {}},
        {"role": "assistant", "content": "g", "reasoning": "f"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": []},
        {"role": "assistant"},
        user("e"),
    ]
    status, answer = await apis.post(CHAT, chat(messages=conversation))
    assert status == 200, answer
    rendered = (
        "<|system|>a<|user|>b\nc<|assistant|>d<|assistant|>fg"
        + "<|assistant|>" * 3
        + "<|user|>e<|assistant|>"
    )
    assert apis.generator.requests[0].prompt_token_ids == token_ids(rendered)


async def test_a_field_of_other_servers_is_accepted_only_if_it_changes_nothing(
    apis: RouterApis,
) -> None:
    for path, body, kind in (
        (CHAT, chat(), ChatRequest),
        (COMPLETIONS, completion(), CompletionRequest),
    ):
        for name, known in kind.known.items():
            for value in (None, *known.accepts):
                status, answer = await apis.post(path, {**body, name: value})
                assert status == 200, (name, value, answer)
            status, answer = await apis.post(path, {**body, name: "something"})
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (400, UNSUPPORTED, name)
            assert error["message"].startswith(f"'{name}' is not supported")


@pytest.mark.parametrize(
    ("options", "rendered"),
    [
        ({}, "<|user|>hi<|assistant|>"),
        ({"reasoning_effort": "low"}, "<|user|>hilow<|assistant|>"),
        ({"chat_template_kwargs": {"style": "!"}}, "<|user|>hi!<|assistant|>"),
        ({"add_generation_prompt": False}, "<|user|>hi"),
        ({"continue_final_message": True, "chat_template_kwargs": {"style": "!"}}, "<|user|>hi"),
    ],
)
async def test_a_request_controls_how_its_conversation_is_rendered(
    apis: RouterApis,
    token_ids: Callable[[str], tuple[int, ...]],
    options: dict[str, Any],
    rendered: str,
) -> None:
    status, answer = await apis.post(CHAT, chat(**options))
    assert status == 200, answer
    assert apis.generator.requests[0].prompt_token_ids == token_ids(rendered)


async def test_the_request_id_may_be_in_the_body(apis: RouterApis) -> None:
    assert (await apis.post(CHAT, chat(request_id="7")))[1]["id"] == "chatcmpl-7"
    headers = {"x-request-id": "8"}
    assert (await apis.post(CHAT, chat(request_id="7"), headers))[1]["id"] == "chatcmpl-8"


@pytest.mark.parametrize(
    ("body", "base"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_official_api_is_known(body: Any, base: Any) -> None:
    assert {*base.__annotations__, "stream"} <= set(body.__struct_fields__)


def parts_of_bodies(kind: type[Strict] = Strict) -> Iterator[type[Strict]]:
    for part in kind.__subclasses__():
        yield part
        yield from parts_of_bodies(part)


def test_the_type_of_every_optional_field_has_null() -> None:
    for part in parts_of_bodies():
        for field in msgspec.structs.fields(part):
            if not field.required:
                assert msgspec.convert(None, field.type) is None, (part, field.name)


SAYS = {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [CALL]}
NULLABLE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(messages=[user("hi"), SAYS], response_format={"type": "text"}, seed=1)),
    (CHAT, chat(stream=True, stream_options={"include_usage": True})),
    (COMPLETIONS, completion()),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}],
                },
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "c"},
            ],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "system": [{"type": "text", "text": "a"}],
            "messages": [user([{"type": "text", "text": "b"}])],
            "output_config": {"effort": "low"},
            "thinking": {"type": "disabled"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [user("b")]}),
    ("/v1/embeddings", {"input": "a"}),
    *((path, {"text_1": "a", "text_2": ["b"]}) for path in ("/v1/score", "/score")),
    *((x, {"query": "a", "documents": ["b"]}) for x in ("/v1/rerank", "/v2/rerank", "/rerank")),
    ("/pooling", {"input": "a"}),
    ("/v2/embed", {"texts": ["a"]}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [1]}),
    ("/v1/batches", {"input_file_id": "f", "endpoint": CHAT, "completion_window": "24h"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"seed": 1}}),
    *((x, {"mode": "keep"}) for x in ("/pause", "/pause_generation")),
    *((x, {}) for x in ("/resume", "/continue_generation")),
    *((x, {"weight_dir": "/w"}) for x in ("/update_weights", "/update_weights_from_disk")),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}),
]


# A required field that is null; what belongs to `stream` without it; an item without its type,
# which is read as a message.
REFUSED = re.compile("is required$|requires stream: true$|^unknown field 'input|not supported$")


def with_a_null(value: Any) -> Iterator[Any]:
    """Yield `value` with each of its fields, at any depth, set to null."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield {**value, name: None}
            yield from ({**value, name: x} for x in with_a_null(inner))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from ([*value[:i], x, *value[i + 1 :]] for x in with_a_null(inner))


async def test_null_means_not_set(apis: RouterApis) -> None:
    body_of = {x.path: x.body for x in ROUTES if x.body is not None}
    asked = {x for x, _ in NULLABLE}
    assert asked == set(body_of), "every body is tested"

    async def ask(path: str, body: dict[str, Any]) -> tuple[int, str]:
        data = json.dumps(body)
        async with apis.session.post(apis.url + path, data=data, headers=JSON) as response:
            text = await response.text()
        return response.status, "" if response.status == 200 else json.loads(text)["error"][
            "message"
        ]

    for path, body in NULLABLE:
        expected = await ask(path, body)
        for name in body_of[path].__struct_fields__:
            if name not in body:
                assert await ask(path, {**body, name: None}) == expected, (path, name)
        for changed in with_a_null(body):
            status, message = found = await ask(path, changed)
            assert found == expected or (status == 400 and REFUSED.search(message)), changed
            assert status in (200, 400), (changed, message)


async def test_a_field_may_have_the_least_value_that_the_document_says(apis: RouterApis) -> None:
    schemas = openapi(ROUTES)["components"]["schemas"]
    for path, body in NULLABLE:
        if body.get("stream"):
            continue
        (kind,) = [x.body for x in ROUTES if x.path == path and x.body is not None]
        for name, schema in schemas[kind.__name__]["properties"].items():
            for one in schema.get("anyOf", [schema]):
                if "minimum" in one and "only with echo" not in schema.get("description", ""):
                    _, answer = await apis.post(path, {**body, name: one["minimum"]})
                    wrong = (answer.get("error") or {}).get("message", "")
                    assert not wrong.startswith(f"'{name}': expected"), (path, name, wrong)
                    assert "must be" not in wrong, (path, name, wrong)


async def test_the_default_length_of_a_completion_is_what_the_context_leaves(
    apis: RouterApis,
) -> None:
    status, answer = await apis.post(COMPLETIONS, completion(prompt=[1] * 60))
    assert status == 200, answer
    assert apis.generator.requests[0].sampling.max_tokens == 4


async def test_a_body_may_begin_with_a_byte_order_mark(apis: RouterApis) -> None:
    status, answer = await apis.post(CHAT, codecs.BOM_UTF8 + json.dumps(chat()).encode())
    assert status == 200, answer


MANY = [{"role": "user", "content": "a"}] * 4097


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ChatRequest, "messages"),
        (TokenizeRequest, "messages"),
        (MessagesRequest, "messages"),
        (CountTokensRequest, "messages"),
        (ResponsesRequest, "input"),
    ],
)
def test_the_number_of_messages_is_limited(kind: type[Body], field: str) -> None:
    body = {field: MANY, **({"max_tokens": 1} if kind is MessagesRequest else {})}
    with pytest.raises(InvalidRequest, match="4096") as caught:
        read(kind, json.dumps(body).encode())
    assert caught.value.field == field
    assert read(kind, json.dumps({**body, field: MANY[:4096]}).encode())


def test_the_number_of_prompts_is_limited_before_they_are_looked_at() -> None:
    body = read(CompletionRequest, json.dumps({"prompt": ["x", *[7] * 32], "n": 4}).encode())
    with pytest.raises(InvalidRequest, match="holds 33 prompts; at most 32"):
        body.parse()
