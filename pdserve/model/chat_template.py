"""Chat templates: sandboxed jinja2 with the settings and helpers of `apply_chat_template` in
transformers, which published templates need."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pdserve.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.nodes import Node
    from jinja2.parser import Parser


class _Generation(Extension):
    """The tag `{% generation %}`. Only training uses it, so its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Replaces jinja2's own filter, which escapes HTML and sorts keys.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean local time


class _Environment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # The sandbox refuses these types, but a template may read its own `namespace()` and `loop`.
        is_own = type(obj) in (Namespace, LoopContext) and not attr.startswith("_")
        return is_own or super().is_safe_attribute(obj, attr, value)


_ENVIRONMENT = _Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = _strftime_now


# (marks that the template contains, vLLM's tool-call parser, vLLM's reasoning parser).
_FORMATS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("<tool_call>", "<arg_key>"), "glm45", "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder", "qwen3"),
    (("<seed:tool_call>",), "seed_oss", "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2", "minimax_m2"),
    (("<tool_call>",), "hermes", ""),
    (("[TOOL_CALLS]",), "mistral", ""),
    (("<|tool_calls_section_begin|>",), "kimi_k2", "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3", ""),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31", ""),
    (("<start_function_call>",), "functiongemma", ""),
    (("<|python_tag|>",), "llama3_json", ""),
)
_THINKING = ("enable_thinking", "thinking")  # variables that turn reasoning on or off


@dataclass(frozen=True, slots=True)
class ParserNames:
    """vLLM's parsers that fit a chat template, "" for none. `thinks`: the model reasons by
    default."""

    tool_calls: str = ""
    reasoning: str = ""
    thinks: bool = True

    def is_thinking(self, variables: Mapping[str, Any]) -> bool:
        """Return whether a request with these template variables may get reasoning."""
        return bool(next((variables[x] for x in _THINKING if x in variables), self.thinks))


# Marks the end of the last message if the answer continues it. Text after it is cut off.
_CUT = "\ue001cut\ue001 "


class ChatTemplate:
    """A compiled template and the special tokens that it may insert."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is broken: {error}", field="model") from error
        more = {"tools": None, "documents": None}
        self._globals = {**self._template.globals, **special_tokens, **more}
        self._knows_developer = "developer" in source
        self._source = source
        self.takes_tools = "tools" in source

    @cached_property
    def parsers(self) -> ParserNames:
        """The parsers for the model's output, detected by marks in the template's source."""
        source = self._source
        fits = (x for x in _FORMATS if all(mark in source for mark in x[0]))
        _, tool_calls, reasoning = next(fits, ((), "", ""))
        if "<think>" not in source:
            return ParserNames(tool_calls)
        switch = next((x for x in _THINKING if x in source), None)
        if switch is None:
            return ParserNames(tool_calls, reasoning or "deepseek_r1")
        asks = [{"role": "user", "content": "?"}]
        thinks = self.render(asks) != self.render(asks, {switch: False})
        return ParserNames(tool_calls, reasoning or ("qwen3" if thinks else "deepseek_v3"), thinks)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the conversation as text, up to the start of the answer. With
        `continue_final_message` the text ends after the last message's content. The role
        `developer` becomes `system` if the template does not know it. Raises InvalidRequest (field
        `messages`) if the template rejects the conversation."""
        plain: list[dict[str, Any]] = [dict(message) for message in messages]
        if continue_final_message:
            plain[-1]["content"] += _CUT
        for message in plain:
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
        try:
            given = {**variables, "messages": plain, "add_generation_prompt": add_generation_prompt}
            # Equals Template.render, but does not copy the variables several times.
            context = Context(_ENVIRONMENT, {**self._globals, **given}, None, self._template.blocks)
            text = "".join(self._template.root_render_func(context))
        except (
            *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError),
            *(LookupError, AttributeError, RecursionError),
        ) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from error
        return _cut(text) if continue_final_message else text


def _cut(text: str) -> str:
    """Return `text` up to the mark. The mark ends with a blank. If the blank is missing, the
    template strips messages, so the text before the mark is stripped too."""
    before, mark, after = text.rpartition(_CUT.rstrip())
    if not mark:
        raise InvalidRequest(
            "the model's chat template does not show the last message", field="messages"
        )
    return before if after.startswith(" ") else before.rstrip()
