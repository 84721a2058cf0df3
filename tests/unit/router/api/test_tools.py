"""Tools and reasoning over HTTP: what the model and the parser are told, and what clients get."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from scripted import CHAT, MODEL, RECEIPT, VOCAB_SIZE, Apis, ScriptedGenerator, chat
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.types import FinishReason, ModelInfo, Parsing, Usage
from router.answer import ParsedDelta, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import openai
    from openai.types.chat import ChatCompletionChunk

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}({{ call.function.arguments.city }})</tool_call>"
    "{% endfor %}{{ m.tool_call_id or '' }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single bytes, and a template with tools that thinks if it is asked to."""
    directory = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory


@pytest.fixture
def generator(model_dir: Path) -> ScriptedGenerator:
    info = ModelInfo(MODEL, str(model_dir), 4096, VOCAB_SIZE, "float32")
    return ScriptedGenerator({MODEL: info}, script=CALLING)


def last(reason: FinishReason = FinishReason.STOP) -> ParsedDelta:
    usage = Usage(prompt_tokens=7, completion_tokens=6, reasoning_tokens=2)
    return ParsedDelta((3,), finish_reason=reason, usage=usage, receipt=RECEIPT)


CALLING = (
    ParsedDelta((1,), reasoning="I need "),
    ParsedDelta((2,), reasoning="it."),
    ParsedDelta((3,), "\n"),
    ParsedDelta((4,), tool_calls=(ToolCallDelta(0, "call-1", "get_time"),)),
    ParsedDelta((5,), tool_calls=(ToolCallDelta(0, arguments='{"city": '),)),
    ParsedDelta((6,)),
    ParsedDelta(
        (7,), tool_calls=(ToolCallDelta(0, arguments='"Oslo"}'), ToolCallDelta(1, "2", "b", "{}"))
    ),
    last(),
)


async def prompt_of(apis: Apis, model_dir: Path, body: dict[str, Any]) -> str:
    status, answer = await apis.post(CHAT, body)
    assert status == 200, answer
    ids = apis.generator.requests[-1].prompt_token_ids
    return Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(list(ids))


async def parsing_of(apis: Apis, body: dict[str, Any]) -> Parsing | None:
    status, answer = await apis.post(CHAT, body)
    assert status == 200, answer
    return apis.generator.requests[-1].parsing


async def test_the_template_shows_tools_calls_and_their_results(
    apis: Apis, model_dir: Path
) -> None:
    called = {"name": "get_time", "arguments": '{"city": "Oslo"}'}
    history = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    prompt = await prompt_of(apis, model_dir, chat(messages=history, tools=[TOOL]))
    assert prompt == (
        f"<tools>{json.dumps([TOOL])}</tools><user>Time?"
        "<assistant><tool_call>get_time(Oslo)</tool_call><tool>noonc1"
    )


async def test_without_a_choice_the_template_shows_no_tools(apis: Apis, model_dir: Path) -> None:
    body = chat(tools=[TOOL], tool_choice="none", parallel_tool_calls=False)
    assert await prompt_of(apis, model_dir, body) == "<user>hi"
    assert apis.generator.requests[-1].parsing is None


async def test_plain_requests_are_not_parsed(apis: Apis) -> None:
    assert await parsing_of(apis, chat()) is None
    assert apis.generator.requests[-1].sampling.skip_special_tokens


async def test_the_parser_is_told_what_bears_on_it(apis: Apis) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    schema = {"name": "x", "schema": {"type": "object"}}
    body = chat(
        tools=[TOOL],
        tool_choice=named,
        parallel_tool_calls=False,
        include_reasoning=False,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    parsing = await parsing_of(apis, body)
    assert parsing is not None
    assert (parsing.tool_parser, parsing.reasoning_parser) == ("hermes", "")
    assert json.loads(parsing.request_json) == {
        "tools": [TOOL],
        "tool_choice": named,
        "parallel_tool_calls": False,
        "include_reasoning": False,
        "response_format": {"type": "json_schema", "json_schema": {**schema, "name": "answer"}},
    }
    assert not apis.generator.requests[-1].sampling.skip_special_tokens


@pytest.mark.parametrize(
    "asked", [{"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}]
)
async def test_reasoning_is_parsed_where_it_was_asked_for(
    apis: Apis, asked: dict[str, Any]
) -> None:
    parsing = await parsing_of(apis, chat(**asked))
    assert parsing is not None
    assert (parsing.tool_parser, parsing.reasoning_parser) == ("", "deepseek_v3")
    assert json.loads(parsing.reasoning_kwargs_json)["chat_template_kwargs"]["enable_thinking"]


async def test_a_whole_answer_has_reasoning_and_calls(official: openai.AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hi"}], tools=[TOOL]
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    message = choice.message.model_dump(exclude_none=True)
    assert message == {
        "role": "assistant",
        "reasoning": "I need it.",
        "reasoning_content": "I need it.",
        "tool_calls": [
            call("call-1", "get_time", '{"city": "Oslo"}'),
            call("2", "b", "{}"),
        ],
    }
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


async def stream(official: openai.AsyncOpenAI, **values: Any) -> Sequence[ChatCompletionChunk]:
    chunks = await official.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hi"}], stream=True, **values
    )
    return [chunk async for chunk in chunks]


async def test_a_stream_has_their_pieces_in_order(official: openai.AsyncOpenAI) -> None:
    chunks = await stream(official, tools=[TOOL])
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas == [
        {
            "role": "assistant",
            "content": "",
            "reasoning": "I need ",
            "reasoning_content": "I need ",
        },
        {"reasoning": "it.", "reasoning_content": "it."},
        {"content": "\n"},
        {"tool_calls": [{"index": 0, **call("call-1", "get_time", "")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '"Oslo"}'}},
                {"index": 1, **call("2", "b", "{}")},
            ]
        },
        {},
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_named_call_and_a_cut_one_end_as_any_answer(
    official: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    chunks = await stream(official, tools=[TOOL], tool_choice=named)
    assert chunks[-1].choices[0].finish_reason == "stop"
    generator.script = (*CALLING[:-1], last(FinishReason.LENGTH))
    chunks = await stream(official, tools=[TOOL])
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_content_without_calls_is_kept_as_it_is(
    official: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    generator.script = (ParsedDelta((1,), " "), ParsedDelta((2,), "a"), last())
    answer = await official.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hi"}], tools=[TOOL]
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (" a", "stop")
