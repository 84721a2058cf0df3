"""What parsers find in an answer, whatever the engine holds back, and what they would lose."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from pdserve.demo import MODEL_DIR
from pdserve.v1 import parser_pb2 as p

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
OSLO = '{"city": "Oslo 東京", "days": 3}'
_XML = "<function=get_weather>\n<parameter=city>\nOslo 東京\n</parameter>\n<parameter=days>\n3\n"
# Reasoning parser and its marks, and a call, by tool parser.
FORMATS = {
    "hermes": (
        "deepseek_r1",
        *("<think>", "</think>"),
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "qwen3",
        *("<think>", "</think>"),
        f"<tool_call>\n{_XML}</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": (
        "glm45",
        *("<think>", "</think>"),
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo 東京</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        ),
    ),
    "seed_oss": (
        "seed_oss",
        *("<seed:think>", "</seed:think>"),
        f"<seed:tool_call>\n{_XML}</parameter>\n</function>\n</seed:tool_call>",
    ),
    "minimax_m2": (
        "minimax_m2",
        *("<think>", "</think>"),
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo 東京'
            '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
    ),
    "kimi_k2": (
        "kimi_k2",
        *("<think>", "</think>"),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            f"<|tool_call_argument_begin|>{OSLO}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    "deepseek_v3": (
        "deepseek_r1",
        *("<think>", "</think>"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            f"{OSLO}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek_v31": (
        "deepseek_v3",
        *("<think>", "</think>"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            f"{OSLO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "functiongemma": (
        "deepseek_r1",
        *("<think>", "</think>"),
        "<start_function_call>call:get_weather{city:<escape>Oslo 東京<escape>}<end_function_call>",
    ),
    "llama3_json": (
        "deepseek_r1",
        *("<think>", "</think>"),
        f'{{"name": "get_weather", "parameters": {OSLO}}}',
    ),
    "mistral": ("mistral", "[THINK]", "[/THINK]", f"[TOOL_CALLS]get_weather[ARGS]{OSLO}"),
}
_MARKUP = (
    "<tool_call> </tool_call> <think> </think> <seed:tool_call> </seed:tool_call> <seed:think> "
    "</seed:think> <minimax:tool_call> </minimax:tool_call> [TOOL_CALLS] [ARGS] [CALL_ID] [THINK] "
    "[/THINK] <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <start_function_call> "
    "<end_function_call> <|python_tag|> <arg_key> </arg_key> <arg_value> </arg_value> <escape>"
)
_EOS = 1
PROMPT = [20, 21, 22]


@dataclass
class Found:
    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    content_tokens: list[int] = field(default_factory=list)

    @property
    def parts(self) -> tuple[Any, ...]:
        called = [(name, json.loads(arguments)) for name, arguments in self.calls]
        return self.reasoning, self.content, called


class Answers:
    """Parses answers as they come from vLLM's detokeniser, which holds back text."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fast = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.fast.encode(text, add_special_tokens=False).ids
        return found

    def find(
        self,
        text: str,
        tools: str = "hermes",
        reasoning: str = "",
        *,
        stream: bool = True,
        choice: Any = "auto",
        stop: Sequence[str] = (),
        sizes: random.Random | None = None,
    ) -> Found:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        from workers.vllm.parsing.request_parsers import RequestParsers, _tokenizer_of

        body = {"tools": [TOOL], "tool_choice": choice, "stream": stream}
        body["chat_template_kwargs"] = {"enable_thinking": True, "thinking": True}
        opened = p.OpenParser(
            tokenizer=str(self.directory),
            tool_parser=tools,
            reasoning_parser=reasoning,
            request_json=json.dumps(body),
            prompt_token_ids=PROMPT,
        )
        parsers = RequestParsers(opened)
        sampling = SamplingParams(stop=list(stop), skip_special_tokens=False)
        request: Any = SimpleNamespace(
            request_id="r", prompt_token_ids=PROMPT, sampling_params=sampling, prompt_embeds=None
        )
        engine: Any = IncrementalDetokenizer.from_new_request(
            _tokenizer_of(str(self.directory)), request
        )
        found, left = Found(), [*self.ids(text), _EOS]
        stopped = None
        while left and stopped is None:
            size = 1 if sizes is None else sizes.choice((1, 1, 2, 3, 8))
            taken, left = left[:size], left[size:]
            before = engine.num_output_tokens()
            stopped = engine.update(taken, not left)
            kept = engine.output_token_ids[before:]
            finished = not left or stopped is not None
            piece = engine.get_next_output_text(finished, True)
            self._add(
                found, parsers.parse(p.ParserInput(token_ids=kept, text=piece, finished=finished))
            )
        return found

    @staticmethod
    def _add(found: Found, output: p.ParserOutput) -> None:
        found.reasoning += output.reasoning
        found.content += output.content
        found.content_tokens += output.content_tokens
        for call in output.tool_calls:
            if call.index == len(found.calls):
                found.calls.append(["", ""])
            found.calls[call.index][0] += call.name
            found.calls[call.index][1] += call.arguments


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The demo's tokenizer, with markup as special tokens."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    markup = [AddedToken(x, special=True, normalized=False) for x in _MARKUP.split()]
    tokenizer.add_special_tokens(markup)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json"):
        (directory / name).write_text((MODEL_DIR / name).read_text("utf-8"), "utf-8")
    return Answers(directory)


@pytest.mark.parametrize("tools", FORMATS)
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 32), st.randoms(use_true_random=False), st.booleans())
def test_a_stop_string_and_the_size_of_deltas_change_no_part(
    answers: Answers, tools: str, length: int, sizes: random.Random, stream: bool
) -> None:
    reasoning, begin, end, call = FORMATS[tools]
    text = f"{begin}Let me see — 東京?{end}{call}"
    plain = answers.find(text, tools, reasoning, stream=stream)
    assert plain.reasoning == "Let me see — 東京?"
    assert [name for name, _ in plain.calls] == ["get_weather"]
    held = answers.find(text, tools, reasoning, stream=stream, stop=["q" * length], sizes=sizes)
    assert held.parts == plain.parts
    assert held.content_tokens == plain.content_tokens


def test_an_answer_that_a_stop_string_ends_has_the_parts_before_it(answers: Answers) -> None:
    text = "<think>Let me see.</think>The answer is long."
    for size in (None, random.Random(1)):
        found = answers.find(
            text, reasoning="deepseek_r1", stop=["r is", "never in it"], sizes=size
        )
        assert found.parts == ("Let me see.", "The answe", [])


def _call(arguments: str) -> str:
    return f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'


GOOD = _call('{"city": "Oslo"}')
CALLED = ("get_weather", {"city": "Oslo"})
FIRST = '<tool_call>{"arguments": {"city": "Oslo"}, "name": "get_weather"}</tool_call>'
LOSSES = {
    "no json": ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    "arguments first": (FIRST, "", [CALLED]),
    "markup in a string": (
        _call('{"city": "a </tool_call> b"}'),
        *("", [("get_weather", {"city": "a </tool_call> b"})]),
    ),
    "a string": (_call('"Oslo"'), _call('"Oslo"'), []),
    "a list": (_call("[1]"), _call("[1]"), []),
    "no end": ("Hi <tool_call>", "Hi <tool_call>", []),
    "text after": (f"Hi. {GOOD} Bye.", "Hi. \nBye.", [CALLED]),
    "a bad one after": (
        f"{GOOD}\n<tool_call>Oslo</tool_call>",
        "<tool_call>Oslo</tool_call>",
        [CALLED],
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", LOSSES)
def test_what_is_no_call_stays_content(answers: Answers, case: str, stream: bool) -> None:
    text, content, calls = LOSSES[case]
    found = answers.find(text, stream=stream)
    assert found.parts == ("", content, calls)
    if not calls:
        assert found.content_tokens == list(range(len(answers.ids(text)) + 1))


@pytest.mark.parametrize("tools", FORMATS)
def test_nothing_of_a_call_that_is_cut_is_lost(answers: Answers, tools: str) -> None:
    call = FORMATS[tools][-1]
    for at in range(1, call.index("Oslo") + 3):
        whole = answers.find(f"Hi {call[:at]}", tools, stream=False)
        assert (whole.content.strip(), whole.calls) == (f"Hi {call[:at]}".strip(), [])
        streamed = answers.find(f"Hi {call[:at]}", tools)
        assert streamed.calls or sorted(streamed.content) == sorted(whole.content)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_forced_call_that_is_cut_begins_the_call(
    answers: Answers, choice: str, stream: bool
) -> None:
    named = {"type": "function", "function": {"name": choice}}
    text = GOOD[: GOOD.index("Oslo") + 2]
    found = answers.find(text, stream=stream, choice=named if choice == "get_weather" else choice)
    assert found.calls == [["get_weather", '{"city": "Os']]
    assert not found.content


def test_logprobs_are_those_of_the_content(answers: Answers) -> None:
    text = f"<think>Hm, so.</think>Look here. {GOOD}"
    found = answers.find(text, reasoning="deepseek_r1")
    ids = answers.ids(text)
    assert answers.fast.decode([ids[x] for x in found.content_tokens]) == "Look here. "
