"""Tool calls and reasoning found by vLLM's parsers in a real parser process, token by token."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer

from pdserve.config import SloConfig
from pdserve.demo import MODEL_DIR
from pdserve.errors import InvalidRequest, ParserFailed
from pdserve.model.tokenizer import digest_of, read_files
from pdserve.process.child_pool import End
from pdserve.types import FinishReason, GenerateRequest, Parsing, SamplingParams, Usage
from router.attempt.answer import AnswerDelta, ParsedDelta
from router.metrics import RouterMetrics
from router.request_path import parser_start
from router.steps.parser_process import ParserProcess
from tests.support.router_stack import serve_parsed
from tests.support.timeouts import START_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from router.attempt.answer import Out

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
OSLO = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}</tool_call>'
PARIS = OSLO.replace("Oslo", "Paris")
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
THOUGHT = "<think>The user wants the weather — in 東京.</think>"
CALL = ("get_weather", {"city": "Oslo", "days": 3})


class Answers:
    """Writes the tokens of `text`, as many a delta as `cuts` says; after `pause_after` deltas it
    waits for `may_go_on`."""

    def __init__(self, tokenizer: Tokenizer, text: str, cuts: random.Random | None = None) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(text, add_special_tokens=False).ids
        self._cuts = cuts
        self.pause_after = -1
        self.may_go_on = asyncio.Event()
        self.request: GenerateRequest | None = None

    async def serve(self, request: GenerateRequest, out: Out) -> None:
        self.request = request
        left, before, deltas = self._ids[len(request.resume) :], list(request.resume), 0
        text = self._text(before)
        while left:
            if deltas == self.pause_after:
                await self.may_go_on.wait()
            size = 1 if self._cuts is None else self._cuts.choice((1, 1, 2, 3, 7))
            taken, left = left[:size], left[size:]
            before += taken
            now = self._text(before)
            assert out.write(AnswerDelta(tuple(taken), now[len(text) :]))
            text, deltas = now, deltas + 1
        end = AnswerDelta((1,), finish_reason=FinishReason.STOP)
        end.usage = Usage(3, len(before) + 1)
        out.write(end)

    def _text(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text.rstrip("\ufffd")  # an incomplete character is held back


class Found:
    """The answer as joined by a client."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []
        self.ids: list[str] = []
        self.pieces = 0
        self.usage: Usage | None = None
        self.named_a_city = asyncio.Event()

    def write(self, delta: AnswerDelta) -> bool:
        assert isinstance(delta, ParsedDelta)
        self.content += delta.text
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            self.pieces += 1
            if call.index == len(self.calls):
                self.calls.append(["", ""])
                self.ids.append(call.id)
            self.calls[call.index][0] += call.name
            self.calls[call.index][1] += call.arguments
            if "Oslo" in self.calls[call.index][1]:
                self.named_a_city.set()
        self.usage = delta.usage or self.usage
        return True

    @property
    def called(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


class Parsers:
    def __init__(self, model: Path) -> None:
        self.files = read_files(model)
        self.digest = digest_of(self.files)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.metrics = RouterMetrics(SloConfig())
        self.process = ParserProcess(self.metrics, parser_start(()))

    async def find(
        self,
        text: str | Answers,
        parser: str = "hermes",
        reasoning: str = "",
        *,
        resume: int = 0,
        found: Found | None = None,
        **options: Any,
    ) -> Found:
        answers = Answers(self.tokenizer, text) if isinstance(text, str) else text
        options = {"tools": [TOOL], "tool_choice": "auto", **options}
        kwargs = {"enable_thinking": True}
        body = json.dumps({**options, "chat_template_kwargs": kwargs})
        parsing = Parsing(
            self.digest,
            self.files,
            parser,
            reasoning,
            body,
            json.dumps({"chat_template_kwargs": kwargs}),
        )
        request = GenerateRequest(
            "r",
            "m",
            (5, 6, 7),
            SamplingParams(),
            parsing=parsing,
            resume=tuple(answers._ids[:resume]),
        )
        found = found or Found()
        async with asyncio.timeout(START_S):
            await serve_parsed(self.process, request, found, answers.serve)
        return found

    def counted(self, name: str) -> float:
        lines = self.metrics.render()[0].decode().splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parsers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parsers]:
    """The demo's tokenizer, with markup as special tokens."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    markup = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in markup])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json"):
        (directory / name).write_text((MODEL_DIR / name).read_text("utf-8"), "utf-8")
    parsers = Parsers(directory)
    yield parsers
    await parsers.process.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_calls_content_and_reasoning_are_separated(parsers: Parsers) -> None:
    found = await parsers.find(f"{THOUGHT}Let me look. {OSLO}\n{PARIS}", "hermes", "deepseek_v3")
    assert found.reasoning == "The user wants the weather — in 東京."
    assert found.content.strip() == "Let me look."
    assert found.called == [CALL, ("get_weather", {"city": "Paris", "days": 3})]
    assert found.pieces > 10, "arguments come piece by piece"
    assert len(set(found.ids)) == 2
    assert all(found.ids)
    assert found.usage is not None
    assert found.usage.reasoning_tokens > 5


@pytest.mark.parametrize(
    ("parser", "reasoning", "text"),
    [
        ("hermes", "deepseek_r1", f"{THOUGHT}{OSLO}"),
        ("qwen3_coder", "qwen3", f"{THOUGHT}Look. {XML}"),
        ("hermes", "deepseek_v3", f"{THOUGHT}{OSLO}"),
    ],
)
async def test_deltas_of_several_tokens_change_nothing(
    parsers: Parsers, parser: str, reasoning: str, text: str
) -> None:
    whole = await parsers.find(text, parser, reasoning)
    assert whole.called == [CALL]
    for seed in range(8):
        cut = Answers(parsers.tokenizer, text, random.Random(seed))
        found = await parsers.find(cut, parser, reasoning)
        assert (found.reasoning, found.content) == (whole.reasoning, whole.content)
        assert found.calls == whole.calls


async def test_a_process_killed_in_the_middle_of_a_call_is_not_noticed(parsers: Parsers) -> None:
    text = f"{THOUGHT}{OSLO}\n{PARIS}"
    whole = await parsers.find(text, "hermes", "deepseek_v3")
    answers = Answers(parsers.tokenizer, text)
    begun = parsers.tokenizer.encode(text[: text.index("days")], add_special_tokens=False).ids
    answers.pause_after = len(begun)
    found = Found()
    asking = asyncio.create_task(parsers.find(answers, "hermes", "deepseek_v3", found=found))
    async with asyncio.timeout(START_S):
        await found.named_a_city.wait()
        child = parsers.process._child
        assert child is not None
        (process,) = [
            x for x in psutil.Process().children() if "workers.parser" in " ".join(x.cmdline())
        ]
        process.kill()
        assert await child.ended is End.DIED
        answers.may_go_on.set()
        await asking
    assert (found.reasoning, found.content) == (whole.reasoning, whole.content)
    assert found.calls == whole.calls
    assert parsers.counted("pdserve_parser_restarts_total") == 1


async def test_an_answer_that_is_resumed_continues_in_the_middle_of_a_call(
    parsers: Parsers,
) -> None:
    answers = Answers(parsers.tokenizer, OSLO)
    found = await parsers.find(answers, resume=len(answers._ids) - 6)
    whole = await parsers.find(OSLO)
    assert found.calls[0][0] == "", "its name was said before"
    assert found.calls[0][1]
    assert whole.calls[0][1].endswith(found.calls[0][1])


FORCED = {
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "one call": {"parallel_tool_calls": False},
    "strict": {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},  # type: ignore[dict-item]
}


@pytest.mark.parametrize("asked", FORCED.values(), ids=FORCED.keys())
async def test_forced_calls_are_constrained_after_the_reasoning(
    parsers: Parsers, asked: dict[str, Any]
) -> None:
    answers = Answers(parsers.tokenizer, THOUGHT + OSLO)
    await parsers.find(answers, "hermes", "deepseek_v3", **asked)
    request = answers.request
    assert request is not None
    constraint = request.sampling.structured_output
    assert constraint is not None
    assert "days" in constraint.value
    assert request.reasoning_gate is not None
    assert request.reasoning_gate.parser == "deepseek_v3"


async def test_a_call_is_forced_on_a_tokenizer_without_markup(
    parsers: Parsers, tmp_path: Path
) -> None:
    """As for a model whose own format of calls is not known, or whose template shows no tools."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MODEL_DIR / name).read_bytes())
    plain = Parsers(tmp_path)
    plain.process = parsers.process
    answers = Answers(plain.tokenizer, OSLO)
    found = await plain.find(answers, tool_choice="required")
    assert found.called == [CALL]
    assert answers.request is not None
    assert answers.request.sampling.structured_output is not None


async def test_a_free_call_is_not_constrained(parsers: Parsers) -> None:
    answers = Answers(parsers.tokenizer, OSLO)
    await parsers.find(answers)
    assert answers.request is not None
    assert answers.request.sampling.structured_output is None


async def test_wrong_tools_and_parsers_are_refused(parsers: Parsers) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": 7}}
    answers = Answers(parsers.tokenizer, OSLO)
    with pytest.raises(InvalidRequest, match="parameters") as refusal:
        await parsers.find(answers, tools=[broken])
    assert refusal.value.field == "tools.0.function.parameters"
    assert answers.request is None  # nothing was asked of a worker
    with pytest.raises(ParserFailed, match="nonesuch"):
        await parsers.find(OSLO, "nonesuch")
    with pytest.raises(ParserFailed, match="cohere_melody"):
        await parsers.find(OSLO, "cohere_command3")
    with pytest.raises(ParserFailed, match="python_tag"):
        await parsers.find(OSLO, "llama3_json")
