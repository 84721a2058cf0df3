"""Tools and reasoning over HTTP: what the model and the parser are told, and what clients get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.client import Tool
from pdserve.config import ParsersConfig
from pdserve.errors import ConfigError, UnsupportedField
from pdserve.model.tokenizer import ChatMessage, Conversation, read_files
from pdserve.model.tokenizer import Tokenizer as ModelTokenizer
from pdserve.net import rpc
from pdserve.types import (
    Adapter,
    FinishReason,
    ModelInfo,
    Parsing,
    SamplingParams,
    ToolCallDelta,
    Usage,
)
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub
from router.attempt.answer import ParsedDelta
from router.dialects.parsed_request import ParsedRequest
from router.intake import answer_parsers
from tests.support.router_apis import (
    CHAT,
    MODEL,
    RECEIPT,
    VOCAB_SIZE,
    RouterApis,
    ScriptedGenerator,
    chat,
    make_intake,
    prepare,
)
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    import openai
    from openai.types.chat import ChatCompletionChunk

    from router.intake.intake import Intake

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
    """Return a byte tokenizer with a template for tools and optional reasoning."""
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


async def prompt_of(apis: RouterApis, model_dir: Path, body: dict[str, Any]) -> str:
    status, answer = await apis.post(CHAT, body)
    assert status == 200, answer
    ids = apis.generator.requests[-1].prompt_token_ids
    return Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(list(ids))


async def parsing_of(apis: RouterApis, body: dict[str, Any]) -> Parsing | None:
    status, answer = await apis.post(CHAT, body)
    assert status == 200, answer
    return apis.generator.requests[-1].parsing


async def test_the_template_shows_tools_calls_and_their_results(
    apis: RouterApis, model_dir: Path
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


async def test_without_a_choice_the_template_shows_no_tools(
    apis: RouterApis, model_dir: Path
) -> None:
    body = chat(tools=[TOOL], tool_choice="none", parallel_tool_calls=False)
    assert await prompt_of(apis, model_dir, body) == "<user>hi"
    assert apis.generator.requests[-1].parsing is None


async def test_plain_requests_are_not_parsed(apis: RouterApis) -> None:
    assert await parsing_of(apis, chat()) is None
    assert apis.generator.requests[-1].sampling.skip_special_tokens


async def test_the_parser_gets_the_fields_that_affect_it(apis: RouterApis) -> None:
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
        "stream": False,
        "response_format": {"type": "json_schema", "json_schema": {**schema, "name": "answer"}},
    }
    assert not apis.generator.requests[-1].sampling.skip_special_tokens


@pytest.mark.parametrize(
    "asked", [{"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}]
)
async def test_reasoning_is_parsed_where_it_was_asked_for(
    apis: RouterApis, asked: dict[str, Any]
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


# Anthropic's Messages and OpenAI's Responses.

SCHEMA: dict[str, Any] = {"type": "object"}
CUSTOM = {"name": "get_time", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "get_time", "parameters": SCHEMA}
TOOL_NAMED = {"type": "function", "function": {"name": "get_time"}}
ASKED = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Time?"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_blocks_of_thinking_text_and_tool_use(
    apis: RouterApis, stream: bool
) -> None:
    async with anthropic.AsyncAnthropic(base_url=apis.url, api_key="k", max_retries=0) as client:
        asked: Any = {**ASKED, "tools": [CUSTOM], "thinking": {"type": "adaptive"}}
        if stream:
            async with client.messages.stream(**asked) as events:
                message: Any = await events.get_final_message()
        else:
            message = await client.messages.create(**asked)
    blocks = [x for x in message.content if x.type != "text"]
    assert blocks[0].thinking == "I need it."
    calls = [(x.id, x.name, x.input) for x in blocks[1:]]
    assert calls == [("call-1", "get_time", {"city": "Oslo"}), ("2", "b", {})]
    assert "".join(x.text for x in message.content if x.type == "text").strip() == ""
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_items_of_reasoning_and_function_calls(
    official: openai.AsyncOpenAI, stream: bool
) -> None:
    asked: Any = {"model": MODEL, "input": "Time?", "tools": [FUNCTION, {"type": "web_search"}]}
    if stream:
        async with official.responses.stream(**asked) as events:
            numbers = [event.sequence_number async for event in events]
            response: Any = await events.get_final_response()
        assert numbers == list(range(len(numbers)))
    else:
        response = await official.responses.create(**asked)
    reasoning, _, *calls = response.output
    assert [x.type for x in response.output] == [
        *("reasoning", "message"),
        *("function_call", "function_call"),
    ]
    assert reasoning.content[0].text == "I need it."
    assert [(x.call_id, x.name, x.arguments) for x in calls] == [
        ("call-1", "get_time", '{"city": "Oslo"}'),
        ("2", "b", "{}"),
    ]
    assert len({x.id for x in response.output}) == 4
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    # A tool that a server would have to run is left out, and the response says which are there.
    assert [x.type for x in response.tools] == ["function"]


@pytest.mark.parametrize(
    ("choice", "parsed"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"type": "tool", "name": "get_time"}, {"tool_choice": TOOL_NAMED}),
    ],
)
async def test_a_tool_choice_of_anthropic_is_translated_to_openais(
    apis: RouterApis, choice: dict[str, Any], parsed: dict[str, Any]
) -> None:
    body = {**ASKED, "tools": [CUSTOM], "tool_choice": choice}
    status, answer = await apis.post("/v1/messages", body)
    assert status == 200, answer
    parsing = apis.generator.requests[-1].parsing
    assert parsing is not None
    told = json.loads(parsing.request_json)
    assert {name: told.get(name) for name in parsed} == parsed


async def test_a_tool_choice_of_responses_reaches_the_parser(apis: RouterApis) -> None:
    choice = {"type": "function", "name": "get_time"}
    body = {"model": MODEL, "input": "Time?", "tools": [FUNCTION], "tool_choice": choice}
    status, answer = await apis.post("/v1/responses", body)
    assert (status, answer["tool_choice"]) == (200, choice)
    parsing = apis.generator.requests[-1].parsing
    assert parsing is not None
    assert json.loads(parsing.request_json)["tool_choice"] == TOOL_NAMED


MESSAGES_HISTORY = {
    "messages": [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "c1", "name": "get_time", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "noon"}],
                },
                {"type": "text", "text": "Ok?"},
            ],
        },
    ]
}
RESPONSES_HISTORY = {
    "input": [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "So."},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "get_time",
            "arguments": '{"city": "Oslo"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"role": "user", "content": "Ok?"},
    ]
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {**MESSAGES_HISTORY, "max_tokens": 9, "tools": [CUSTOM]}),
        ("/v1/responses", {**RESPONSES_HISTORY, "tools": [FUNCTION]}),
    ],
)
async def test_calls_and_results_of_a_history_are_shown_alike(
    apis: RouterApis, model_dir: Path, path: str, body: dict[str, Any]
) -> None:
    status, answer = await apis.post(path, body)
    assert status == 200, answer
    ids = apis.generator.requests[-1].prompt_token_ids
    prompt = Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(list(ids))
    assert prompt == (
        f"<tools>{json.dumps([TOOL])}</tools><user>Time?"
        "<assistant>So.<tool_call>get_time(Oslo)</tool_call><tool>noonc1<user>Ok?"
    )


def _called(path: str, arguments: Any) -> dict[str, Any]:
    """Return a history with one call."""
    if path == "/v1/messages":
        block = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
        turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "Ok?"}]
        return {"messages": turns, "max_tokens": 9}
    if path == "/v1/responses":
        item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
        return {"input": [item, {"role": "user", "content": "Ok?"}]}
    function = {"name": "f", "arguments": arguments}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    return {"messages": [turn, {"role": "user", "content": "Ok?"}], "max_tokens": 9}


@pytest.mark.parametrize("arguments", ['{"city": "', "null", "[]", "Oslo", "", None, [1]])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_a_call_without_an_object_has_no_arguments_in_the_prompt(
    apis: RouterApis, model_dir: Path, path: str, arguments: Any
) -> None:
    status, answer = await apis.post(path, _called(path, arguments))
    assert status == 200, answer
    ids = apis.generator.requests[-1].prompt_token_ids
    prompt = Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(list(ids))
    assert prompt == "<assistant><tool_call>f()</tool_call><user>Ok?"


async def test_the_parts_of_earlier_answers_are_usable(apis: RouterApis, model_dir: Path) -> None:
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "refusal", "refusal": "No."}]
    history = [
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": None, "refusal": "Never."},
        {"role": "assistant", "content": [], "tool_calls": []},
        {"role": "tool", "content": None, "tool_call_id": "c1"},
    ]
    prompt = await prompt_of(apis, model_dir, chat(messages=history))
    assert prompt == "<assistant>No.<assistant>Never.<assistant><tool>c1"


def grpc_request(**changes: Any) -> g.GenerateRequest:
    history = [g.ChatMessage(role="user", content="Time?")]
    tool = g.Tool(name="get_time", parameters_json='{"type": "object"}')
    values = {"messages": g.ChatMessages(messages=history), "tools": [tool], **changes}
    return g.GenerateRequest(**values)


async def test_grpc_carries_tools_and_reasoning(apis: RouterApis, model_dir: Path) -> None:
    called = {"id": "c1", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}
    history = [
        ChatMessage("user", "Time?"),
        ChatMessage("assistant", "", tool_calls=[called]),
        ChatMessage("tool", "noon", tool_call_id="c1"),
    ]
    asked = apis.client.generate(
        history,
        tools=[Tool("get_time", parameters={"type": "object"})],
        tool_name="get_time",
        parallel_tool_calls=False,
        enable_thinking=True,
    )
    answer = [delta async for delta in asked]
    (request,) = apis.generator.requests
    ids = list(request.prompt_token_ids)
    assert Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(ids) == (
        f"<tools>{json.dumps([TOOL])}</tools><user>Time?"
        "<assistant><tool_call>get_time(Oslo)</tool_call><tool>noonc1<think>"
    )
    assert request.parsing is not None
    assert request.parsing.reasoning_parser == "deepseek_v3"
    assert json.loads(request.parsing.request_json) == {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_time"}},
        "parallel_tool_calls": False,
        # The parser is told what the prompt ends with, by each name that parsers look for.
        "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
    }
    assert "".join(x.reasoning for x in answer) == "I need it."
    assert "".join(x.text for x in answer) == "\n"
    calls = [call for x in answer for call in x.tool_calls]
    assert [(x.index, x.id, x.name) for x in calls if x.name] == [
        (0, "call-1", "get_time"),
        (1, "2", "b"),
    ]
    assert "".join(x.arguments for x in calls if not x.index) == '{"city": "Oslo"}'
    assert answer[-1].usage is not None
    assert answer[-1].usage.reasoning_tokens == 2


async def test_the_client_gives_what_is_set_and_nothing_else(apis: RouterApis) -> None:
    tool, question = Tool("get_time", "Tells.", strict=True), [ChatMessage("user", "Time?")]
    options: dict[str, Any] = {"tool_choice": "required", "include_reasoning": False}
    _ = [delta async for delta in apis.client.generate(question, tools=[tool], **options)]
    parsing = apis.generator.requests[0].parsing
    assert parsing is not None
    function = {"name": "get_time", "description": "Tells.", "strict": True}
    tools = [{"type": "function", "function": function}]
    assert json.loads(parsing.request_json) == {"tools": tools, **options}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": None, "text": "hi"}, "tools"),
        ({"tools": [g.Tool(name="a b")]}, "tools[0].name"),
        ({"tools": [g.Tool(name="a", parameters_json="[]")]}, "tools[0].parameters_json"),
        ({"tool_choice": g.TOOL_CHOICE_NAMED, "tool_name": "x"}, "tool_choice.function.name"),
        ({"tool_name": "get_time"}, "tool_name"),
        ({"adapter": "nonesuch"}, "adapter"),
    ],
)
async def test_wrong_grpc_fields_are_refused_by_name(
    apis: RouterApis, changes: dict[str, Any], field: str
) -> None:
    async with rpc.PLAIN.open_channel(apis.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await GenerationStub(channel).Generate(grpc_request(**changes), timeout=WAIT_S).read()
    assert rpc.error_from_rpc(refusal.value).field == field


async def test_grpc_names_an_adapter(apis: RouterApis) -> None:
    apis.generator.loaded["a1"] = Adapter("a1", "d", "/a1", MODEL)
    async with rpc.PLAIN.open_channel(apis.grpc_address) as channel:
        asked = grpc_request(model=MODEL, adapter="a1")
        async for _ in GenerationStub(channel).Generate(asked, timeout=WAIT_S):
            pass
    assert apis.generator.requests[0].adapter == apis.generator.loaded["a1"]


async def read_tokenizer(model: ModelInfo) -> ModelTokenizer:
    return ModelTokenizer.load(read_files(Path(model.path)))


async def test_without_vllm_tools_are_refused_and_reasoning_is_text(
    apis: RouterApis, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_parsers, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="hermes needs vLLM"):
        make_intake(generator.models, read_tokenizer, parsers=ParsersConfig(tool_calls="hermes"))
    without = make_intake(generator.models, read_tokenizer)
    message = [ChatMessage("user", "hi")]

    async def parsing(chat: Conversation) -> Parsing | None:
        asked = ParsedRequest("", chat, SamplingParams(max_tokens=4))
        return (await prepare(without, asked)).parsing

    assert await parsing(Conversation(message, variables={"enable_thinking": True})) is None
    with pytest.raises(UnsupportedField, match="not installed"):
        await parsing(Conversation(message, tools=[TOOL]))


def intake_of(
    model_dir: Path, tmp_path: Path, reasoning_parser: str = "auto", **config: Any
) -> Intake:
    """Return one that serves a model with another tokenizer configuration."""
    tokenizer = (model_dir / "tokenizer.json").read_text("utf-8")
    (tmp_path / "tokenizer.json").write_text(tokenizer, "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    model = ModelInfo(MODEL, str(tmp_path), 4096, VOCAB_SIZE, "float32", tokenizer="t")
    models = {MODEL: model}
    return make_intake(
        lambda: models, read_tokenizer, parsers=ParsersConfig(reasoning=reasoning_parser)
    )


async def parsing_with(
    made: Intake, text: str = "hi", variables: dict[str, Any] | None = None, **options: Any
) -> Parsing | None:
    tools = [TOOL] if "tool_choice" in options else []
    chat = Conversation([ChatMessage("user", text)], tools=tools, variables=variables or {})
    asked = ParsedRequest("", chat, SamplingParams(max_tokens=4), parsing_options=options)
    return (await prepare(made, asked)).parsing


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


async def test_tools_that_the_template_does_not_show_are_called_by_force_only(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = intake_of(model_dir, tmp_path, chat_template=PLAIN)
    assert made.remarks() == []  # its tokenizer is not loaded yet
    assert await parsing_with(made, tool_choice="auto", parallel_tool_calls=False) is None
    for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
        parsing = await parsing_with(made, tool_choice=choice)
        assert parsing is not None
        assert parsing.tool_parser == "hermes"
        assert json.loads(parsing.request_json) == {"tools": [TOOL], "tool_choice": choice}
    (remark,) = [x.getMessage() for x in caplog.records]
    assert f"model {MODEL}: its chat template does not show tools" in remark
    assert made.remarks() == [(MODEL, remark.removeprefix(f"model {MODEL}: "))]


async def test_a_format_of_calls_without_a_parser_is_refused_by_the_key_to_set(
    model_dir: Path, tmp_path: Path
) -> None:
    made = intake_of(model_dir, tmp_path, chat_template="{{ tools }}" + PLAIN)
    with pytest.raises(
        UnsupportedField, match=r"no parser fits .*: set router\.parsers\.tool_calls"
    ):
        await parsing_with(made, tool_choice="auto")
    ((_, remark),) = made.remarks()
    assert "set router.parsers.tool_calls" in remark
    parsing = await parsing_with(made, tool_choice="required")
    assert parsing is not None
    assert parsing.tool_parser == "hermes"


@pytest.mark.parametrize(
    ("text", "variables", "expected"),
    [
        ("hi", {}, True),
        ("hi", {"enable_thinking": False}, True),  # no variable of the template
        ("hi /no_think", {}, None),
        ("hi /no_think", {"enable_thinking": True}, None),
    ],
)
async def test_a_prompt_that_begins_reasoning_is_parsed_for_it(
    model_dir: Path, tmp_path: Path, text: str, variables: dict[str, Any], expected: bool | None
) -> None:
    ends = "{{ '<think></think>' if '/no_think' in messages[0].content else '<think>\n' }}"
    made = intake_of(model_dir, tmp_path, chat_template=PLAIN + ends)
    parsing = await parsing_with(made, text, variables)
    if expected is None:
        assert parsing is None
        return
    assert parsing is not None
    assert (parsing.tool_parser, parsing.reasoning_parser) == ("", "deepseek_r1")
    told = {"enable_thinking": expected, "thinking": expected}
    assert json.loads(parsing.reasoning_kwargs_json) == {"chat_template_kwargs": told}


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("<think></think>", {"enable_thinking": False, "thinking": False}),
        ("<think>", {"enable_thinking": True, "thinking": True}),
        ("{# <think> of histories #}", {}),
    ],
)
async def test_a_parser_by_name_is_told_what_the_prompt_shows(
    model_dir: Path, tmp_path: Path, end: str, told: dict[str, Any]
) -> None:
    made = intake_of(model_dir, tmp_path, "qwen3", chat_template=PLAIN + end)
    parsing = await parsing_with(made)
    assert parsing is not None
    assert parsing.reasoning_parser == "qwen3"
    assert json.loads(parsing.reasoning_kwargs_json) == {"chat_template_kwargs": told}


async def test_the_template_for_tools_has_its_own_parser(model_dir: Path, tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": PLAIN},
        {"name": "tool_use", "template": "{{ tools | tojson }}[TOOL_CALLS]" + PLAIN},
    ]
    made = intake_of(model_dir, tmp_path, chat_template=templates)
    assert await parsing_with(made) is None
    parsing = await parsing_with(made, tool_choice="auto")
    assert parsing is not None
    assert parsing.tool_parser == "mistral"
    assert made.remarks() == []


async def test_a_model_may_describe_its_answers_itself(model_dir: Path, tmp_path: Path) -> None:
    own = {"fields": {"content": {}, "thinking": {}}}
    made = intake_of(model_dir, tmp_path, chat_template=PLAIN, response_template=own)
    parsing = await parsing_with(made)
    assert parsing is not None
    assert (parsing.tool_parser, parsing.reasoning_parser) == ("", "hf")
