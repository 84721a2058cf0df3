"""What a request asks for reaches the generator, and log probabilities come back in shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted import CHAT, COMPLETIONS, MAX_MODEL_LEN, chat, completion, events

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
from router.answer import AnswerDelta

if TYPE_CHECKING:
    from collections.abc import Callable

    from scripted import Faces


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
async def test_chat_logprobs_have_bytes_and_alternatives(faces: Faces, stream: bool) -> None:
    faces.generator.script = LOGPROBS_SCRIPT
    body = chat(logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        chunks = [x for x in events(await faces.stream(CHAT, body)) if x != "[DONE]"]
        content = [p for chunk in chunks for p in chunk["choices"][0]["logprobs"]["content"]]
    else:
        _, answer = await faces.post(CHAT, body)
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
    assert faces.generator.requests[0].sampling.logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_are_parallel_lists(faces: Faces, stream: bool) -> None:
    faces.generator.script = LOGPROBS_SCRIPT
    body = completion(logprobs=2, stream=stream)
    if stream:
        chunks = [x for x in events(await faces.stream(COMPLETIONS, body)) if x != "[DONE]"]
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    else:
        _, answer = await faces.post(COMPLETIONS, body)
        parts = [answer["choices"][0]["logprobs"]]
    assert {name: [x for part in parts for x in part[name]] for name in parts[0]} == {
        "tokens": ["é", "\ufffd", "!"],
        "token_logprobs": [-0.5, -9999.0, -1.0],
        "top_logprobs": [{"é": -0.5, "x": -2.0}, {"a": -0.1, "\ufffd": -9999.0}, {"!": -1.0}],
        "text_offset": [0, 1, 2],
    }


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
        {"structured_output": StructuredOutput(Constraint.JSON_SCHEMA, '{"type": "object"}')},
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


async def test_sampling_reaches_the_generator_as_it_was_asked_for(faces: Faces) -> None:
    for asked, expected in SAMPLING:
        status, answer = await faces.post(CHAT, chat(**asked))
        assert status == 200, answer
        sampling = faces.generator.requests.pop().sampling
        plain = {"max_tokens": MAX_MODEL_LEN - 4, **expected}
        assert sampling == SamplingParams(**plain), asked


async def test_the_order_is_asked_for_under_the_names_of_vllm_and_openai(faces: Faces) -> None:
    for body in (chat(priority=-3, service_tier="flex"), chat(service_tier="default")):
        status, answer = await faces.post(CHAT, body)
        assert status == 200, answer
    await faces.post(COMPLETIONS, completion(priority=7, service_tier="flex"))
    interactive, batch = ServiceClass.INTERACTIVE, ServiceClass.BATCH
    asked = [(r.priority, r.service_class) for r in faces.generator.requests]
    assert asked == [(-3, batch), (0, interactive), (7, batch)]


async def test_completion_without_a_length_makes_16_tokens(faces: Faces) -> None:
    await faces.post(COMPLETIONS, completion())
    assert faces.generator.requests[0].sampling.max_tokens == 16


async def test_chat_is_rendered_by_the_models_template(
    faces: Faces, token_ids: Callable[[str], tuple[int, ...]]
) -> None:
    conversation = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in "bc"]},
        {"role": "assistant", "content": "d", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "e"},
    ]
    status, answer = await faces.post(CHAT, chat(messages=conversation))
    assert status == 200, answer
    rendered = "<|system|>a<|user|>b\nc<|assistant|>d<|user|>e<|assistant|>"
    assert faces.generator.requests[0].prompt_token_ids == token_ids(rendered)
