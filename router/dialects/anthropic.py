"""Anthropic's Messages API: bodies, events and errors. Requests become a ParsedRequest, like those
of every other API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pdserve.errors import InternalError
from pdserve.model.tokenizer import ChatMessage, Conversation
from pdserve.types import (
    MAX_STOP_STRINGS,
    Constraint,
    FinishReason,
    Receipt,
    SamplingParams,
    StructuredOutput,
)
from router.attempt.answer import pieces
from router.dialects.conversation import (
    MAX_TOOLS,
    Arguments,
    NamedTool,
    function_tool,
    history_object,
    named_tool,
    read_tools,
    without_billing,
)
from router.dialects.fields import (
    MAX_MESSAGES,
    Count,
    Extension,
    FollowsSchema,
    GenerateBody,
    Ignored,
    Known,
    Share,
    Strict,
    Text,
    TopK,
    TopP,
    convert,
    encode,
    knows,
    not_supported,
    refuse,
)
from router.dialects.image_parts import Address, image_at, image_of_base64
from router.dialects.parsed_request import ParsedRequest, PromptText
from router.dialects.session_ids import session_of_metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.model.tokenizer import MessageImage
    from pdserve.types import GenerateRequest, ModelInfo, ToolCallDelta
    from router.attempt.answer import AnswerDelta
    from router.dialects.fields import Writer


class TextBlock(Strict, tag_field="type", tag="text"):
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class Base64Source(Strict, tag_field="type", tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Strict, tag_field="type", tag="url"):
    url: Address


class ImageBlock(Strict, tag_field="type", tag="image"):
    source: Base64Source | UrlSource
    cache_control: Ignored = None

    def parse(self, field: str) -> MessageImage:
        if isinstance(self.source, UrlSource):
            return image_at(self.source.url, None, f"{field}.source.url")
        return image_of_base64(self.source.data, None, f"{field}.source.data")


class ThinkingBlock(Strict, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. It is passed to the chat template."""

    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(Strict, tag_field="type", tag="redacted_thinking"):
    """Not passed to the model: only Anthropic can decrypt it."""

    data: Ignored = None


class ToolUseBlock(Strict, tag_field="type", tag="tool_use"):
    """A tool call of an earlier answer."""

    id: str
    name: str
    input: Arguments = None
    caller: Ignored = None
    cache_control: Ignored = None


class ToolResultBlock(Strict, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: Ignored = None
    cache_control: Ignored = None

    def parse(self, field: str) -> ChatMessage:
        content = self.content or ()
        parts = [content] if isinstance(content, str) else _parts_of(content, f"{field}.content")
        return ChatMessage.of_parts("tool", parts, tool_call_id=self.tool_use_id)


Block = (
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def parse(self, field: str) -> list[ChatMessage]:
        """Return each tool result as a separate message, then one message with the rest."""
        blocks, field = self.content, f"{field}.content"
        if isinstance(blocks, str):
            return [ChatMessage(self.role, blocks)]
        messages = [
            x.parse(f"{field}[{i}]") for i, x in enumerate(blocks) if isinstance(x, ToolResultBlock)
        ]
        thinking = [x.thinking for x in blocks if isinstance(x, ThinkingBlock)]
        calls = [
            {"id": x.id, "type": "function", "function": {"name": x.name, "arguments": arguments}}
            for i, x in enumerate(blocks)
            if isinstance(x, ToolUseBlock)
            for arguments in [history_object(x.input, f"{field}[{i}].input")]
        ]
        parts = _parts_of(blocks, field)
        if any(parts) or not messages:
            reasoning = "\n".join(thinking) if thinking else None
            messages.append(
                ChatMessage.of_parts(self.role, parts, reasoning=reasoning, tool_calls=calls)
            )
        return messages


class CustomTool(Strict):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: FollowsSchema = None
    type: Literal["custom"] | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    defer_loading: Annotated[bool | None, Meta(description="Only false.")] = None
    allowed_callers: Annotated[list[str] | None, Meta(description="With `direct`.")] = None

    def check(self, field: str) -> None:
        """Raise UnsupportedField unless the model sees the tool from the start, and calls it."""
        if self.defer_loading:
            raise not_supported(f"{field}.defer_loading", "the model sees every tool")
        if self.allowed_callers and "direct" not in self.allowed_callers:
            raise not_supported(f"{field}.allowed_callers", "the model itself calls every tool")


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, Meta(description="Name of the tool, with type tool.")] = None
    disable_parallel_tool_use: bool | None = None


class MessageSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Strict):
    format: MessageSchemaFormat | None = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Meta(description="Passed to the chat template as reasoning_effort."),
    ] = None


class Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Ignored = None
    display: Ignored = None


# Fields of the API for Anthropic's own models, tools and machines.
_KNOWN = {
    "container": Known(),
    "fallbacks": Known(([],)),
    "mcp_servers": Known(([],)),
    "service_tier": Known(("auto", "standard_only")),
    "speed": Known(("standard",)),
    "thread": Known((), "send the whole conversation"),
    "user_profile_id": Known(),
    "workspace_id": Known(),
}


@knows(_KNOWN)
class CountTokensRequest(GenerateBody, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[
        str | list[TextBlock] | None,
        Meta(
            description="Without a line that begins with x-anthropic-billing-header: Claude Code "
            "changes it in every request, which would cost the cached prefix."
        ),
    ] = None
    thinking: Annotated[
        Thinking | None, Meta(description="Passed to the chat template as enable_thinking.")
    ] = None
    output_config: OutputConfig | None = None
    tools: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None,
        Meta(description="CustomTool. Tools that Anthropic runs are refused."),
    ] = None
    tool_choice: ToolChoice | None = None
    cache_control: Ignored = None
    context_management: Ignored = None

    def conversation(self) -> Conversation:
        """Return the conversation for the chat template. If the last message is the assistant's,
        the answer continues it."""
        system = self.system
        if system is not None and not isinstance(system, str):
            system = "\n".join(x.text for x in system)
        messages = [ChatMessage("system", system)] if system else []
        for i, turn in enumerate(self.messages):
            messages += turn.parse(f"messages[{i}]")
        messages = without_billing(messages)
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        continues = messages[-1].role == "assistant"
        tools, _ = self.read_tools()
        return Conversation(messages, not continues, continues, variables, tools)

    def read_tools(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Convert the tools to OpenAI's form, and return the result of conversation.read_tools."""
        tools = []
        for i, given in enumerate(self.tools or ()):
            if given.get("type", "custom") not in ("custom", None):
                raise not_supported(f"tools[{i}]", f"a tool of type {given['type']!r}")
            tool: CustomTool = convert(given, CustomTool, f"tools[{i}]")
            tool.check(f"tools[{i}]")
            tools.append(function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
        choice, parallel = None, None
        if self.tool_choice is not None:
            choice = _choice(self.tool_choice)
            if self.tool_choice.disable_parallel_tool_use is not None:
                parallel = not self.tool_choice.disable_parallel_tool_use
        return read_tools(tools, choice, parallel)

    def content(self) -> PromptText:
        """Return the conversation to count. Raises InvalidRequest naming the field."""
        return PromptText(self.conversation(), "messages")

    @staticmethod
    def counted(tokens: Sequence[int], model: ModelInfo) -> bytes:
        """Return the JSON of the answer for a prompt of these tokens."""
        return encode({"input_tokens": len(tokens)})


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    id_prefix: ClassVar[str] = "msg_"
    max_tokens: Count
    stop_sequences: Annotated[list[Text], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Share | None = None
    top_p: TopP = None
    top_k: TopK = None
    metadata: Annotated[
        Any, Meta(description="A session id in `user_id`, as Claude Code sends it, is used.")
    ] = None
    diagnostics: Ignored = None

    def parse(self) -> list[ParsedRequest]:
        given = self.given("temperature", "top_p", "top_k")
        if self.output_config is not None and self.output_config.format is not None:
            schema = encode(self.output_config.format.schema).decode()
            given["structured_output"] = StructuredOutput(Constraint.JSON_SCHEMA, schema)
        if self.stop_sequences is not None:
            given["stop"] = tuple(self.stop_sequences)
        parsed = ParsedRequest(
            model=self.model or "",
            prompt=self.conversation(),
            sampling=SamplingParams(max_tokens=self.max_tokens, **given),
            prompt_field="messages",
            constraint_field="output_config.format",
            given=given.keys(),
            parsing_options={**self.read_tools()[1], "stream": bool(self.stream)},
            session=session_of_metadata(self.metadata),
        )
        return [parsed]

    def without_prompt(self) -> GenerateBody:
        stand_in = [Turn(role="user", content="-")]
        return msgspec.structs.replace(self, messages=stand_in, system=None)

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        (request,) = made
        tokens, is_stream = len(request.prompt_token_ids), bool(self.stream)
        return MessageWriter(request_id, request.served_name, tokens, is_stream=is_stream)

    def refusal(self, request_id: str) -> Writer | None:
        return MessageWriter(request_id, self.model or "", 0, is_stream=bool(self.stream))


def _choice(choice: ToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    match choice.type:
        case "tool":
            if choice.name is None:
                refuse("tool_choice.name", "is required with type tool")
            return named_tool(choice.name)
        case "any":
            return "required"
        case "auto":
            return "auto"
    return "none"


def _parts_of(blocks: Sequence[Block], field: str) -> list[str | MessageImage]:
    """Return the texts and images among the blocks."""
    return [
        x.text if isinstance(x, TextBlock) else x.parse(f"{field}[{i}]")
        for i, x in enumerate(blocks)
        if isinstance(x, TextBlock | ImageBlock)
    ]


# -- Writing


class MessageUsage(Struct):
    """`input_tokens` excludes cached tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    inference_geo: str | UnsetType = UNSET


class MessageBody(Struct, kw_only=True):
    """A whole answer, or the start of a streamed one."""

    id: str
    model: str
    usage: MessageUsage
    content: list[dict[str, Any]]
    type: str = "message"
    role: str = "assistant"
    stop_reason: str | None = None
    stop_sequence: str | None = None
    pdserve: Extension | None = None


_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTENT_FILTER: "refusal",
}
# Kind of a block -> its initial fields, the type of its deltas, and the deltas' field.
_BLOCKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "text": ({"type": "text", "text": ""}, "text_delta", "text"),
    "reasoning": (
        {"type": "thinking", "thinking": "", "signature": ""},
        *("thinking_delta", "thinking"),
    ),
    "call": ({"type": "tool_use", "input": {}}, "input_json_delta", "partial_json"),
}


class MessageWriter:
    """Collects an answer and encodes its events if it is streamed. State: the message so far, and
    the open block: its kind (or its call's number), its fields and its text."""

    def __init__(self, request_id: str, model: str, prompt_tokens: int, *, is_stream: bool) -> None:
        usage = MessageUsage(prompt_tokens, 0)
        self._message = MessageBody(id=request_id, model=model, usage=usage, content=[])
        self._is_stream = is_stream
        self._has_begun = False
        self._open: str | int | None = None
        self._block: dict[str, Any] = {}
        self._text: list[str] = []
        self._before = b""  # encoded start of the open block's events, up to the text

    def write(self, delta: AnswerDelta) -> bytes:
        events = b""
        if not self._has_begun:
            self._has_begun = True
            events = self._event("message_start", message=self._message)
        for kind, text, call in pieces(delta):
            if kind != self._open:
                events += self._close() + self._begin(kind, call)
            self._text.append(text)
            if text and self._is_stream:
                events += self._before + encode(text) + b"}}\n\n"
        return events if delta.finish_reason is None else events + self._finish(delta)

    def _begin(self, kind: str | int, call: ToolCallDelta | None) -> bytes:
        fields, delta_type, field = _BLOCKS["call" if call else str(kind)]
        block = fields if call is None else {**fields, "id": call.id, "name": call.name}
        self._open, self._block, self._text = kind, dict(block), []
        number = len(self._message.content)
        self._before = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (number, delta_type.encode(), field.encode())
        )
        return self._event("content_block_start", index=number, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        text, content = "".join(self._text), self._message.content
        if self._block["type"] == "tool_use":
            self._block["input"] = _arguments(text)
        else:
            self._block[self._block["type"]] = text
        content.append(self._block)
        self._open = None
        return self._event("content_block_stop", index=len(content) - 1)

    def _finish(self, delta: AnswerDelta) -> bytes:
        assert delta.finish_reason is not None
        events, message = self._close(), self._message
        message.stop_reason = _REASONS.get(delta.finish_reason, "end_turn")
        is_stop = delta.finish_reason is FinishReason.STOP
        if is_stop and any(x["type"] == "tool_use" for x in message.content):
            message.stop_reason = "tool_use"
        elif isinstance(delta.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", delta.stop_reason
        if delta.usage is not None:
            cached = delta.usage.cached_tokens
            fresh = delta.usage.prompt_tokens - cached
            message.usage = MessageUsage(fresh, delta.usage.completion_tokens, cached)
            message.usage.inference_geo = delta.usage.inference_geo or UNSET
            message.pdserve = Extension(delta.receipt or Receipt())
        stop = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        events += self._event(
            "message_delta", delta=stop, usage=message.usage, pdserve=message.pdserve
        )
        return events + self._event("message_stop")

    def _event(self, name: str, **fields: Any) -> bytes:
        if not self._is_stream:
            return b""
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))

    def end(self) -> bytes:
        message = self._message
        if message.stop_reason is None:
            raise InternalError("the answer ended without a finish reason")
        if self._is_stream:
            return b""
        if message.stop_reason == "tool_use":  # drop blank text between reasoning and calls
            message.content = [x for x in message.content if x.get("text", "-").strip()]
        return encode(message)

    def fail(self, error: PdserveError) -> bytes:
        return b"event: error\ndata: %b\n\n" % encode(MessageError.of(error))


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, or {} if the call was cut off."""
    try:
        found: dict[str, Any] = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
    return found


# -- Errors

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageErrorDetails(Struct):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class MessageError(Struct):
    error: MessageErrorDetails
    type: str = "error"
    request_id: str | UnsetType = UNSET

    @classmethod
    def of(cls, error: PdserveError) -> MessageError:
        default = "invalid_request_error" if error.http_status < 500 else "api_error"
        details = MessageErrorDetails(_ERROR_TYPES.get(error.http_status, default), error.message)
        if error.field == "thread":
            # Anthropic's client then goes on without a thread.
            details.details = {
                "error_code": "thread_unsupported_request",
                "unsupported": ["thread"],
            }
        return cls(details)
