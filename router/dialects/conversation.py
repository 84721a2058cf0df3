"""Conversations, their tools, and the variables of chat templates: what the dialects convert their
bodies to, and how OpenAI writes them."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from pdserve.model.tokenizer import ChatMessage, Conversation
from router.admission.constraints import check_schema
from router.dialects.fields import FollowsSchema, Ignored, Strict, Text, refuse
from router.dialects.image_parts import Address, Detail, image_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.model.tokenizer import MessageImage

logger = logging.getLogger(__name__)

_Empty = Annotated[list[Any], Meta(max_length=0)]


class TextPart(Strict, tag_field="type", tag="text"):
    text: str
    cache_control: Ignored = None
    annotations: Ignored = None


class ImageUrl(Strict):
    url: Address
    detail: Detail = None


class ImagePart(Strict, tag_field="type", tag="image_url"):
    image_url: ImageUrl
    uuid: Ignored = None
    cache_control: Ignored = None


class RefusalPart(Strict, tag_field="type", tag="refusal"):
    """Text of an earlier answer."""

    refusal: str


class ThinkingPart(Strict, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str | list[TextPart]
    signature: Ignored = None
    closed: Ignored = None

    @property
    def text(self) -> str:
        given = self.thinking
        return given if isinstance(given, str) else "".join(x.text for x in given)


Part = TextPart | ImagePart | RefusalPart | ThinkingPart
Arguments = str | dict[str, Any] | list[Any] | None


class CalledFunction(Strict):
    name: Text
    arguments: Annotated[
        Arguments,
        Meta(description="JSON text of an object. {} is passed to the chat template for others."),
    ] = None


def read_object(text: str, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        refuse(field, f"is not the JSON text of an object: {error}")


def history_object(given: Arguments, field: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as chat templates expect them. An answer that was cut
    off or is malformed must not make every later turn fail."""
    value: Any = given
    if isinstance(given, str):
        try:
            value = msgspec.json.decode(given) if given.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            value = None
    if isinstance(value, dict):
        return value
    logger.warning("%s is no JSON object; the chat template gets {}", field)
    return {}


class ToolCall(Strict):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: Ignored = None

    def parse(self, field: str) -> dict[str, Any]:
        arguments = history_object(self.function.arguments, f"{field}.function.arguments")
        called = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": called}


class Message(Strict, kw_only=True):
    """A message of a conversation. OpenAI's clients send answers back with empty lists or nulls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[Part] | None,
        Meta(
            description="Text, or parts. Parts of a message without images are joined by line "
            "breaks."
        ),
    ] = None
    name: str | None = None
    refusal: Annotated[
        str | _Empty | None, Meta(description="Stands for the content if there is none.")
    ] = None
    audio: _Empty | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: _Empty | None = None
    annotations: Ignored = None
    cache_control: Ignored = None
    parsed: Ignored = None
    thinking_blocks: Ignored = None
    provider_specific_fields: Ignored = None
    reasoning: Annotated[
        str | None, Meta(description="Passed to the chat template, under the name that it uses.")
    ] = None
    reasoning_content: Annotated[str | None, Meta(description="Same as reasoning.")] = None

    def parse(self, field: str) -> ChatMessage:
        content = self.content
        if not content and not isinstance(content, str):
            # Agents send back assistant turns that have only tool calls and no text.
            if self.role not in ("assistant", "tool"):
                refuse(f"{field}.content", "is required")
            content = str(self.refusal or "")
        parts = [content] if isinstance(content, str) else _parts(content, f"{field}.content")
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        given = self.content if isinstance(self.content, list) else ()
        own = [x for x in given if isinstance(x, RefusalPart | ThinkingPart)]
        if own and self.role != "assistant":
            refuse(f"{field}.content", "has a part that belongs to the role assistant")
        if reasoning is None:
            reasoning = "\n".join(x.text for x in own if isinstance(x, ThinkingPart)) or None
        calls = [x.parse(f"{field}.tool_calls[{i}]") for i, x in enumerate(self.tool_calls or ())]
        if calls and self.role != "assistant":
            refuse(f"{field}.tool_calls", "belongs to the role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            refuse(f"{field}.tool_call_id", "belongs to the role tool")
        return ChatMessage.of_parts(
            self.role,
            parts,
            name=self.name,
            reasoning=reasoning,
            tool_calls=calls,
            tool_call_id=self.tool_call_id,
        )


# Claude Code begins its system prompt with a line that differs in every request. It would cost the
# cached prefix of everything after it.
_BILLING = "x-anthropic-billing-header:"
_BILLING_LINE = re.compile(rf"^{_BILLING}[^\n]*\n?", re.MULTILINE)


def without_billing(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages without the billing line of Claude Code, and without a system message
    that has nothing else."""
    kept = []
    for message in messages:
        if message.role in ("system", "developer") and _BILLING in message.content:
            message.content = _BILLING_LINE.sub("", message.content)
            if not message.content:
                continue
        kept.append(message)
    return kept or list(messages)


def _parts(content: Sequence[Part], field: str) -> list[str | MessageImage]:
    """Return the texts and images. Reasoning is none of them."""
    found: list[str | MessageImage] = []
    for i, part in enumerate(content):
        if isinstance(part, ImagePart):
            at = f"{field}[{i}].image_url.url"
            found.append(image_at(part.image_url.url, part.image_url.detail, at))
        elif not isinstance(part, ThinkingPart):
            found.append(part.refusal if isinstance(part, RefusalPart) else part.text)
    return found


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[\w.:/-]{1,256}$")]
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, Meta(description="JSON schema of the arguments.")
    ] = None
    strict: FollowsSchema = None


class ToolDefinition(Strict):
    function: Function
    type: Literal["function"]


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    function: NamedFunction
    type: Literal["function"]


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> ToolDefinition:
    function = Function(name=name, description=description, parameters=parameters, strict=strict)
    return ToolDefinition(function=function, type="function")


def named_tool(name: str) -> NamedTool:
    return NamedTool(function=NamedFunction(name=name), type="function")


MAX_TOOLS = 512
Tools = Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    Meta(description="auto by default. Forced calls follow the schema of their arguments."),
]
ParallelCalls = Annotated[bool | None, Meta(description="False: at most one call in an answer.")]


def read_tools(
    tools: Sequence[ToolDefinition] | None, choice: ToolChoice, parallel: bool | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (tools for the chat template, parser options). Both are empty with tool_choice none.
    Raises InvalidRequest naming the field."""
    if not tools and choice not in (None, "none", "auto"):
        refuse("tool_choice", "requires tools")
    if not tools or choice == "none":
        return [], {}
    names = {tool.function.name for tool in tools}
    if len(names) < len(tools):
        refuse("tools", "has two functions of the same name")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        refuse("tool_choice.function.name", f"is {choice.function.name!r}, which is not in tools")
    for i, tool in enumerate(tools):
        check_schema(tool.function.parameters, field=f"tools[{i}].function.parameters")
    options = {"tool_choice": choice or "auto", "parallel_tool_calls": parallel}
    found: dict[str, Any] = msgspec.to_builtins(
        {name: value for name, value in options.items() if value is not None}
    )
    plain = []
    for tool in tools:
        function = msgspec.structs.asdict(tool.function)
        set_only = {name: value for name, value in function.items() if value is not None}
        plain.append({"type": "function", "function": set_only})
    return plain, found


# Variables of chat templates that are set by other fields of the body.
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
Variables = Annotated[
    dict[str, Any] | None, Meta(description="Variables for the model's chat template.")
]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    Meta(
        description="Passed to the chat template as reasoning_effort, and as enable_thinking "
        "(false for none) unless chat_template_kwargs sets that."
    ),
]
IncludesReasoning = Annotated[
    bool | None, Meta(description="False: the answer has neither its reasoning nor token ids.")
]
Begins = Annotated[bool | None, Meta(description="The answer begins a new message. Default: true.")]
Continues = Annotated[bool | None, Meta(description="The answer continues the last message.")]


class _Chat(Protocol):
    @property
    def messages(self) -> Sequence[Message] | None: ...

    chat_template_kwargs: Variables
    reasoning_effort: Effort
    add_generation_prompt: Begins
    continue_final_message: Continues


def template_variables(given: Variables, effort: Effort) -> dict[str, Any]:
    """Return the variables of the chat template, with those that control reasoning. Raises
    InvalidRequest naming the field."""
    for name in _OWN_VARIABLES:
        if given and name in given:
            refuse(f"chat_template_kwargs.{name}", "is not a variable of its own")
    by_effort = {"enable_thinking": effort != "none", "reasoning_effort": effort}
    return (by_effort if effort is not None else {}) | (given or {})


def conversation(body: _Chat, tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
    """Return the conversation for the chat template. Raises InvalidRequest naming the field."""
    variables = template_variables(body.chat_template_kwargs, body.reasoning_effort)
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        refuse("add_generation_prompt", "must be false with continue_final_message")
    begins = body.add_generation_prompt is not False and not continues
    messages = [x.parse(f"messages[{i}]") for i, x in enumerate(body.messages or ())]
    return Conversation(without_billing(messages), begins, continues, variables, tools)
