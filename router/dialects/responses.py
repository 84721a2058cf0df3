"""Bodies of OpenAI's Responses API."""

from __future__ import annotations

import logging
import time
import typing
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from pdserve.model.tokenizer import ChatMessage, Conversation
from pdserve.types import (
    MAX_LOGPROBS,
    Constraint,
    StructuredOutput,
)
from router.dialects.conversation import (
    MAX_TOOLS,
    Arguments,
    CalledFunction,
    Effort,
    IncludesReasoning,
    RefusalPart,
    ToolCall,
    Variables,
    function_tool,
    named_tool,
    read_tools,
    template_variables,
    without_billing,
)
from router.dialects.fields import (
    KNOWN_OF_VLLM,
    MAX_MESSAGES,
    Count,
    GenerateBody,
    Ignored,
    JsonObjectFormat,
    Known,
    OpenAiBody,
    Strict,
    Text,
    TextFormat,
    convert,
    encode,
    json_schema,
    knows,
    refuse,
)
from router.dialects.image_parts import Address, Detail, image_at
from router.dialects.responses_writer import FunctionTool, ResponseBody, ResponseWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.model.tokenizer import MessageImage
    from pdserve.types import GenerateRequest
    from router.dialects.fields import Writer
    from router.dialects.parsed_request import ParsedRequest

logger = logging.getLogger(__name__)

_LOGPROBS = "message.output_text.logprobs"


class Earlier(NamedTuple):
    """The stored conversation that a request continues. `items`: JSON of its items. Both fields are
    empty if there is none."""

    items: bytes = b""
    conversation: str = ""


NOTHING_EARLIER = Earlier()


class InputText(Strict, tag_field="type", tag="input_text"):
    text: str


class InputImage(Strict, tag_field="type", tag="input_image"):
    image_url: Address
    detail: Detail = None


class OutputText(Strict, tag_field="type", tag="output_text"):
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class MessageItem(Strict, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | OutputText | RefusalPart]
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class ReasoningText(Strict, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Strict, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer. The chat template gets it with the next message."""

    content: list[ReasoningText] | None = None
    summary: Ignored = None
    encrypted_content: Ignored = None
    id: Ignored = None
    status: Ignored = None


class CallItem(Strict, tag_field="type", tag="function_call"):
    """A function call of an earlier answer."""

    call_id: str
    name: str
    arguments: Arguments = None
    id: Ignored = None
    status: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None


class CallOutputItem(Strict, tag_field="type", tag="function_call_output"):
    """The result of a function call."""

    call_id: str
    output: str | list[InputText | InputImage]
    id: Ignored = None
    status: Ignored = None


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem


class NamedFunctionTool(Strict):
    type: Literal["function"]
    name: str


class ResponseSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: Ignored = None


class TextConfig(Strict):
    format: TextFormat | JsonObjectFormat | ResponseSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: Effort = None
    summary: Ignored = None
    generate_summary: Ignored = None


@knows(
    KNOWN_OF_VLLM
    | {
        "access_programs": Known(),
        "background": Known((False,)),
        "context_management": Known(([],)),
        "conversation": Known(),
        "enable_response_messages": Known((False,)),
        "image": Known(),
        "max_tokens": Known((), "use max_output_tokens"),
        "max_tool_calls": Known(),
        "moderation": Known(),
        "previous_input_messages": Known(([],)),
        "prompt": Known(),
        "prompt_cache_options": Known(),
        "prompt_cache_retention": Known(("in_memory",)),
        "response_format": Known((), "use text.format"),
        "stream_options": Known(({}, {"include_obfuscation": False})),
        "truncation": Known(("disabled",)),
    }
)
class ResponsesRequest(OpenAiBody, kw_only=True, dict=True):
    """Body of POST /v1/responses."""

    id_prefix: ClassVar[str] = "resp_"
    input: Annotated[
        str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)],
        Meta(
            description="Text, or items: message (of input_text, input_image and output_text), "
            "reasoning, function_call and function_call_output."
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[
        Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None,
        Meta(
            description="FunctionTool. Tools of other types are dropped; the response lists the "
            "tools that the model gets.",
        ),
    ] = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[
        list[str] | None, Meta(description=f"{_LOGPROBS} is honoured, the rest is without effect.")
    ] = None
    store: Annotated[
        bool | None,
        Meta(description="Store the response. Default: true."),
    ] = None
    previous_response_id: Annotated[
        Text | None, Meta(description="Continue a stored response, without its instructions.")
    ] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Repeated in the response.")] = None
    safety_identifier: Ignored = None
    chat_template_kwargs: Variables = None
    include_reasoning: IncludesReasoning = None
    client_metadata: Ignored = None

    def functions(self) -> list[FunctionTool]:
        """Return the tools that the model can call. Raises InvalidRequest naming the field."""
        return [
            convert(tool, FunctionTool, f"tools[{i}]")
            for i, tool in enumerate(self.tools or ())
            if tool.get("type") == "function"
        ]

    def parse(self) -> list[ParsedRequest]:
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = named_tool(choice.name)
        functions = [
            function_tool(x.name, x.description, x.parameters, x.strict) for x in self.functions()
        ]
        tools, options = read_tools(functions, choice, self.parallel_tool_calls)
        given: dict[str, Any] = {}
        if _LOGPROBS in (self.include or ()):
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            refuse("top_logprobs", f"requires {_LOGPROBS} in include")
        form, by_format = None if self.text is None else self.text.format, None
        if isinstance(form, ResponseSchemaFormat):
            by_format = json_schema(form.schema)
        elif isinstance(form, JsonObjectFormat):
            by_format = StructuredOutput(Constraint.JSON_OBJECT)
        if self.include_reasoning is False:
            options["include_reasoning"] = False
        own = {
            "prompt_field": "input",
            "max_tokens_field": "max_output_tokens",
            "parsing_options": {**options, "stream": bool(self.stream)},
            # A later request that continues this response is of the same session.
            "starts_session": self.store is not False,
        }
        prompt, most = self._rendered(tools), self.max_output_tokens
        constraint, session = (by_format, "text.format"), self._earlier.conversation
        return [self._request(prompt, most, constraint, given, own, session)]

    def after(self, earlier: Earlier, stored_items: bytes | None = None) -> ResponsesRequest:
        """Return the body as the continuation of a conversation. `stored_items`: the items of the
        body, if it has a placeholder for its input."""
        body = msgspec.structs.replace(self)
        body._earlier = earlier
        if stored_items is not None:
            body.stored_items = stored_items
        return body

    def with_changes(self, changes: Mapping[str, str]) -> ResponsesRequest:
        """Return the body with what it stores: the instructions and items without the texts that
        guards replaced."""
        instructions = self.instructions
        if instructions is not None:
            instructions = changes.get(instructions, instructions)
        body = msgspec.structs.replace(self, instructions=instructions)
        body._earlier = self._earlier
        items = [_with_changes(_known(x), changes) for x in self.items()]
        body.stored_items = encode(items)
        return body

    @cached_property
    def _earlier(self) -> Earlier:
        return NOTHING_EARLIER

    @cached_property
    def stored_items(self) -> bytes:
        """JSON of the input's items, as stored."""
        return encode([_known(item) for item in self.items()])

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        given = self.input
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def _rendered(self, tools: Sequence[dict[str, Any]]) -> Conversation:
        earlier = self._earlier.items
        items = [*(msgspec.json.decode(earlier) if earlier else ()), *self.items()]
        if len(items) > MAX_MESSAGES:
            refuse("previous_response_id", f"and 'input' make more than {MAX_MESSAGES} items")
        messages = [ChatMessage("system", self.instructions)] if self.instructions else []
        messages = without_billing([*messages, *_messages(items)])
        if not messages:
            refuse("input", "is empty")
        effort = None if self.reasoning is None else self.reasoning.effort
        variables = template_variables(self.chat_template_kwargs, effort)
        return Conversation(messages, variables=variables, tools=tools)

    def without_prompt(self) -> GenerateBody:
        return msgspec.structs.replace(self, input="-")

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        response = ResponseBody(
            id=request_id,
            created_at=int(time.time()),
            model=made[0].served_name,
            output=[],
            tools=self.functions(),
            tool_choice=self.tool_choice or "auto",
            parallel_tool_calls=self.parallel_tool_calls is not False,
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            reasoning={
                "effort": None if self.reasoning is None else self.reasoning.effort,
                "summary": None,
            },
            temperature=self.temperature,
            text={"format": (self.text and self.text.format) or {"type": "text"}},
            top_p=self.top_p,
            metadata=self.metadata or {},
            store=self.store is not False,
            previous_response_id=self.previous_response_id,
        )
        return ResponseWriter(response, self, is_stream=bool(self.stream))


def _without_effect(kind: type[Struct]) -> frozenset[str]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return frozenset(name for name, hint in hints.items() if hint == Ignored)


_KINDS = (
    *(MessageItem, ReasoningItem, CallItem, CallOutputItem),
    *(InputText, InputImage, OutputText),
)
_WITHOUT_EFFECT = {kind.__struct_config__.tag: _without_effect(kind) for kind in _KINDS}


def _known(item: dict[str, Any], kind: str = "message") -> dict[str, Any]:
    """Return a valid item without the fields that have no effect: they may be large, and would be
    stored."""
    left_out = _WITHOUT_EFFECT.get(item.get("type") or kind, frozenset())
    kept = {name: value for name, value in item.items() if name not in left_out}
    for name in ("content", "output"):
        if isinstance(parts := kept.get(name), list):
            kept[name] = [_known(part, "") for part in parts]
    return kept


def _with_changes(item: Any, changes: Mapping[str, str]) -> Any:
    """Return an item as it is stored. Guards see the parts of a message as one text."""
    if isinstance(item, list):
        return [_with_changes(x, changes) for x in item]
    if not isinstance(item, dict):
        return item
    for key in ("content", "output"):
        parts = item.get(key)
        if isinstance(parts, list) and all("text" in x for x in parts):
            joined = "\n".join([x["text"] for x in parts])
            item = {**item, key: changes[joined]} if joined in changes else item
    return {
        key: _changed(value, changes)
        if isinstance(value, str) and key in _TEXTS
        else _with_changes(value, changes)
        for key, value in item.items()
    }


_TEXTS = ("text", "content", "output", "refusal", "arguments")


def _changed(text: str, changes: Mapping[str, str]) -> str:
    if text in changes or not text:
        return changes.get(text, text)
    # Items of the assistant may be one message, whose text was replaced.
    if any(f"\n{text}\n" in f"\n{whole}\n" for whole in changes):
        return ""
    # Texts within the JSON of arguments.
    for whole, instead in changes.items():
        text = text.replace(encode(whole)[1:-1].decode(), encode(instead)[1:-1].decode())
    return text


def _messages(items: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """Convert items to messages. Reasoning and calls are merged into the assistant's message."""
    messages: list[ChatMessage] = []
    reasoning: list[str] = []
    turn: ChatMessage | None = None  # the assistant's message that following items extend

    def assistant(content: str = "") -> ChatMessage:
        nonlocal turn, reasoning
        if turn is None:
            turn = ChatMessage("assistant", content, tool_calls=[])
            messages.append(turn)
        elif content:
            turn.content = f"{turn.content}\n{content}" if turn.content else content
        if reasoning:
            turn.reasoning, reasoning = "\n".join(reasoning), []
        return turn

    for i, given in enumerate(items):
        item: Item = convert({**given, "type": given.get("type") or "message"}, Item, f"input[{i}]")
        match item:
            case ReasoningItem():
                reasoning += [part.text for part in item.content or ()]
            case CallItem():
                called = CalledFunction(name=item.name, arguments=item.arguments)
                call = ToolCall(function=called, id=item.call_id).parse(f"input[{i}]")
                message = assistant()
                message.tool_calls = [*message.tool_calls, call]
            case CallOutputItem():
                parts, turn = _parts_of(item.output, f"input[{i}].output"), None
                messages.append(ChatMessage.of_parts("tool", parts, tool_call_id=item.call_id))
            case MessageItem(role="assistant"):
                message = ChatMessage.of_parts("", _parts_of(item.content, f"input[{i}].content"))
                if message.parts:
                    refuse(f"input[{i}].content", "has an image, but is of the assistant")
                assistant(message.content)
            case MessageItem():
                turn, reasoning = None, []
                parts = _parts_of(item.content, f"input[{i}].content")
                messages.append(ChatMessage.of_parts(item.role, parts))
    return messages


def _parts_of(
    content: str | Sequence[InputText | InputImage | OutputText | RefusalPart], field: str
) -> list[str | MessageImage]:
    if isinstance(content, str):
        return [content]
    return [
        image_at(part.image_url, part.detail, f"{field}[{i}].image_url")
        if isinstance(part, InputImage)
        else (part.refusal if isinstance(part, RefusalPart) else part.text)
        for i, part in enumerate(content)
    ]
