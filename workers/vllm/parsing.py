"""Tool calls and reasoning in answers, found by vLLM's own parsers.

The result of a parser depends on how an answer is split into deltas: some parsers lose arguments or
leak markup if a delta has several tokens (vllm#55082, vllm#47907). So each call gets one token.
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
# Number of preceding tokens on which the text of a delta may depend.
_CONTEXT_TOKENS = 8


class RequestParsers:
    """The answers to one request. `plan` is the constraint that the engine must apply."""

    def __init__(self, opened: p.OpenParser) -> None:
        """Raises InvalidRequest for unusable tools, and ParserFailed if the parsers do not fit the
        model."""
        values = json.loads(opened.request_json)
        choice = values.get("tool_choice", "none")
        self._one_call = values.get("parallel_tool_calls") is False
        # An optional call is not constrained, unless its tool is strict.
        level = "auto" if choice in ("none", "auto") and not self._one_call else "parameter"
        names = (opened.tool_parser, opened.reasoning_parser)
        self.tokenizer = _tokenizer_of(opened.tokenizer)
        self._kind = _parser_class(opened.tokenizer, *names, level)
        self._template_kwargs = values.get("chat_template_kwargs") or {}
        self.prompt = list(opened.prompt_token_ids)
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
        self._choices: dict[int, _ChoiceParsers] = {}
        if opened.resume_token_ids:  # requests that resume have one answer
            self._choices[0] = _ChoiceParsers(self, 0, opened.resume_token_ids)

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
        """Parse the given tokens and return the new content, reasoning and tool calls."""
        choice = self._choices.get(given.index)
        if choice is None:
            choice = self._choices[given.index] = _ChoiceParsers(self, given.index, ())
        output = choice.parse(given.token_ids, given.text, finished=given.finished)
        for call in list(output.tool_calls) if self._one_call else ():
            if call.index:  # without a structural tag the model can make more calls: drop them
                output.tool_calls.remove(call)
        return output


class _ChoiceParsers:
    """One answer. State: its parser, and its tokens so far."""

    def __init__(self, parsed: RequestParsers, index: int, resume: Sequence[int]) -> None:
        self._parsed, self._index = parsed, index
        self._parser = parsed.make_parser()
        self._token_ids: list[int] = []
        pieces = _pieces(parsed.tokenizer, resume, [])
        for token_id, piece in zip(resume, pieces, strict=True):
            self.parse([token_id], piece, finished=False)

    def parse(self, token_ids: Sequence[int], text: str, *, finished: bool) -> p.ParserOutput:
        """Return the output that `token_ids` add. `text` may lag behind the tokens."""
        output = p.ParserOutput(index=self._index)
        parts = self._cut(list(token_ids), text)
        for number, (ids, piece) in enumerate(parts, 1):
            self._token_ids += ids
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
        """Return single tokens with their texts, or all tokens as one piece if the texts of the
        tokens do not add up to `text`."""
        if len(token_ids) < 2:
            return [(token_ids, text)]
        before = self._token_ids[-_CONTEXT_TOKENS:]
        pieces = _pieces(self._parsed.tokenizer, token_ids, before)
        if "".join(pieces) != text:
            return [(token_ids, text)]
        return [([x], piece) for x, piece in zip(token_ids, pieces, strict=True)]

    def _add(self, output: p.ParserOutput, delta: DeltaMessage) -> None:
        output.reasoning += delta.reasoning or ""
        output.content += delta.content or ""
        for call in delta.tool_calls or ():
            name = (call.function and call.function.name) or ""
            arguments = (call.function and call.function.arguments) or ""
            output.tool_calls.add(
                index=call.index, id=call.id or "", name=name, arguments=arguments
            )


def _pieces(tokenizer: Any, token_ids: Sequence[int], before: list[int]) -> list[str]:
    """Return for each token the text that it completes, given the preceding tokens `before`."""
    fast = getattr(tokenizer, "_tokenizer", None)
    if fast is None:
        return [tokenizer.decode([x], skip_special_tokens=False) for x in token_ids]
    stream = DecodeStream(ids=before, skip_special_tokens=False)
    return [stream.step(fast, x) or "" for x in token_ids]


@lru_cache(maxsize=16)
def _tokenizer_of(directory: str) -> Any:
    """Return the tokenizer in a router's directory."""
    if (Path(directory) / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(directory)
    return get_tokenizer(directory, tokenizer_mode="mistral")


@lru_cache(maxsize=64)
def _parser_class(path: str, tools: str, reasoning: str, level: str) -> type[Parser]:
    """Return the combined parser class. Raises ParserFailed if a parser is unknown or does not fit
    the tokenizer."""
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
