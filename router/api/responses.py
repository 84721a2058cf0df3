"""OpenAI's Responses API: bodies, events, and what is stored. Requests take the same way as all
others."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from pdserve.errors import InternalError, InvalidRequest, NotFound
from pdserve.tokenizer import ChatMessage, Conversation
from pdserve.types import (
    MAX_LOGPROBS,
    MAX_SEED,
    Constraint,
    FinishReason,
    Receipt,
    SamplingParams,
    ServiceClass,
    StructuredOutput,
)
from router.api.bodies import (
    NO_EFFECT,
    GenerateBody,
    Known,
    Strict,
    Text,
    convert,
    encode,
    knows,
    not_supported,
    refuse,
)
from router.api.openai import (
    Effort,
    Extension,
    JsonObjectFormat,
    TextFormat,
    chat_logprobs,
    effort_variables,
)
from router.api.preprocess import OPEN_ENDED, ParsedRequest
from router.batch.store import StoredResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest, Usage
    from router.answer import AnswerDelta
    from router.api.sinks import Writer
    from router.batch.store import BatchStore

_Ignored = Annotated[Any, Meta(description=NO_EFFECT)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_LOGPROBS = "message.output_text.logprobs"


class InputText(Strict, tag_field="type", tag="input_text"):
    text: str


class OutputText(Strict, tag_field="type", tag="output_text"):
    text: str
    annotations: _Ignored = None
    logprobs: _Ignored = None


class MessageItem(Strict, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    id: _Ignored = None
    status: _Ignored = None
    phase: _Ignored = None


class ReasoningText(Strict, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Strict, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer, which the chat template gets with the message after it."""

    content: list[ReasoningText] | None = None
    summary: _Ignored = None
    encrypted_content: _Ignored = None
    id: _Ignored = None
    status: _Ignored = None


Item = MessageItem | ReasoningItem


class ResponseSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: _Ignored = None


class TextConfig(Strict):
    format: TextFormat | JsonObjectFormat | ResponseSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: Effort = None
    summary: _Ignored = None
    generate_summary: _Ignored = None


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
        "tool_choice": Known(("auto", "none")),
        "truncation": Known(("disabled",)),
    }
)
class ResponsesRequest(GenerateBody, kw_only=True):
    """Body of POST /v1/responses."""

    id_prefix: ClassVar[str] = "resp_"
    input: Annotated[
        str | list[dict[str, Any]],
        Meta(description="Text, or items: message (of input_text and output_text) and reasoning."),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 30)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
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
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority"] | None,
        Meta(description="As of /v1/chat/completions."),
    ] = None
    priority: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    cache_salt: Text | None = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Repeated in the response.")] = None
    user: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None
    client_metadata: _Ignored = None

    @property
    def constraint_field(self) -> str:
        return "text.format"

    def parse(self, request_id: str) -> list[ParsedRequest]:
        for i, tool in enumerate(self.tools or ()):
            raise not_supported(f"tools[{i}]", f"a tool of type {tool.get('type')!r}")
        given: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
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
        flex = self.service_tier == "flex"
        parsed = ParsedRequest(
            model=self.model or "",
            prompt=self._rendered(),
            sampling=SamplingParams(max_tokens=self.max_output_tokens or OPEN_ENDED, **given),
            request_id=request_id,
            prompt_field="input",
            max_tokens_field="max_output_tokens",
            priority=self.priority or 0,
            service_class=ServiceClass.BATCH if flex else ServiceClass.INTERACTIVE,
            given=given.keys(),
            cache_salt=self.cache_salt or "",
        )
        return [parsed]

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items."""
        given = self.input
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def _rendered(self) -> Conversation:
        messages = [ChatMessage("system", self.instructions)] if self.instructions else []
        messages += _messages(self.items())
        if not messages:
            refuse("input", "is empty")
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(messages, variables=effort_variables(effort))

    def writer(self, request_id: str, made: Sequence[GenerateRequest]) -> Writer:
        return ResponseWriter(self, request_id, made[0].served_name)


def _messages(items: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    reasoning: list[str] = []
    for i, given in enumerate(items):
        item: Item = convert({"type": "message", **given}, Item, f"input[{i}]")
        if isinstance(item, ReasoningItem):
            reasoning += [part.text for part in item.content or ()]
            continue
        content = item.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message = ChatMessage(item.role, content)
        if item.role == "assistant" and reasoning:
            message.reasoning = "\n".join(reasoning)
        reasoning = []
        messages.append(message)
    return messages


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
    return ResponseUsage(prompt, details, made, _OutputDetails(), prompt + made)


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
    tool_choice: str = "auto"
    tools: list[dict[str, Any]]
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]
    pdserve: Extension | None = None


class ResponseWriter:
    """Collects an answer and encodes its events if it is streamed. State: the response so far, and
    the text of the item that is open, or None."""

    def __init__(self, body: ResponsesRequest, request_id: str, model: str) -> None:
        effort = None if body.reasoning is None else body.reasoning.effort
        form = None if body.text is None else body.text.format
        self._is_stream = bool(body.stream)
        self._response = ResponseBody(
            id=request_id,
            created_at=int(time.time()),
            model=model,
            output=[],
            tools=[],
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
        self._item_id = f"msg_{request_id.removeprefix('resp_')}"
        self._sequence = 0
        self._text: list[str] | None = None
        self._logprobs: list[Any] = []
        self._has_begun = False
        # A delta of text up to its number.
        self._before = (
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
            b'"item_id":%b,"output_index":0,"content_index":0,"logprobs":[],"sequence_number":'
        ) % encode(self._item_id)

    def write(self, delta: AnswerDelta) -> bytes:
        events = b""
        if not self._has_begun:
            self._has_begun = True
            events += self._event("response.created", response=self._response)
            events += self._event("response.in_progress", response=self._response)
        if delta.text or delta.logprobs:
            events += self._add_text(delta)
        if delta.finish_reason is not None:
            events += self._finish(delta)
        return events

    def _add_text(self, delta: AnswerDelta) -> bytes:
        events = b""
        if self._text is None:
            self._text = []
            events += self._event("response.output_item.added", item=self._message("in_progress"))
            events += self._event(
                "response.content_part.added", item_id=self._item_id, part=self._part()
            )
        self._text.append(delta.text)
        if delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs)
            self._logprobs += logprobs
            return events + self._event(
                "response.output_text.delta",
                item_id=self._item_id,
                delta=delta.text,
                logprobs=logprobs,
            )
        if not self._is_stream:
            return b""
        self._sequence += 1
        number = self._sequence - 1
        return b'%b%b%d,"delta":%b}\n\n' % (events, self._before, number, encode(delta.text))

    def _part(self) -> dict[str, Any]:
        text = "".join(self._text or ())
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    def _message(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        kind = {"type": "message", "role": "assistant"}
        return {"id": self._item_id, **kind, "status": status, "content": content}

    def _finish(self, delta: AnswerDelta) -> bytes:
        events, response = b"", self._response
        is_cut = delta.finish_reason is FinishReason.LENGTH
        response.status = "incomplete" if is_cut else "completed"
        if is_cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
        if self._text is not None:
            part, item = self._part(), self._message(response.status)
            events += self._event(
                "response.output_text.done",
                item_id=self._item_id,
                text=part["text"],
                logprobs=self._logprobs,
            )
            events += self._event("response.content_part.done", item_id=self._item_id, part=part)
            events += self._event("response.output_item.done", item=item)
            response.output.append(item)
        if delta.usage is not None:
            response.usage = _usage(delta.usage)
            response.pdserve = Extension(delta.receipt or Receipt())
        return events + self._event(f"response.{response.status}", response=response)

    def _event(self, name: str, **fields: Any) -> bytes:
        if not self._is_stream:
            return b""
        if "response" not in fields:
            fields["output_index"] = 0
            if "item" not in fields:
                fields["content_index"] = 0
        self._sequence += 1
        data = {"type": name, "sequence_number": self._sequence - 1, **fields}
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(data))

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

    async def handle(self, method: str, response_id: str, tenant: str) -> bytes:
        """Return the answer to a GET or DELETE. Raises NotFound."""
        found = await self._store.response(response_id, tenant)
        if found is None:
            raise NotFound(f"no response {response_id!r} is stored")
        if method != "DELETE":
            return found.body
        await self._store.delete_response(found)
        return encode({"id": found.id, "object": "response", "deleted": True})
