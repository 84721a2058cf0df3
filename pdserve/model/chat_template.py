"""Chat templates: sandboxed jinja2 with the settings and helpers of `apply_chat_template` in
transformers, which published templates need."""

from __future__ import annotations

import datetime as dt
import json
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pdserve.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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
    # Replaces jinja2's filter, which escapes HTML and sorts keys.
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


class _JsonArguments(dict[str, Any]):
    """Arguments of a tool call. Templates that add them to text get JSON."""

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, other: object) -> str:
        return str(self) + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        return other + str(self) if isinstance(other, str) else NotImplemented


# The end of a prompt that begins, or ends, the reasoning of the answer.
_BEGUN = re.compile(r"<(/?)think(?::[^<>\s]+)?>\s*$")


def begins_reasoning(prompt_end: str) -> bool | None:
    """Return whether a prompt begins the answer's reasoning, or None if that cannot be
    determined."""
    found = _BEGUN.search(prompt_end)
    return None if found is None else not found[1]


@dataclass(frozen=True, slots=True)
class ParserNames:
    """vLLM's parsers for a chat template, "" for none. `thinks`: the model reasons by default; None
    if only its parser can determine that. `switches`: variables of the template that change it.
    `missing`: a package that the parsers need and that is not installed."""

    tool_calls: str = ""
    reasoning: str = ""
    thinks: bool | None = None
    switches: Collection[str] = ()
    missing: str = ""

    def is_thinking(self, prompt_end: str, variables: Mapping[str, Any]) -> bool | None:
        """Return whether the answer to a prompt may have reasoning. The end of the prompt takes
        precedence over its variables."""
        begun = begins_reasoning(prompt_end)
        given = (bool(variables[x]) for x in self.switches if x in variables)
        return next(given, self.thinks) if begun is None else begun

    @property
    def lack(self) -> str:
        """Why tool calls cannot be parsed, and what to do."""
        if self.missing:
            return f"the parser of its tool calls needs the package {self.missing}: install it"
        return "no parser fits its chat template: set router.parsers.tool_calls"


_CONTENT_IS_NONE = re.compile(r"""content['"]?\]?\s+is\s+none""", re.IGNORECASE)
# Marks the end of the last message if the answer continues it. Text after it is cut off.
_CUT = "\ue001cut\ue001 "


class ChatTemplate:
    """A compiled template and the special tokens that it may insert."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(source)
            # Names of variables passed to the template, without attributes and its own variables.
            self.variables = meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is broken: {error}", field="model") from error
        more = {"tools": None, "documents": None}
        self._globals = {**self._template.globals, **special_tokens, **more}
        self._knows_developer = "developer" in source
        # Such templates render the calls of a message only if it has no content.
        self._asks_for_none = _CONTENT_IS_NONE.search(source) is not None
        self.source = source
        self.takes_tools = "tools" in self.variables

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
            if message.get("tool_calls"):
                if self._asks_for_none and not message["content"]:
                    message["content"] = None
                message["tool_calls"] = [_called(x) for x in message["tool_calls"]]
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


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with arguments that are also text."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, dict):
        arguments = _JsonArguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _cut(text: str) -> str:
    """Return `text` up to the mark. The mark ends with a blank. If the blank is missing, the
    template strips messages, so the text before the mark is stripped too."""
    before, mark, after = text.rpartition(_CUT.rstrip())
    if not mark:
        raise InvalidRequest(
            "the model's chat template does not show the last message", field="messages"
        )
    return before if after.startswith(" ") else before.rstrip()
