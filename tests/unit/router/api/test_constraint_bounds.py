"""The bounds on constraints (router/admission/constraints.py) hold for each way into the router."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pdserve.net import rpc
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub
from tests.support.router_apis import CHAT, COMPLETIONS, HELLO, MODEL

if TYPE_CHECKING:
    from tests.support.router_apis import RouterApis

# It crashed xgrammar inside workers.
PATTERN = "(" * 30_000 + "a" + ")" * 30_000
HOSTILE = {"type": "string", "pattern": PATTERN}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": HOSTILE}}
ARGUMENTS = {"properties": {"a": HOSTILE}}
FUNCTION = {"name": "f", "parameters": ARGUMENTS, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
ASKED = {"model": MODEL, "max_tokens": 9, "messages": HELLO}
RESPONSES: dict[str, Any] = {"model": MODEL, "input": "hi"}
MESSAGES_FORMAT = {"format": {"type": "json_schema", "schema": HOSTILE}}
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "a", "schema": HOSTILE}}
CUSTOM = {"name": "f", "input_schema": {"type": "object", **ARGUMENTS}}
WAYS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {**ASKED, "response_format": JSON_FORMAT}, "response_format"),
    (CHAT, {**ASKED, "structured_outputs": {"json": HOSTILE}}, "structured_outputs"),
    (CHAT, {**ASKED, "structured_outputs": {"json": json.dumps(HOSTILE)}}, "structured_outputs"),
    (CHAT, {**ASKED, "structured_outputs": {"regex": PATTERN}}, "structured_outputs"),
    (CHAT, {**ASKED, "structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs"),
    (CHAT, {**ASKED, "structured_outputs": {"grammar": PATTERN}}, "structured_outputs"),
    (CHAT, {**ASKED, "tools": [TOOL]}, "tools[0].function.parameters"),
    (CHAT, {**ASKED, "tools": [TOOL], "tool_choice": "required"}, "tools[0].function.parameters"),
    (COMPLETIONS, {"prompt": ["a", "b"], "response_format": JSON_FORMAT}, "response_format"),
    ("/v1/messages", {**ASKED, "output_config": MESSAGES_FORMAT}, "output_config.format"),
    ("/v1/messages", {**ASKED, "tools": [CUSTOM]}, "tools[0].function.parameters"),
    ("/v1/responses", {**RESPONSES, "text": TEXT_FORMAT}, "text.format"),
    (
        "/v1/responses",
        {**RESPONSES, "tools": [{"type": "function", **FUNCTION}]},
        "tools[0].function.parameters",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), WAYS)
async def test_http_refuses_a_hostile_constraint_by_its_field(
    apis: RouterApis, path: str, body: dict[str, Any], field: str
) -> None:
    status, answer = await apis.post(path, body)
    assert status == 400, answer
    assert f"'{field}': has " in answer["error"]["message"]
    assert "; the limit is " in answer["error"]["message"]
    assert not apis.generator.requests


async def test_grpc_refuses_a_hostile_constraint_by_its_field(apis: RouterApis) -> None:
    tool = g.Tool(name="f", parameters_json=json.dumps(ARGUMENTS))
    messages = g.ChatMessages(messages=[g.ChatMessage(role="user", content="hi")])
    requests = [
        (g.GenerateRequest(text="a", sampling=c.SamplingParams(structured_output=made)), "struct")
        for made in (
            c.StructuredOutput(json_schema=json.dumps(HOSTILE)),
            c.StructuredOutput(regex=PATTERN),
            c.StructuredOutput(grammar=PATTERN),
            c.StructuredOutput(choice=c.StructuredOutput.Choices(value=["a"] * 1025)),
            c.StructuredOutput(structural_tag=json.dumps({"format": HOSTILE})),
        )
    ]
    requests.append((g.GenerateRequest(messages=messages, tools=[tool]), "tools[0]"))
    async with rpc.open_channel(apis.grpc_address) as channel:
        stub = GenerationStub(channel)
        for request, field in requests:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [message async for message in stub.Generate(request)]
            error = rpc.error_from_rpc(caught.value)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.field.startswith(field)
            assert "; the limit is " in error.message
    assert not apis.generator.requests
