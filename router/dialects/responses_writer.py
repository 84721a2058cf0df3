"""Answers of OpenAI's Responses API: one body, or server-sent events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec import UNSET, Struct, UnsetType

from pdserve.errors import InternalError
from pdserve.types import FinishReason, Receipt
from router.attempt.answer import pieces
from router.dialects.fields import Extension, FollowsSchema, Strict, chat_logprobs, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import ToolCallDelta, Usage
    from router.attempt.answer import AnswerDelta


class FunctionTool(Strict, tag_field="type", tag="function"):
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: FollowsSchema = None


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
    inference_geo: str | UnsetType = UNSET


def _usage(usage: Usage) -> ResponseUsage:
    prompt, made = usage.prompt_tokens, usage.completion_tokens
    details = _InputDetails(usage.cached_tokens)
    reasoning = _OutputDetails(usage.reasoning_tokens)
    geo = usage.inference_geo or UNSET
    return ResponseUsage(prompt, details, made, reasoning, prompt + made, geo)


class ResponseBody(Struct, kw_only=True):
    """A response, complete or so far."""

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
    """The item being generated. `kind`: "text", "reasoning" or the number of a call."""

    kind: str | int
    item: dict[str, Any]
    before: bytes  # encoded start of its delta events, up to the sequence number
    text: list[str] = []
    logprobs: list[Any] = []


class StoresItems(Protocol):
    """A body whose `stored_items` are the JSON of its input's items."""

    @property
    def stored_items(self) -> bytes: ...


class WrittenResponse(NamedTuple):
    """A complete response to store. `items`: JSON of its input's items. `previous`: id of the
    response that it continues."""

    id: str
    body: bytes
    items: bytes
    previous: str | None


class ResponseWriter:
    """Collects an answer and encodes its events if it is streamed. State: the response so far, and
    the open item."""

    def __init__(self, response: ResponseBody, body: StoresItems, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._response = response
        self._body = body
        self._suffix = response.id.removeprefix("resp_")
        self._sequence = 0
        self._open: _Open | None = None
        self._logprobs: list[Any] = []  # of tokens whose text is sent with a later token
        self._has_begun = False
        self._not_stored = ""

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
        """Add text to the open item, or close it and open a new one if its kind differs."""
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
        reason = _INCOMPLETE.get(delta.finish_reason)
        response.status = "incomplete" if reason else "completed"
        if reason:
            response.incomplete_details = {"reason": reason}
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
        if not self._is_stream:
            return encode(self._response)
        # The response was already sent in its last event, so only a comment can still follow.
        return b": not stored: %b\n\n" % self._not_stored.encode() if self._not_stored else b""

    def written(self) -> WrittenResponse | None:
        """Return the response to store, or None if it is incomplete or the client set `store` to
        false."""
        response = self._response
        if not response.store or response.usage is None:
            return None
        items = self._body.stored_items
        previous = response.previous_response_id
        return WrittenResponse(response.id, encode(response), items, previous)

    def is_not_stored(self, reason: str) -> None:
        """Record that the response could not be stored; `end` reports it."""
        self._response.store = False
        self._not_stored = reason

    def fail(self, error: PdserveError) -> bytes:
        self._response.status = "failed"
        self._response.error = {"code": error.code, "message": error.message}
        return self._event("response.failed", response=self._response)


_ARGUMENTS = "response.function_call_arguments"
_INCOMPLETE: dict[FinishReason | None, str] = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
}


def _part(opened: _Open) -> dict[str, Any]:
    text = "".join(opened.text)
    if opened.kind == "text":
        more = {"annotations": [], "logprobs": opened.logprobs}
        return {"type": "output_text", "text": text, **more}
    return {"type": "reasoning_text", "text": text}
