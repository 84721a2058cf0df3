"""Guards before the prompt: in every dialect, in small bodies and large ones; and how each dialect
shows that a guard refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import grpc
import msgspec
import openai
import pytest

from pdserve.client import Client
from pdserve.config import GuardConfig, parse
from pdserve.errors import ContentFiltered
from pdserve.model.tokenizer import Conversation
from pdserve.security.patterns import Patterns
from pdserve.types import FinishReason, Usage
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub
from router.attempt.answer import AnswerDelta
from router.dialects.responses import ResponsesRequest
from router.guardrails.guard import Guardrail, Guards, GuardVerdict, PatternChecker
from tests.support.router_apis import CHAT, COMPLETIONS, chat, completion

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.guardrails.guard import Subject
    from tests.support.router_apis import RouterApis

LARGE = 2048
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
KEY, HIDDEN = "sk-abcd", "[x]"


class Notes:
    def note(
        self, guard: str, subject: Subject, verdict: GuardVerdict, took_s: float | None, reason: str
    ) -> None: ...
    def refused(self, subject: Subject, code: str, reason: str) -> None: ...


def built_in(**values: Any) -> Guardrail:
    config = parse(GuardConfig, values)
    patterns = Patterns(config.patterns, config.words)
    return Guardrail(
        config, PatternChecker(patterns, GuardVerdict(config.verdict), HIDDEN), Notes()
    )


@pytest.fixture
def guards() -> Guards:
    keys = {"name": "keys", "patterns": ["sk-[a-z]{4}"], "verdict": "redact"}
    return Guards([built_in(**keys), built_in(name="words", words=["bomb"])])


# The size from which on another process reads bodies, and those of `padded` are larger.
either = pytest.mark.parametrize("large", [1 << 16, LARGE], ids=["small", "large"])


def padded(body: object) -> bytes:
    return json.dumps(body).encode() + b" " * LARGE


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{KEY}"}}'}}
TALK = [
    {"role": "system", "content": f"s {KEY}"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": f"r {KEY}"},
    {"role": "tool", "content": f"t {KEY}", "tool_call_id": "1"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": f"a {KEY}"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": f'{{"a": "{KEY}"}}'},
    {"type": "function_call_output", "call_id": "1", "output": f"b {KEY}"},
]
WITH_KEY = {
    "chat": (CHAT, chat(messages=TALK)),
    "variables": (CHAT, chat(chat_template_kwargs={"style": KEY})),
    "text": (COMPLETIONS, completion(prompt=f"my {KEY}")),
    "several": (COMPLETIONS, completion(prompt=["plain", f"my {KEY}"])),
    "messages": (
        MESSAGES,
        {"max_tokens": 4, "system": f"s {KEY}", "messages": [{"role": "user", "content": KEY}]},
    ),
    "responses": (RESPONSES, {"model": "demo", "input": ITEMS, "instructions": f"i {KEY}"}),
}


@either
async def test_what_is_redacted_does_not_reach_the_model(apis: RouterApis, large: int) -> None:
    tokenizer = await _tokenizer(apis)
    for path, body in WITH_KEY.values():
        apis.generator.requests.clear()
        status, answer = await apis.post(path, padded(body))
        assert status == 200, answer
        prompts = [tokenizer.decode(x.prompt_token_ids) for x in apis.generator.requests]
        assert any(HIDDEN in x for x in prompts)
        assert not any(KEY in x or "abcd" in x for x in prompts)


async def _tokenizer(apis: RouterApis) -> Any:
    from conftest import read_tokenizer

    return await read_tokenizer(apis.generator.models()["demo"])


@either
async def test_token_ids_are_checked_as_text_and_an_echo_is_what_the_model_got(
    apis: RouterApis, token_ids: Callable[[str], tuple[int, ...]], large: int
) -> None:
    plain, secret = token_ids("<|user|>plain"), token_ids(f"<|user|>{KEY}!")
    await apis.post(COMPLETIONS, padded(completion(prompt=[list(plain), list(secret)])))
    sent = {tuple(x.prompt_token_ids) for x in apis.generator.requests}
    assert sent == {plain, token_ids(f"<|user|>{HIDDEN}!")}
    body = completion(prompt=list(plain), resume_token_ids=list(token_ids("a bomb")), max_tokens=9)
    status, answer = await apis.post(COMPLETIONS, padded(body))
    assert (status, answer["error"]["code"]) == (400, "content_filter")
    body = completion(prompt=list(plain), resume_token_ids=list(token_ids(KEY)), max_tokens=9)
    status, answer = await apis.post(COMPLETIONS, padded(body))
    assert answer["error"]["param"] == "resume_token_ids"
    _, answer = await apis.post(COMPLETIONS, padded(completion(prompt=f"my {KEY}", echo=True)))
    assert answer["choices"][0]["text"].startswith(f"my {HIDDEN}")


@either
async def test_a_response_keeps_what_left_and_not_what_was_redacted(
    apis: RouterApis, large: int
) -> None:
    path, body = WITH_KEY["responses"]
    _, answer = await apis.post(path, padded(body))
    assert answer["instructions"] == f"i {HIDDEN}"
    await apis.post(path, {"input": "more", "previous_response_id": answer["id"]})
    prompt = (await _tokenizer(apis)).decode(apis.generator.requests[-1].prompt_token_ids)
    assert f"a {HIDDEN}" in prompt


def test_items_are_stored_without_what_was_redacted() -> None:
    several = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": f"b {KEY}"}]
    both = [{"role": "assistant", "content": "c"}, {"role": "assistant", "content": f"d {KEY}"}]
    items = [*ITEMS, {"role": "user", "content": several}, *both]
    body = ResponsesRequest.decode(json.dumps({"input": items}).encode())
    changes: dict[str, str] = {}
    prompt = body.parse()[0].prompt
    assert isinstance(prompt, Conversation)
    for message in prompt.messages:
        changes[message.content] = message.content.replace(KEY, HIDDEN)
    changes[KEY] = HIDDEN
    stored = body.with_changes({x: y for x, y in changes.items() if x != y}).stored_items
    assert KEY.encode() not in stored
    found = msgspec.json.decode(stored)
    assert found[0]["content"] == f"a {HIDDEN}"
    assert found[1]["arguments"] == f'{{"a": "{HIDDEN}"}}'
    assert found[3]["content"] == f"a\nb {HIDDEN}"


BOMB = {"role": "user", "content": "a Bomb"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, chat(messages=[BOMB]), "messages"),
        (CHAT, chat(messages=[BOMB], stream=True), "messages"),
        (COMPLETIONS, completion(prompt="a bomb"), "prompt"),
        (RESPONSES, {"model": "demo", "input": [BOMB]}, "input"),
    ],
)
async def test_a_refused_prompt_is_an_error_in_openais_dialects(
    apis: RouterApis, path: str, body: dict[str, Any], field: str
) -> None:
    status, answer = await apis.post(path, padded(body))
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "content_filter", field)
    assert error["reason"] == "guard"
    assert "'words'" in error["message"]
    assert apis.generator.requests == []


async def test_a_refused_prompt_is_an_empty_answer_in_anthropics_dialect(apis: RouterApis) -> None:
    asked: Any = {"model": "demo", "max_tokens": 9, "messages": [BOMB]}
    async with anthropic.AsyncAnthropic(base_url=apis.url, api_key="-", max_retries=0) as claude:
        whole = await claude.messages.create(**asked)
        async with claude.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.content) == ("refusal", [])
        assert message.usage.output_tokens == 0
    assert apis.generator.requests == []


async def test_a_refused_prompt_is_an_error_in_grpc(apis: RouterApis) -> None:
    with pytest.raises(ContentFiltered, match="'words' refuses 'text'"):
        async for _ in apis.client.generate("a bomb"):
            pass
    async with grpc.aio.insecure_channel(apis.grpc_address) as channel:
        call = GenerationStub(channel).Generate(g.GenerateRequest(text=f"my {KEY}"))
        assert [x async for x in call]
    prompt = (await _tokenizer(apis)).decode(apis.generator.requests[-1].prompt_token_ids)
    assert prompt == f"my {HIDDEN}"


async def test_the_reason_of_a_refused_answer_has_the_name_of_its_dialect(apis: RouterApis) -> None:
    last = AnswerDelta((), finish_reason=FinishReason.CONTENT_FILTER, usage=Usage(1, 1))
    apis.generator.script = (AnswerDelta((1,), "Well"), last)
    client = openai.AsyncOpenAI(base_url=f"{apis.url}/v1", api_key="-", max_retries=0)
    async with client, anthropic.AsyncAnthropic(base_url=apis.url, api_key="-") as claude:
        said: Any = [{"role": "user", "content": "hi"}]
        made = await client.chat.completions.create(model="demo", messages=said)
        assert made.choices[0].finish_reason == "content_filter"
        chunks = await client.chat.completions.create(model="demo", messages=said, stream=True)
        reasons = [x.choices[0].finish_reason async for x in chunks]
        assert reasons[-1] == "content_filter"
        text = await client.completions.create(model="demo", prompt="hi")
        assert text.choices[0].finish_reason == "content_filter"
        response = await client.responses.create(model="demo", input="hi")
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "content_filter"
        asked: Any = {"model": "demo", "max_tokens": 9, "messages": said}
        assert (await claude.messages.create(**asked)).stop_reason == "refusal"
    async with Client(apis.grpc_address) as rpc:
        deltas = [x async for x in rpc.generate("hi")]
    assert deltas[-1].finish_reason is FinishReason.CONTENT_FILTER
