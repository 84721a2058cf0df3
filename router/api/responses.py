"""OpenAI's Responses API: bodies, events, and what is stored. Requests take the same way as all
others."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from pdserve.errors import InternalError, InvalidRequest, NotFound
from pdserve.tokenizer import ChatMessage, Conversation
from pdserve.types import (
    MAX_LOGPROBS,
    Constraint,
    FinishReason,
    Receipt,
    StructuredOutput,
)
from router.answer import pieces
from router.api.bodies import (
    Count,
    FollowsSchema,
    Ignored,
    Known,
    Strict,
    Text,
    convert,
    encode,
    knows,
    refuse,
)
from router.api.openai import (
    MAX_TOOLS,
    CalledFunction,
    Effort,
    Extension,
    JsonObjectFormat,
    OpenAiBody,
    TextFormat,
    ToolCall,
    chat_logprobs,
    effort_variables,
    function_tool,
    named_tool,
    read_tools,
)
from router.api.routes import TENANT, json_response
from router.batch.store import StoredResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest, ToolCallDelta, Usage
    from router.answer import AnswerDelta
    from router.api.preprocess import ParsedRequest
    from router.api.sinks import Writer
    from router.batch.store import BatchStore

_LOGPROBS = "message.output_text.logprobs"


class InputText(Strict, tag_field="type", tag="input_text"):
    text: str


class OutputText(Strict, tag_field="type", tag="output_text"):
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class MessageItem(Strict, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class ReasoningText(Strict, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Strict, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer, which the chat template gets with the message after it."""

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
    """What a function returned."""

    call_id: str
    output: str | list[InputText]
    id: Ignored = None
    status: Ignored = None


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem


class FunctionTool(Strict, tag_field="type", tag="function"):
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: FollowsSchema = None


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
class ResponsesRequest(OpenAiBody, kw_only=True):
    """Body of POST /v1/responses."""

    id_prefix: ClassVar[str] = "resp_"
    input: Annotated[
        str | list[dict[str, Any]],
        Meta(
            description="Text, or items: message (of input_text and output_text), reasoning, "
            "function_call and function_call_output."
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
            description="FunctionTool. Tools of other types are left out, one by one; the "
            "response lists those that the model has.",
        ),
    ] = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[
        list[str] | None, Meta(description=f"{_LOGPROBS} is honoured, the rest is without effect.")
    ] = None
    store: Annotated[
        bool | None, Meta(description="Keep the response for 30 days, as is the default.")
    ] = None
    previous_response_id: Annotated[
        Text | None, Meta(description="Continue a stored response; its instructions do not count.")
    ] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Repeated in the response.")] = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    client_metadata: Ignored = None

    @property
    def constraint_field(self) -> str:
        return "tools" if self.functions() else "text.format"

    def functions(self) -> list[FunctionTool]:
        """Return the tools that the model gets. Raises InvalidRequest naming the field."""
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
        parsed.parsing_options = options
        return [parsed]

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        given = self.input
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def _rendered(self, tools: Sequence[dict[str, Any]]) -> Conversation:
        messages = [ChatMessage("system", self.instructions)] if self.instructions else []
        messages += _messages(self.items())
        if not messages:
            refuse("input", "is empty")
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(messages, variables=effort_variables(effort), tools=tools)

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        return ResponseWriter(self, request_id, made[0].served_name)


def _messages(items: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """Return the messages that items make: reasoning and calls belong to one of the assistant."""
    messages: list[ChatMessage] = []
    reasoning: list[str] = []
    turn: ChatMessage | None = None  # the assistant's, to which further items belong

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
                text, turn = _text_of(item.output), None
                messages.append(ChatMessage("tool", text, tool_call_id=item.call_id))
            case MessageItem(role="assistant"):
                assistant(_text_of(item.content))
            case MessageItem():
                turn, reasoning = None, []
                messages.append(ChatMessage(item.role, _text_of(item.content)))
    return messages


def _text_of(content: str | Sequence[InputText | OutputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


# -- Writing


class _InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class _OutputDetails(Struct):
    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: _InputDetails
    output_tokens: int
    output_tokens_details: _OutputDetails
    total_tokens: int


def _usage(usage: Usage) -> ResponseUsage:
    prompt, made = usage.prompt_tokens, usage.completion_tokens
    details = _InputDetails(usage.cached_tokens)
    reasoning = _OutputDetails(usage.reasoning_tokens)
    return ResponseUsage(prompt, details, made, reasoning, prompt + made)


class ResponseBody(Struct, kw_only=True):
    """A response, whole or as far as it goes."""

    id: str
    created_at: int
    model: str
    object: str = "response"
    status: str = "in_progress"
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    output: list[dict[str, Any]]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: Any = "auto"
    tools: list[FunctionTool]
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]
    pdserve: Extension | None = None


class _Open(Struct):
    """The item that an answer adds to: its kind, "text", "reasoning" or the number of a call."""

    kind: str | int
    item: dict[str, Any]
    before: bytes  # an event with more of its text, up to its number
    text: list[str] = []
    logprobs: list[Any] = []


class ResponseWriter:
    """Collects an answer and encodes its events if it is streamed. State: the response so far, and
    the item that is open."""

    def __init__(self, body: ResponsesRequest, request_id: str, model: str) -> None:
        effort = None if body.reasoning is None else body.reasoning.effort
        form = None if body.text is None else body.text.format
        self._is_stream = bool(body.stream)
        self._response = ResponseBody(
            id=request_id,
            created_at=int(time.time()),
            model=model,
            output=[],
            tools=body.functions(),
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            reasoning={"effort": effort, "summary": None},
            temperature=body.temperature,
            text={"format": {"type": "text"} if form is None else form},
            top_p=body.top_p,
            metadata=body.metadata or {},
            store=body.store is not False,
            previous_response_id=body.previous_response_id,
        )
        self._items = body.items()
        self._suffix = request_id.removeprefix("resp_")
        self._sequence = 0
        self._open: _Open | None = None
        self._logprobs: list[Any] = []  # of tokens whose text comes with a later one
        self._has_begun = False
        self._items = body.items()

    def write(self, delta: AnswerDelta) -> bytes:
        events = b""
        if not self._has_begun:
            self._has_begun = True
            events += self._event("response.created", response=self._response)
            events += self._event("response.in_progress", response=self._response)
        if delta.logprobs:
            self._logprobs += chat_logprobs(delta.logprobs)
        for kind, text, call in pieces(delta):
            logprobs: list[Any] = []
            if kind == "text":
                logprobs, self._logprobs = self._logprobs, []
            events += self._more(kind, text, logprobs, call)
        if delta.finish_reason is not None:
            events += self._finish(delta)
        return events

    def _more(
        self,
        kind: str | int,
        text: str,
        logprobs: Sequence[Any],
        call: ToolCallDelta | None,
    ) -> bytes:
        """Add text to an item of `kind`, which is opened if another is open."""
        events, opened = b"", self._open
        if opened is None or opened.kind != kind:
            events = self._close("completed")
            opened, begun = self._begin(kind, call)
            events += begun
        if not text:
            return events
        opened.text.append(text)
        opened.logprobs += logprobs
        if not self._is_stream:
            return b""
        self._sequence += 1
        more = b',"logprobs":%b' % encode(logprobs) if kind == "text" else b""
        return b'%b%b%d%b,"delta":%b}\n\n' % (
            events,
            opened.before,
            self._sequence - 1,
            more,
            encode(text),
        )

    def _begin(self, kind: str | int, call: ToolCallDelta | None) -> tuple[_Open, bytes]:
        number = len(self._response.output)
        item: dict[str, Any] = {"status": "in_progress"}
        if call is not None:
            name, prefix = _ARGUMENTS, "fc"
            item |= {"type": "function_call", "call_id": call.id, "name": call.name}
            item["arguments"] = ""
        elif kind == "reasoning":
            name, prefix = "response.reasoning_text", "rs"
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            name, prefix = "response.output_text", "msg"
            item |= {"type": "message", "role": "assistant", "content": []}
        item["id"] = f"{prefix}_{self._suffix}" + (f"_{number}" if number else "")
        place = encode({"type": f"{name}.delta", "item_id": item["id"], "output_index": number})
        content = b"" if call is not None else b',"content_index":0'
        before = b"event: %b.delta\ndata: %b%b,%b" % (
            *(name.encode(), place[:-1], content, b'"sequence_number":'),
        )
        opened = self._open = _Open(kind, item, before)
        events = self._event("response.output_item.added", item=item, output_index=number)
        if call is None:
            events += self._of_part("response.content_part.added", part=_part(opened))
        return opened, events

    def _of_part(self, event: str, **fields: Any) -> bytes:
        """Return an event about the text of the open item."""
        assert self._open is not None
        place = {"item_id": self._open.item["id"], "output_index": len(self._response.output)}
        if isinstance(self._open.kind, str):
            place["content_index"] = 0
        return self._event(event, **place, **fields)

    def _close(self, status: str) -> bytes:
        """End the open item, if there is one."""
        opened = self._open
        if opened is None:
            return b""
        item, part = opened.item, _part(opened)
        item["status"] = status
        if isinstance(opened.kind, int):
            item["arguments"] = part["text"]
            events = self._of_part(f"{_ARGUMENTS}.done", arguments=part["text"], name=item["name"])
        else:
            item["content"] = [part]
            is_text = opened.kind == "text"
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            more = {"logprobs": opened.logprobs} if is_text else {}
            events = self._of_part(name, text=part["text"], **more)
            events += self._of_part("response.content_part.done", part=part)
        number = len(self._response.output)
        events += self._event("response.output_item.done", item=item, output_index=number)
        self._response.output.append(item)
        self._open = None
        return events

    def _finish(self, delta: AnswerDelta) -> bytes:
        response = self._response
        is_cut = delta.finish_reason is FinishReason.LENGTH
        response.status = "incomplete" if is_cut else "completed"
        if is_cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
        events = self._close(response.status)
        if delta.usage is not None:
            response.usage = _usage(delta.usage)
            response.pdserve = Extension(delta.receipt or Receipt())
        return events + self._event(f"response.{response.status}", response=response)

    def _event(self, event: str, **fields: Any) -> bytes:
        if not self._is_stream:
            return b""
        self._sequence += 1
        data = {"type": event, "sequence_number": self._sequence - 1, **fields}
        return b"event: %b\ndata: %b\n\n" % (event.encode(), encode(data))

    def end(self) -> bytes:
        if self._response.usage is None:
            raise InternalError("the answer ended without a finish reason")
        return b"" if self._is_stream else encode(self._response)

    def stored(self, tenant: str) -> StoredResponse | None:
        """Return what is kept of a complete answer, or None if the client wants nothing kept."""
        response = self._response
        if not response.store:
            return None
        items = encode([*self._items, *response.output])
        return StoredResponse(response.id, tenant, response.created_at, encode(response), items)

    def fail(self, error: PdserveError) -> bytes:
        self._response.status = "failed"
        self._response.error = {"code": error.code, "message": error.message}
        return self._event("response.failed", response=self._response)


_ARGUMENTS = "response.function_call_arguments"


def _part(opened: _Open) -> dict[str, Any]:
    text = "".join(opened.text)
    if opened.kind == "text":
        more = {"annotations": [], "logprobs": opened.logprobs}
        return {"type": "output_text", "text": text, **more}
    return {"type": "reasoning_text", "text": text}


# -- Stored responses


class ResponseApi:
    """Stored responses. A tenant sees its own alone."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store

    async def continue_previous(self, body: ResponsesRequest, tenant: str) -> None:
        """Put the items of the previous response before the input. Raises InvalidRequest."""
        previous = body.previous_response_id
        if previous is None:
            return
        found = await self._store.response(previous, tenant)
        if found is None:
            field = "previous_response_id"
            raise InvalidRequest(f"'{field}': no response {previous!r} is stored", field=field)
        body.input = [*msgspec.json.decode(found.items), *body.items()]

    async def keep(self, writer: Writer, tenant: str) -> None:
        """Keep a complete answer, if it is of this API and to be stored. Raises InternalError."""
        stored = writer.stored(tenant) if isinstance(writer, ResponseWriter) else None
        if stored is None:
            return
        try:
            await self._store.keep_response(stored)
        except sqlite3.Error as error:
            raise InternalError(f"the response could not be stored: {error}") from error

    async def show(self, request: web.BaseRequest, response_id: str) -> web.Response:
        found = await self._find(response_id, request[TENANT])
        return web.Response(body=found.body, content_type="application/json")

    async def delete(self, request: web.BaseRequest, response_id: str) -> web.Response:
        found = await self._find(response_id, request[TENANT])
        await self._store.delete_response(found)
        return json_response({"id": found.id, "object": "response", "deleted": True})

    async def _find(self, response_id: str, tenant: str) -> StoredResponse:
        found = await self._store.response(response_id, tenant)
        if found is None:
            raise NotFound(f"no response {response_id!r} is stored")
        return found
