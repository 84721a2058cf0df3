"""Tool calls and reasoning in answers, found by vLLM's own parsers.

What a parser finds depends on how an answer is cut: some lose arguments, or leak markup, if a delta
holds several tokens (vllm#55082, vllm#47907). So they get one token a call, however tokens came.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer

from pdserve.errors import InvalidRequest, ParserFailed
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import parser_pb2 as p

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.parser.abstract_parser import Parser
    from vllm.sampling_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

_HARMONY = {"openai", "openai_gptoss"}
# Tokens before a delta that its text may depend on.
_CONTEXT_TOKENS = 8


class ParsedRequest:
    """The answers to one request. `plan` is how the engine has to constrain them."""

    def __init__(self, opened: p.OpenParser) -> None:
        """Raises InvalidRequest for tools that cannot be used, ParserFailed if the parsers do not
        fit the model."""
        values = json.loads(opened.request_json)
        choice = values.get("tool_choice", "none")
        self._one_call = values.get("parallel_tool_calls") is False
        # The model is free in a call that it need not make, unless its tool is strict.
        level = "auto" if choice in ("none", "auto") and not self._one_call else "parameter"
        names = (opened.tool_parser, opened.reasoning_parser)
        self.tokenizer = _tokenizer_of(opened.tokenizer)
        self._kind = _parser_class(opened.tokenizer, *names, level)
        self._template_kwargs = values.get("chat_template_kwargs") or {}
        self.prompt = list(opened.prompt_token_ids)
        self._resume = list(opened.resume_token_ids)
        try:
            self.request: Any = ChatCompletionRequest(
                model="", messages=[{"role": "user", "content": ""}], **values
            )
            parser = self.make_parser()
            self.request = parser.adjust_request(self.request)
            wanted = self.request.extract_structured_outputs()
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "tools"
            raise InvalidRequest(f"'{field}': {first['msg']}", field=field) from None
        except (VLLMClientError, ValueError) as error:
            field = getattr(error, "parameter", None) or "tools"
            text = f"'{field}': {next(iter(error.args), error)}"
            raise InvalidRequest(text, field=field) from None
        if wanted is None and choice not in ("none", "auto"):
            text = f"'tool_choice': the parser {opened.tool_parser} cannot force a call"
            raise InvalidRequest(text, field="tool_choice")
        self.plan = p.ParserPlan()
        if wanted is not None:
            self.plan.structured_output.CopyFrom(_constraint(wanted))
            ended = self.request.resolve_reasoning_ended(parser, self.prompt)
            self.plan.after_reasoning = ended is False
        self._choices: dict[int, _Choice] = {}

    def make_parser(self) -> Parser:
        try:
            return self._kind(
                self.tokenizer,
                self.request.tools,
                chat_template_kwargs=self._template_kwargs,
            )
        except RuntimeError as error:  # the tokenizer lacks its markup
            raise ParserFailed(str(error)) from None

    def parse(self, given: p.ParserInput) -> p.ParserOutput:
        """Return what was found in what was `given`."""
        choice = self._choices.get(given.index)
        if choice is None:
            choice = self._choices[given.index] = _Choice(self, given.index, self._resume)
        output = choice.parse(given.token_ids, given.text, finished=given.finished)
        for call in list(output.tool_calls) if self._one_call else ():
            if call.index:  # a parser without a structural tag cannot keep the model from more
                output.tool_calls.remove(call)
        return output

    def check(self, last: p.ParserInput) -> p.ParserCheck:
        """Compare with the parser's result for the whole answer, after its `last` input."""
        try:
            diverged = not last.truncated and self._choices[last.index].diverged()
        except Exception:
            logger.exception("the parser of the whole answer")
            diverged = True
        return p.ParserCheck(index=last.index, diverged=diverged)


class _Choice:
    """One answer. State: its parser, and all that came and was found so far."""

    def __init__(self, parsed: ParsedRequest, index: int, resume: Sequence[int]) -> None:
        self._parsed, self._index = parsed, index
        self._parser = parsed.make_parser()
        self._token_ids: list[int] = []
        self._text = self._reasoning = self._content = ""
        self._calls: list[list[str]] = []  # name and arguments
        pieces = _pieces(parsed.tokenizer, resume, [])
        for token_id, piece in zip(resume, pieces, strict=True):
            self.parse([token_id], piece, finished=False)

    def parse(self, token_ids: Sequence[int], text: str, *, finished: bool) -> p.ParserOutput:
        """Return what `token_ids` add, whose text may lag behind them."""
        output = p.ParserOutput(index=self._index)
        parts = self._cut(list(token_ids), text)
        for number, (ids, piece) in enumerate(parts, 1):
            self._token_ids += ids
            self._text += piece
            delta = self._parser.parse_delta(
                piece,
                ids,
                self._parsed.request,
                self._parsed.prompt,
                finished=finished and number == len(parts),
            )
            if delta is not None:
                self._add(output, delta)
        if finished:
            output.reasoning_tokens = self._parser.count_reasoning_tokens(self._token_ids)
        return output

    def _cut(self, token_ids: list[int], text: str) -> list[tuple[list[int], str]]:
        """Return single tokens with their texts, or all in one if the text does not tell."""
        if len(token_ids) < 2:
            return [(token_ids, text)]
        before = self._token_ids[-_CONTEXT_TOKENS:]
        pieces = _pieces(self._parsed.tokenizer, token_ids, before)
        if "".join(pieces) != text:
            return [(token_ids, text)]
        return [([x], piece) for x, piece in zip(token_ids, pieces, strict=True)]

    def _add(self, output: p.ParserOutput, delta: DeltaMessage) -> None:
        reasoning, content = delta.reasoning or "", delta.content or ""
        self._reasoning += reasoning
        self._content += content
        output.reasoning += reasoning
        output.content += content
        for call in delta.tool_calls or ():
            name = (call.function and call.function.name) or ""
            arguments = (call.function and call.function.arguments) or ""
            while call.index >= len(self._calls):
                self._calls.append(["", ""])
            self._calls[call.index][0] += name
            self._calls[call.index][1] += arguments
            output.tool_calls.add(
                index=call.index, id=call.id or "", name=name, arguments=arguments
            )

    def diverged(self) -> bool:
        """Return whether the parser finds something else in the whole answer."""
        parser = self._parsed.make_parser()
        parser.set_prompt_token_ids(self._parsed.prompt)
        reasoning, content, calls = parser.parse(
            self._text,
            self._parsed.request,
            enable_auto_tools=True,
            model_output_token_ids=self._token_ids,
        )
        whole = [(call.name, _json(call.arguments)) for call in calls or ()]
        streamed = [(name, _json(arguments)) for name, arguments in self._calls]
        texts = ((reasoning, self._reasoning), (content, self._content))
        return whole != streamed or any((x or "").strip() != y.strip() for x, y in texts)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pieces(tokenizer: Any, token_ids: Sequence[int], before: list[int]) -> list[str]:
    """Return the text that each token completes, after the tokens `before`."""
    fast = getattr(tokenizer, "_tokenizer", None)
    if fast is None:
        return [tokenizer.decode([x], skip_special_tokens=False) for x in token_ids]
    stream = DecodeStream(ids=before, skip_special_tokens=False)
    return [stream.step(fast, x) or "" for x in token_ids]


@lru_cache(maxsize=16)
def _tokenizer_of(directory: str) -> Any:
    """Return the tokenizer whose files a router has."""
    if (Path(directory) / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(directory)
    return get_tokenizer(directory, tokenizer_mode="mistral")


@lru_cache(maxsize=64)
def _parser_class(path: str, tools: str, reasoning: str, level: str) -> type[Parser]:
    """Raises ParserFailed if there are no such parsers, or if they do not fit the tokenizer."""
    try:
        kind: type[Parser] | None = ParserManager.get_parser(
            tool_parser_name=tools or None,
            reasoning_parser_name=reasoning or None,
            enable_auto_tools=bool(tools),
            is_harmony=bool({tools, reasoning} & _HARMONY),
            tool_strict_level=level,
            tokenizer=_tokenizer_of(path),
        )
    except (TypeError, KeyError, ValueError) as error:
        raise ParserFailed(str(error)) from None
    assert kind is not None, "a request names a parser"
    return kind


def _constraint(wanted: StructuredOutputsParams) -> c.StructuredOutput:
    if wanted.choice is not None:
        return c.StructuredOutput(choice=c.StructuredOutput.Choices(value=wanted.choice))
    if wanted.json is not None:
        schema = wanted.json if isinstance(wanted.json, str) else json.dumps(wanted.json)
        return c.StructuredOutput(json_schema=schema)
    names = ("json_object", "regex", "grammar", "structural_tag")
    given = {x: value for x in names if (value := getattr(wanted, x)) is not None}
    return c.StructuredOutput(**given)
