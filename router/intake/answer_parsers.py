"""Which of vLLM's parsers find the tool calls and the reasoning of an answer."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError, UnsupportedField
from pdserve.model.chat_template import begins_reasoning
from pdserve.types import Constraint, Parsing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.config import ParsersConfig
    from pdserve.model.tokenizer import Conversation, Tokenizer
    from pdserve.types import ModelInfo, StructuredOutput
    from router.dialects.parsed_request import ParsedRequest
    from router.intake.tokenizers import Tokenizers

logger = logging.getLogger(__name__)

# Values of router.parsers.tool_calls and router.parsers.reasoning that do not name a parser.
AUTO, NONE = "auto", "none"
# The parser of calls that a grammar forces, for models whose own format is not known.
_FORCED_CALLS = "hermes"
_TOOL_OPTIONS = ("tool_choice", "parallel_tool_calls")
_UNSHOWN = (
    "its chat template does not show tools to the model: it calls them only if tool_choice is "
    "required or names one"
)
# Number of tokens at the end of a prompt that show whether it begins the answer's reasoning.
_PROMPT_END = 16


class AnswerParsers:
    """State: the tokenizers whose templates were reported to show no tools."""

    def __init__(self, tokenizers: Tokenizers, config: ParsersConfig) -> None:
        """Raises ConfigError for a parser that needs vLLM if vLLM is not installed."""
        self._tokenizers, self._config = tokenizers, config
        self._has_vllm = find_spec("vllm") is not None
        for key in ("tool_calls", "reasoning"):
            name = getattr(config, key)
            if name not in (AUTO, NONE) and not self._has_vllm:
                text = f"router.parsers.{key}: {name} needs vLLM, which is not installed here"
                raise ConfigError(text, field=f"router.parsers.{key}")
        self._reported: set[str] = set()

    async def choose(
        self, parsed: ParsedRequest, chat: Conversation, model: ModelInfo, prompt: Sequence[int]
    ) -> Parsing | None:
        """Return how the answer is parsed, or None if it has neither tool calls nor reasoning."""
        tokenizer = await self._tokenizers.get(model)
        tools = self._tool_parser_of(parsed, chat, tokenizer, model)
        fitting, reasoning = tokenizer.parsers(bool(tools)), self._config.reasoning
        if reasoning == AUTO:
            reasoning = fitting.reasoning if self._has_vllm else ""
        if reasoning == NONE:
            reasoning = ""
        if not (tools or reasoning):
            return None
        end = tokenizer.decode(list(prompt[-_PROMPT_END:]))
        thinks = fitting.is_thinking(end, chat.variables)
        if self._config.reasoning == AUTO and thinks is False:
            reasoning = ""
            if not tools:
                return None
        options = dict(parsed.parsing_options)
        variables = dict(chat.variables)
        is_shown = begins_reasoning(end) is not None
        if reasoning and thinks is not None and (is_shown or self._config.reasoning == AUTO):
            # Parsers know only the variables of a request, and not what its prompt ends with.
            variables |= {"thinking": thinks, "enable_thinking": thinks}
        if variables:
            options["chat_template_kwargs"] = variables
        if (constraint := parsed.sampling.structured_output) is not None:
            options |= _constraint_fields(constraint)
        if tools:
            options["tools"] = chat.tools
        else:
            options = {x: y for x, y in options.items() if x not in _TOOL_OPTIONS}
        return Parsing(
            model.tokenizer,
            tokenizer.files,
            tools,
            reasoning,
            json.dumps(options),
            json.dumps({"chat_template_kwargs": variables}),
        )

    def _tool_parser_of(
        self, parsed: ParsedRequest, chat: Conversation, tokenizer: Tokenizer, model: ModelInfo
    ) -> str:
        """Return the parser of tool calls, or "" if the answer has none. Raises UnsupportedField if
        a call could not be found in it."""
        if not chat.tools:
            return ""
        if not tokenizer.shows_tools and model.tokenizer not in self._reported:
            self._reported.add(model.tokenizer)
            logger.warning("model %s: %s", model.name, _UNSHOWN)
        fitting = tokenizer.parsers(tools=True)
        found = fitting.tool_calls if self._config.tool_calls == AUTO else self._config.tool_calls
        choice = parsed.parsing_options.get("tool_choice", "auto")
        is_forced = choice not in ("auto", "none")
        if not (found or is_forced or tokenizer.shows_tools):
            return ""
        if found == NONE:
            text = "router.parsers.tool_calls is none"
        elif not self._has_vllm:
            text = "the router parses tool calls with vLLM, which is not installed there"
        elif found or is_forced:
            return found or _FORCED_CALLS
        else:
            text = f"model {model.name}: {fitting.lack}"
        raise UnsupportedField(f"'tools': {text}", field="tools")

    def remarks(self, models: Iterable[ModelInfo]) -> list[tuple[str, str]]:
        """Return models whose tool calls are not found or whose prompts do not show tools, and
        why."""
        found = []
        for model in models:
            if (tokenizer := self._tokenizers.loaded(model)) is None:
                continue
            if not tokenizer.shows_tools:
                found.append((model.name, _UNSHOWN))
            elif (
                self._config.tool_calls == AUTO and not (fits := tokenizer.parsers(True)).tool_calls
            ):
                found.append((model.name, fits.lack))
        return found


def _constraint_fields(constraint: StructuredOutput) -> dict[str, Any]:
    """Return the fields of vLLM's chat request that express a constraint."""
    match constraint.kind:
        case Constraint.JSON_SCHEMA:
            schema = {"name": "answer", "schema": json.loads(constraint.value)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case Constraint.JSON_OBJECT:
            return {"response_format": {"type": "json_object"}}
        case Constraint.CHOICE:
            return {"structured_outputs": {"choice": constraint.choices}}
        case kind:
            return {"structured_outputs": {kind.value: constraint.value}}
