"""Bodies of OpenAI's Responses API."""

from __future__ import annotations

import logging
import time
import typing
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from pdserve.model.tokenizer import ChatMessage, Conversation
from pdserve.types import (
    MAX_LOGPROBS,
    Constraint,
    StructuredOutput,
)
from router.api.dialects.conversation import (
    MAX_TOOLS,
    CalledFunction,
    Effort,
    ToolCall,
    effort_variables,
    function_tool,
    named_tool,
    read_tools,
)
from router.api.dialects.fields import (
    MAX_MESSAGES,
    Count,
    GenerateBody,
    Ignored,
    JsonObjectFormat,
    Known,
    OpenAiBody,
    SessionId,
    Strict,
    Text,
    TextFormat,
    convert,
    encode,
    knows,
    refuse,
)
from router.api.dialects.responses_writer import FunctionTool, ResponseBody, ResponseWriter
from router.api.images import Address, Detail, image_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.model.tokenizer import MessageImage
    from pdserve.types import GenerateRequest
    from router.api.dialects.fields import Writer
    from router.api.preprocess import ParsedRequest

logger = logging.getLogger(__name__)

_LOGPROBS = "message.output_text.logprobs"


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
    content: str | list[InputText | InputImage | OutputText]
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
    arguments: str
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
    {
        "access_programs": Known(),
        "background": Known((False,)),
        "context_management": Known(([],)),
        "conversation": Known(),
        "image": Known(),
        "max_tool_calls": Known(),
        "moderation": Known(),
        "prompt": Known(),
        "prompt_cache_options": Known(),
        "prompt_cache_retention": Known(("in_memory",)),
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
    prompt_cache_key: SessionId = None
    client_metadata: Ignored = None

    def functions(self) -> list[FunctionTool]:
        """Return the tools that the model can call. Raises InvalidRequest naming the field."""
        return [
            convert(tool, FunctionTool, f"tools[{i}]")
            for i, tool in enumerate(self.tools or ())
            if tool.get("type") == "function"
        ]

    def parse(self, request_id: str) -> list[ParsedRequest]:
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunctionTool):
            choice = named_tool(choice.name)
        functions = [
            function_tool(x.name, x.description, x.parameters, x.strict) for x in self.functions()
        ]
        tools, options = read_tools(functions, choice, self.parallel_tool_calls)
        given = self.given("temperature", "top_p", "top_k")
        if _LOGPROBS in (self.include or ()):
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            refuse("top_logprobs", f"requires {_LOGPROBS} in include")
        form = None if self.text is None else self.text.format
        if isinstance(form, ResponseSchemaFormat):
            schema = encode(form.schema).decode()
            given["structured_output"] = StructuredOutput(Constraint.JSON_SCHEMA, schema)
        elif isinstance(form, JsonObjectFormat):
            given["structured_output"] = StructuredOutput(Constraint.JSON_OBJECT)
        parsed = self._request(self._rendered(tools), request_id, self.max_output_tokens, given)
        parsed.prompt_field, parsed.max_tokens_field = "input", "max_output_tokens"
        parsed.constraint_field = "text.format"
        parsed.parsing_options = options
        # A later request that continues this response is of the same session.
        own = request_id if self.store is not False else ""
        parsed.session = self.prompt_cache_key or self.conversation or own
        return [parsed]

    @cached_property
    def earlier(self) -> list[dict[str, Any]]:
        """Items of the conversation before this request."""
        return []

    @cached_property
    def conversation(self) -> str:
        """Id of the stored conversation that this request continues, "" if there is none."""
        return ""

    @cached_property
    def stored_items(self) -> bytes:
        """JSON of the input's items, as stored."""
        return encode([_known(item) for item in self.items()])

    def put_before(self, previous: bytes) -> None:
        """Prepend the items of the previous response. `previous`: their JSON, or b""."""
        if previous:
            self.earlier.extend(msgspec.json.decode(previous))

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        given = self.input
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def _rendered(self, tools: Sequence[dict[str, Any]]) -> Conversation:
        items = [*self.earlier, *self.items()]
        if len(items) > MAX_MESSAGES:
            refuse("previous_response_id", f"and 'input' make more than {MAX_MESSAGES} items")
        messages = [ChatMessage("system", self.instructions)] if self.instructions else []
        messages += _messages(items)
        if not messages:
            refuse("input", "is empty")
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(messages, variables=effort_variables(effort), tools=tools)

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
    left_out = _WITHOUT_EFFECT.get(item.get("type", kind), frozenset())
    kept = {name: value for name, value in item.items() if name not in left_out}
    for name in ("content", "output"):
        if isinstance(parts := kept.get(name), list):
            kept[name] = [_known(part, "") for part in parts]
    return kept


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
        item: Item = convert({"type": "message", **given}, Item, f"input[{i}]")
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
    content: str | Sequence[InputText | InputImage | OutputText], field: str
) -> list[str | MessageImage]:
    if isinstance(content, str):
        return [content]
    return [
        image_at(part.image_url, part.detail, f"{field}[{i}].image_url")
        if isinstance(part, InputImage)
        else part.text
        for i, part in enumerate(content)
    ]
