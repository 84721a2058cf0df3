"""Tool calls and reasoning in answers, found by vLLM's own parsers."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMClientError
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer

from pdserve.errors import InvalidRequest, ParserFailed
from pdserve.v1 import common_pb2 as c
from pdserve.v1 import parser_pb2 as p
from workers.vllm.parsing.answer_parts import AnswerParts
from workers.vllm.patches.detokenize import detokenizer_of

if TYPE_CHECKING:
    from vllm.parser.abstract_parser import Parser
    from vllm.sampling_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

_HARMONY = {"openai", "openai_gptoss"}


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
        self._is_stream = values.get("stream", True)
        self._choices: dict[int, AnswerParts] = {}
        if opened.resume_token_ids:  # requests that resume have one answer
            self._choice(0).resume(opened.resume_token_ids)

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
        output = p.ParserOutput(index=given.index)
        choice = self._choice(given.index)
        choice.parse(given.token_ids, given.text, output, finished=given.finished)
        for call in list(output.tool_calls) if self._one_call else ():
            if call.index:  # without a structural tag the model can generate more calls: drop them
                output.tool_calls.remove(call)
        return output

    def _choice(self, index: int) -> AnswerParts:
        if index not in self._choices:
            self._choices[index] = AnswerParts(
                self.make_parser,
                self.request,
                self.prompt,
                detokenizer_of(self.tokenizer, self.prompt),
                is_stream=self._is_stream,
            )
        return self._choices[index]


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
    except (TypeError, KeyError, ValueError, ImportError) as error:
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
