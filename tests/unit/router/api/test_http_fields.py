"""Fields of the OpenAI API: each is honoured as the table says, or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from scripted import CHAT, COMPLETIONS, MAX_MODEL_LEN, chat, completion

from pdserve.types import Constraint, SamplingParams, ServiceClass, StructuredOutput
from router.api.openai import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripted import Apis


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
    (CHAT, chat(service_tier="priority"), VALUE, "service_tier"),
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
    (CHAT, chat(logit_bias={"1": "2"}), VALUE, "logit_bias"),
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


async def assert_served(apis: Apis) -> None:
    status, answer = await apis.post(CHAT, chat())
    assert status == 200, answer


async def test_bad_requests_are_refused_by_name_and_hurt_no_other(apis: Apis) -> None:
    wrong: list[object] = []
    for path, body, code, field in BAD_REQUESTS:
        status, answer = await apis.post(path, body)
        error = answer.get("error", {})
        got = (status, error.get("code"), error.get("param"), error.get("type"))
        if got != (400, code, field, "invalid_request_error") or not error["message"]:
            wrong.append((path, body, got))
        if apis.generator.requests:
            wrong.append((path, body, "it reached the generator"))
        await assert_served(apis)
        apis.generator.requests.clear()
    assert not wrong, "\n".join(map(repr, wrong))


@pytest.mark.parametrize(
    ("body", "lengths"),
    [
        (completion(prompt=[1] * 60, max_tokens=5), ("60", "5", "64")),
        (completion(prompt=[1] * 70), ("70", "64")),
    ],
)
async def test_context_length_error_has_both_lengths(
    apis: Apis, body: object, lengths: tuple[str, ...]
) -> None:
    _, answer = await apis.post(COMPLETIONS, body)
    assert all(length in answer["error"]["message"] for length in lengths), answer


async def test_message_of_a_refusal_names_the_field_once(apis: Apis) -> None:
    for body, message in (
        (chat(tools=[]), "'tools' is not supported"),
        (chat(store=True), "'store' is not supported: answers are not stored"),
        (chat(temprature=0), "unknown field 'temprature'"),
        (chat(n=0), "'n': expected int >= 1"),
        ({"messages": []}, "'messages': expected array of length >= 1"),
    ):
        _, answer = await apis.post(CHAT, body)
        assert answer["error"]["message"] == message


SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_tokens": MAX_MODEL_LEN - 4}),
    ({"max_tokens": None, "stop": None}, {"max_tokens": MAX_MODEL_LEN - 4}),
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"max_completion_tokens": 3}, {"max_tokens": 3}),
    ({"stop": "."}, {"stop": (".",)}),
    ({"stop": [".", "!"]}, {"stop": (".", "!")}),
    ({"temperature": 0, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
    ({"top_k": 5, "min_p": 0.1, "seed": -3}, {"top_k": 5, "min_p": 0.1, "seed": -3}),
    ({"min_tokens": 2, "ignore_eos": True}, {"min_tokens": 2, "ignore_eos": True}),
    (
        {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5},
    ),
    ({"logit_bias": {"5": -100}}, {"logit_bias": {5: -100.0}}),
    ({"stop_token_ids": [7]}, {"stop_token_ids": (7,)}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": False}, {"logprobs": None}),
    ({"response_format": {"type": "text"}}, {"structured_output": None}),
    (
        {"response_format": {"type": "json_object"}},
        {"structured_output": StructuredOutput(Constraint.JSON_OBJECT)},
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
        {"structured_output": StructuredOutput(Constraint.JSON_SCHEMA, "{}")},
    ),
    (
        {"structured_outputs": {"json": '{"type": "object"}'}},
        {"structured_output": StructuredOutput(Constraint.JSON_SCHEMA, '{"type":"object"}')},
    ),
    (
        {"structured_outputs": {"regex": "a+"}},
        {"structured_output": StructuredOutput(Constraint.REGEX, "a+")},
    ),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_output": StructuredOutput(Constraint.CHOICE, choices=("a", "b"))},
    ),
    (
        {"structured_outputs": {"grammar": "root ::= x"}},
        {"structured_output": StructuredOutput(Constraint.GRAMMAR, "root ::= x")},
    ),
    # Values that say what we do anyway.
    (
        {
            "n": 1,
            "store": False,
            "modalities": ["text"],
            "tool_choice": "none",
            "service_tier": "auto",
            "tools": None,
            "prompt_cache_key": "k",
            "safety_identifier": "s",
        },
        {},
    ),
]


async def test_sampling_reaches_the_generator_as_it_was_asked_for(apis: Apis) -> None:
    for asked, expected in SAMPLING:
        status, answer = await apis.post(CHAT, chat(**asked))
        assert status == 200, answer
        sampling = apis.generator.requests.pop().sampling
        plain = {"max_tokens": MAX_MODEL_LEN - 4, **expected}
        assert sampling == SamplingParams(**plain), asked


async def test_the_order_is_asked_for_under_the_names_of_vllm_and_openai(apis: Apis) -> None:
    for body in (chat(priority=-3, service_tier="flex"), chat(service_tier="default")):
        status, answer = await apis.post(CHAT, body)
        assert status == 200, answer
    await apis.post(COMPLETIONS, completion(priority=7, service_tier="flex"))
    interactive, batch = ServiceClass.INTERACTIVE, ServiceClass.BATCH
    asked = [(r.priority, r.service_class) for r in apis.generator.requests]
    assert asked == [(-3, batch), (0, interactive), (7, batch)]


async def test_completion_without_a_length_makes_16_tokens(apis: Apis) -> None:
    await apis.post(COMPLETIONS, completion())
    assert apis.generator.requests[0].sampling.max_tokens == 16


async def test_chat_is_rendered_by_the_models_template(
    apis: Apis, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    conversation = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in "bc"]},
        {"role": "assistant", "content": "d", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "e"},
    ]
    status, answer = await apis.post(CHAT, chat(messages=conversation))
    assert status == 200, answer
    rendered = "<|system|>a<|user|>b\nc<|assistant|>d<|user|>e<|assistant|>"
    assert apis.generator.requests[0].prompt_token_ids == token_ids(rendered)


@pytest.mark.parametrize(
    ("body", "base"),
    [
        (ChatRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_official_api_is_known(body: Any, base: Any) -> None:
    defined = {*base.__annotations__, "stream"}
    assert defined - set(body.__struct_fields__) == set()
