"""The body of the RPC Generate, parsed as strictly as HTTP bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from google.protobuf.unknown_fields import UnknownFieldSet

from pdserve import wire
from pdserve.errors import InvalidRequest, UnknownField
from pdserve.model.tokenizer import ChatMessage, Conversation
from pdserve.types import ServiceClass
from pdserve.v1 import generation_pb2 as g
from router.dialects.conversation import (
    MAX_TOOLS,
    CalledFunction,
    Function,
    ToolCall,
    ToolDefinition,
    named_tool,
    read_object,
    read_tools,
    without_billing,
)
from router.dialects.fields import MAX_MESSAGES, convert, stale_kv_of
from router.dialects.image_parts import image_at, image_of
from router.dialects.parsed_request import OPEN_ENDED, ParsedRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

    from pdserve.model.tokenizer import MessageImage
    from router.dialects.conversation import ToolChoice
    from router.dialects.parsed_request import Prompt

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
_CHOICES: dict[g.ToolChoice, Literal["none", "auto", "required"]] = {
    g.TOOL_CHOICE_UNSPECIFIED: "auto",
    g.TOOL_CHOICE_AUTO: "auto",
    g.TOOL_CHOICE_NONE: "none",
    g.TOOL_CHOICE_REQUIRED: "required",
}


class GenerateMessage:
    """A message, with the methods of a GenerateBody."""

    def __init__(self, message: g.GenerateRequest) -> None:
        self._message = message

    @classmethod
    def decode(cls, data: bytes) -> GenerateMessage:
        return cls(g.GenerateRequest.FromString(data))

    def encoded(self) -> bytes:
        return self._message.SerializeToString()

    @property
    def model(self) -> str:
        return self._message.adapter or self._message.model

    @property
    def image_bytes(self) -> int:
        """How many bytes are images."""
        parts = [part for x in self._message.messages.messages for part in x.parts]
        return sum([len(x.image.data) + len(x.image.url) for x in parts if x.HasField("image")])

    def parse(self) -> list[ParsedRequest]:
        """Return the only request. Raises InvalidRequest naming the field."""
        return [_parsed(self._message)]

    def with_changes(self, changes: Mapping[str, str]) -> GenerateMessage:
        """Return the message: nothing of its prompt is kept or repeated."""
        return self

    def without_prompt(self) -> GenerateMessage:
        """Return the message with a placeholder, because some fields are valid with one kind of
        prompt only."""
        rest = g.GenerateRequest()
        rest.CopyFrom(self._message)
        kind = rest.WhichOneof("prompt")
        if kind is not None:
            rest.ClearField(kind)
        match kind:
            case "messages":
                rest.messages.messages.add(role="user", content="-")
            case "token_ids":
                rest.token_ids.ids.append(0)
            case _:
                rest.text = "-"
        return GenerateMessage(rest)


def _parsed(request: g.GenerateRequest) -> ParsedRequest:
    messages = request.messages.messages
    calls = sum(len(message.tool_calls) for message in messages[:MAX_MESSAGES])
    parts = sum(len(message.parts) for message in messages[:MAX_MESSAGES])
    for field, number, most in (
        ("messages", len(messages), MAX_MESSAGES),
        ("messages.tool_calls", calls, MAX_MESSAGES),
        ("messages.parts", parts, MAX_MESSAGES),
        ("tools", len(request.tools), MAX_TOOLS),
    ):
        if number > most:
            text = f"'{field}' has {number} elements; the limit is {most}"
            raise InvalidRequest(text, field=field)
    refuse_unknown_fields(request)
    prompt, prompt_field = _prompt(request)
    options: dict[str, Any] = {}
    if isinstance(prompt, Conversation):
        tools, options = _tools(request)
        thinks = request.HasField("enable_thinking")
        variables = {"enable_thinking": request.enable_thinking} if thinks else {}
        prompt = Conversation(prompt.messages, variables=variables, tools=tools)
        if request.HasField("include_reasoning"):
            options["include_reasoning"] = request.include_reasoning
    elif request.tools:
        raise InvalidRequest("tools need messages", field="tools")
    return ParsedRequest(
        model=request.adapter or request.model,
        prompt=prompt,
        sampling=wire.sampling_from_pb(request.sampling, default_max_tokens=OPEN_ENDED),
        prompt_field=prompt_field,
        priority=request.priority,
        service_class=_service_class(request.service_class),
        resume=tuple(request.resume_token_ids),
        given={field.name for field, _ in request.sampling.ListFields()},
        cache_salt=request.cache_salt,
        stale_kv=stale_kv_of(request.stale_kv),
        parsing_options=options,
    )


def _tools(request: g.GenerateRequest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (tools for the chat template, parser options)."""
    tools = []
    for i, tool in enumerate(request.tools):
        given: dict[str, Any] = {"name": tool.name, "description": tool.description or None}
        if tool.parameters_json:
            at = f"tools[{i}].parameters_json"
            given["parameters"] = read_object(tool.parameters_json, at)
        if tool.HasField("strict"):
            given["strict"] = tool.strict
        function: Function = convert(given, Function, f"tools[{i}]")
        tools.append(ToolDefinition(function=function, type="function"))
    choice: ToolChoice = _CHOICES.get(request.tool_choice)
    if request.tool_choice == g.TOOL_CHOICE_NAMED:
        choice = named_tool(request.tool_name)
    elif choice is None or request.tool_name:
        field = "tool_choice" if choice is None else "tool_name"
        raise InvalidRequest(f"{field} has a value that is not defined", field=field)
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    return read_tools(tools, choice, parallel)


def _prompt(request: g.GenerateRequest) -> tuple[Prompt, str]:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text, "text"
        case "token_ids":
            return tuple(request.token_ids.ids), "token_ids"
        case "messages":
            return _messages(request.messages), "messages"
        case _:
            raise InvalidRequest("one of text, messages or token_ids is required", field="prompt")


def _service_class(number: g.ServiceClass) -> ServiceClass:
    if number == g.SERVICE_CLASS_UNSPECIFIED:
        return ServiceClass.INTERACTIVE
    if number not in g.ServiceClass.values():
        raise InvalidRequest(f"unknown service_class {number}", field="service_class")
    return ServiceClass[g.ServiceClass.Name(number).removeprefix("SERVICE_CLASS_")]


def _messages(chat: g.ChatMessages) -> Conversation:
    if not chat.messages:
        raise InvalidRequest("'messages' must have at least one message", field="messages")
    for i, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            field = f"messages[{i}].role"
            raise InvalidRequest(
                f"'{field}' must be one of {', '.join(CHAT_ROLES)}, not {message.role!r}",
                field=field,
            )
    messages = [_message(x, f"messages[{i}]") for i, x in enumerate(chat.messages)]
    return Conversation(without_billing(messages))


def _message(message: g.ChatMessage, field: str) -> ChatMessage:
    calls = [
        ToolCall(function=CalledFunction(name=x.name, arguments=x.arguments), id=x.id).parse(
            f"{field}.tool_calls[{i}]"
        )
        for i, x in enumerate(message.tool_calls)
    ]
    parts = [_part(x, f"{field}.parts[{i}]") for i, x in enumerate(message.parts)]
    if parts and message.content:
        raise InvalidRequest(f"'{field}' has both content and parts", field=f"{field}.parts")
    return ChatMessage.of_parts(
        message.role,
        parts or [message.content],
        reasoning=message.reasoning or None,
        tool_calls=calls,
        tool_call_id=message.tool_call_id or None,
    )


def _part(part: g.ContentPart, field: str) -> str | MessageImage:
    image = part.image
    match part.WhichOneof("part"), image.WhichOneof("source"):
        case "text", _:
            return part.text
        case _, "data":
            return image_of(image.data, image.detail, f"{field}.image.data")
        case _, "url":
            return image_at(image.url, image.detail, f"{field}.image.url")
    raise InvalidRequest(f"'{field}' needs a text or an image", field=field)


def refuse_unknown_fields(message: Message, at: str = "") -> None:
    """Raise UnknownField for a field of a newer proto: the router would silently ignore it."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise UnknownField(
            f"{message.DESCRIPTOR.full_name} has no field number {number}", field=f"{at}{number}"
        )
    for descriptor, value in message.ListFields():
        kind = descriptor.message_type
        if kind is None or kind.GetOptions().map_entry:
            continue
        for item in value if descriptor.is_repeated else (value,):
            refuse_unknown_fields(item, f"{at}{descriptor.name}.")
