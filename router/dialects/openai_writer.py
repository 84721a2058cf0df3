"""Answers of OpenAI's chat and completions: one body, or server-sent events."""

from __future__ import annotations

import time
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pdserve.errors import InternalError
from pdserve.types import FinishReason, ToolCallDelta
from router.attempt.answer import AnswerDelta, ParsedDelta
from router.dialects.fields import (
    DONE,
    ErrorBody,
    Extension,
    UsageBody,
    chat_logprobs,
    encode,
    finite,
    usage_body,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.errors import PdserveError
    from pdserve.types import PositionLogprobs


class FunctionBody(Struct):
    name: str | UnsetType
    arguments: str


class ToolCallBody(Struct):
    """A tool call in an answer. In a chunk: a piece of the call with this `index`."""

    index: int | UnsetType
    id: str | UnsetType
    type: str | UnsetType
    function: FunctionBody


class TextMessage(Struct):
    """A message of an answer. Reasoning has two names: vLLM's, and the one most clients read."""

    role: str | UnsetType
    content: str | UnsetType | None
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    """One answer. Completions have `text`, chat has `message`, and chunks of chat `delta`."""

    index: int
    text: str | UnsetType = UNSET
    message: TextMessage | UnsetType = UNSET
    delta: TextMessage | UnsetType = UNSET
    logprobs: Any = None
    finish_reason: Annotated[
        str | None,
        Meta(
            description="stop, length or tool_calls; content_filter if a guard refused the answer; "
            "error or abort if it broke off."
        ),
    ] = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: UnsetType | None = UNSET
    stop_reason: str | int | UnsetType | None = UNSET


class Response(Struct, kw_only=True):
    """A whole answer, or a chunk of a streamed one. Chat has the prompt's token ids here, and
    completions in each choice. vLLM's clients read the keys that are always null."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: UnsetType | None = UNSET
    system_fingerprint: UnsetType | None = UNSET
    pdserve: Extension | UnsetType = UNSET


# Placeholder for the text of a chunk. A chunk is encoded once per choice and split here; each token
# then costs two concatenations instead of encoding the whole chunk.
_HOLE = "\ue000"


class AnswerForm(NamedTuple):
    """What an answer looks like. `token_ids`: it has the token ids. `names_function`: the client
    named the function that the model must call. `prompts`: token ids of the prompts, each with `n`
    answers, if the client wants them."""

    request_id: str
    model: str
    is_chat: bool
    token_ids: bool
    names_function: bool
    prompts: Sequence[Sequence[int]]
    n: int


class _Writer:
    """Shared parts of EventWriter and WholeAnswer."""

    def __init__(self, form: AnswerForm) -> None:
        self._is_chat = form.is_chat
        created = int(time.time())
        self._head: dict[str, Any] = {
            "id": form.request_id,
            "created": created,
            "model": form.model,
        }
        self._token_ids = form.token_ids
        self._prompts, self._n = form.prompts, form.n
        # OpenAI's finish_reason stays "stop" if the client named the function to call.
        self._is_named = form.names_function
        self._calling: set[int] = set()  # choices with tool calls

    def _choice(self, delta: AnswerDelta, offset: int = 0) -> Choice:
        """Return the choice without its message. `offset`: length of the text so far."""
        choice = Choice(index=delta.index, finish_reason=delta.finish_reason)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
            if delta.index in self._calling and delta.finish_reason is FinishReason.STOP:
                choice.finish_reason = "tool_calls"
        if delta.logprobs:
            choice.logprobs = self._logprobs(delta.logprobs, offset)
        if self._token_ids:
            choice.token_ids = list(delta.token_ids)
        if not self._is_chat:
            choice.text = delta.text
        return choice

    def _put_prompt(self, choice: Choice, fields: dict[str, Any]) -> None:
        """Add the token ids of the prompt to a choice, or to the fields of the answer of chat."""
        if self._prompts and self._is_chat:
            fields["prompt_token_ids"] = list(self._prompts[0])
        elif self._prompts:
            choice.prompt_token_ids = list(self._prompts[choice.index // self._n])

    def _logprobs(self, positions: Sequence[PositionLogprobs], offset: int) -> dict[str, Any]:
        if self._is_chat:
            return {"content": chat_logprobs(positions), "refusal": None}
        return _completion_logprobs(positions, offset)

    def _note_calls(self, delta: ParsedDelta) -> None:
        if delta.tool_calls and not self._is_named:
            self._calling.add(delta.index)


class EventWriter(_Writer):
    """Encodes deltas as server-sent events.

    The receipt is in the chunk with the finish reason, or in the usage chunk if the client
    requested one. `prompt_tokens` and `resumed_tokens` are only used for usage in every chunk.
    """

    def __init__(
        self,
        form: AnswerForm,
        *,
        include_usage: bool,
        usage_in_chunks: bool,
        prompt_tokens: int,
        resumed_tokens: int,
    ) -> None:
        super().__init__(form)
        self._include_usage = include_usage
        self._usage_in_chunks = usage_in_chunks
        self._prompt_tokens = prompt_tokens
        self._tokens = resumed_tokens  # of all choices
        # Send a chunk for every delta, even without text.
        self._every_delta = self._token_ids or self._usage_in_chunks
        # By choice: the encoded chunk before and after the text; the length of the text so far.
        self._around: dict[int, list[bytes]] = {}
        self._offsets: dict[int, int] = {}
        self._unfinished: set[int] = set()

    def write(self, delta: AnswerDelta) -> bytes:
        """Return the events of `delta`, empty if the client would see nothing new."""
        index = delta.index
        if index not in self._offsets:  # first delta of its choice
            self._offsets[index] = 0
            self._unfinished.add(index)
            return self._full(delta, "assistant")
        if delta.finish_reason is not None or delta.logprobs or self._every_delta:
            return self._full(delta)
        if not delta.text:
            parsed = isinstance(delta, ParsedDelta) and (delta.reasoning or delta.tool_calls)
            return self._full(delta) if parsed else b""
        around = self._around.get(index)
        if around is None:
            chunk = self._full(AnswerDelta(text=_HOLE, index=index))
            around = self._around[index] = chunk.split(encode(_HOLE))
        return around[0] + encode(delta.text) + around[1]

    def end(self) -> bytes:
        """Raises InternalError if a choice has no finish reason."""
        if not self._offsets or self._unfinished:
            raise InternalError("the answer ended without a finish reason")
        return DONE

    def fail(self, error: PdserveError) -> bytes:
        return b"data: %b\n\n" % encode(ErrorBody.of(error))

    def _full(self, delta: AnswerDelta, role: str | UnsetType = UNSET) -> bytes:
        offset = self._offsets[delta.index]
        self._offsets[delta.index] = offset + sum(len(x.sampled.text) for x in delta.logprobs)
        if isinstance(delta, ParsedDelta):
            self._note_calls(delta)
        choice = self._choice(delta, offset)
        if isinstance(delta, ParsedDelta):
            choice.delta = _parsed_message(delta, role)
        elif self._is_chat:
            choice.delta = TextMessage(role, delta.text)
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
        extension = UNSET if delta.receipt is None else Extension(delta.receipt)
        fields: dict[str, Any] = {}
        # Chat has one prompt, which its first chunk repeats.
        if role is not UNSET and (not self._is_chat or len(self._offsets) == 1):
            self._put_prompt(choice, fields)
        if not self._include_usage:
            return self._chunk(choice, pdserve=extension, **fields)
        if self._usage_in_chunks:
            self._tokens += len(delta.token_ids)
            prompt, tokens = self._prompt_tokens, self._tokens
            fields["usage"] = UsageBody(prompt, tokens, prompt + tokens)
        if delta.usage is None:
            return self._chunk(choice, **fields)
        return self._chunk(choice, **fields) + self._chunk(
            usage=usage_body(delta.usage), pdserve=extension
        )

    def _chunk(self, *choices: Choice, **fields: Any) -> bytes:
        if self._include_usage:
            fields.setdefault("usage", None)
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = Response(object=kind, choices=list(choices), **self._head, **fields)
        return b"data: %b\n\n" % encode(chunk)


class WholeAnswer(_Writer):
    """Collects the deltas of an answer that is not streamed. Logprobs, the largest part of a long
    answer, are encoded as they arrive: encoding all at the end would delay other streams."""

    def __init__(self, form: AnswerForm) -> None:
        super().__init__(form)
        self._deltas: dict[int, list[AnswerDelta]] = {}
        self._encoded: dict[int, dict[str, Any]] = {}  # logprobs by choice
        self._offsets: dict[int, int] = {}  # lengths of their texts
        self._fields: dict[str, Any] = {"system_fingerprint": None}
        if form.is_chat:
            self._fields["prompt_logprobs"] = None

    def write(self, delta: AnswerDelta) -> bytes:
        if delta.logprobs:
            delta = self._without_logprobs(delta)
        self._deltas.setdefault(delta.index, []).append(delta)
        if isinstance(delta, ParsedDelta):
            self._note_calls(delta)
        if delta.usage is not None:
            self._fields["usage"] = usage_body(delta.usage)
        if delta.receipt is not None:
            self._fields["pdserve"] = Extension(delta.receipt)
        return b""

    def fail(self, error: PdserveError) -> bytes:
        raise error

    def end(self) -> bytes:
        """Raises InternalError if a choice has no finish reason."""
        choices = [self._whole(deltas) for _, deltas in sorted(self._deltas.items())]
        if not choices:
            raise InternalError("the answer is empty")
        kind = "chat.completion" if self._is_chat else "text_completion"
        return encode(Response(object=kind, choices=choices, **self._head, **self._fields))

    def _without_logprobs(self, delta: AnswerDelta) -> AnswerDelta:
        """Encode the logprobs of a delta, and return the delta without them."""
        offset = self._offsets.get(delta.index, 0)
        self._offsets[delta.index] = offset + sum(len(x.sampled.text) for x in delta.logprobs)
        more = self._logprobs(delta.logprobs, offset)
        so_far = self._encoded.setdefault(delta.index, more)
        if so_far is not more:
            for name, values in more.items():
                if values:
                    so_far[name] += values
        return msgspec.structs.replace(delta, logprobs=())

    def _whole(self, deltas: list[AnswerDelta]) -> Choice:
        whole = msgspec.structs.replace(
            deltas[-1],
            text="".join(x.text for x in deltas),
            token_ids=tuple(chain.from_iterable(x.token_ids for x in deltas)),
        )
        if whole.finish_reason is None:
            raise InternalError("the answer ended without a finish reason")
        choice = self._choice(whole)
        choice.logprobs = self._encoded.get(whole.index)
        if not self._is_chat:
            choice.prompt_logprobs = None
        self._put_prompt(choice, self._fields)
        parsed = [x for x in deltas if isinstance(x, ParsedDelta)]
        if parsed:
            choice.message = _whole_message(parsed)
        elif self._is_chat:
            choice.message = TextMessage("assistant", whole.text, None)
        return choice


def _parsed_message(delta: ParsedDelta, role: str | UnsetType) -> TextMessage:
    """Return the message of a chunk for a delta of a parsed answer."""
    message = TextMessage(role, delta.text or (UNSET if role is UNSET else ""))
    if delta.reasoning:
        message.reasoning = message.reasoning_content = delta.reasoning
    if delta.tool_calls:
        message.tool_calls = [
            ToolCallBody(
                call.index,
                call.id or UNSET,
                "function" if call.name else UNSET,
                FunctionBody(call.name or UNSET, call.arguments),
            )
            for call in delta.tool_calls
        ]
    return message


def _whole_message(deltas: Sequence[ParsedDelta]) -> TextMessage:
    content = "".join(x.text for x in deltas)
    calls = whole_calls(chain.from_iterable(x.tool_calls for x in deltas))
    message = TextMessage("assistant", content if content.strip() else None, None)
    if content and not calls:
        message.content = content
    if reasoning := "".join(x.reasoning for x in deltas):
        message.reasoning = message.reasoning_content = reasoning
    if calls:
        message.tool_calls = [
            ToolCallBody(UNSET, x.id, "function", FunctionBody(x.name, x.arguments)) for x in calls
        ]
    return message


def whole_calls(pieces: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join the pieces of each tool call."""
    found: dict[int, list[ToolCallDelta]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    texts = attrgetter("id", "name", "arguments")
    return [
        ToolCallDelta(index, *map("".join, zip(*map(texts, call), strict=True)))
        for index, call in sorted(found.items())
    ]


def _completion_logprobs(positions: Sequence[PositionLogprobs], offset: int) -> dict[str, Any]:
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.sampled.text)
    return {
        "tokens": [x.sampled.text for x in positions],
        "token_logprobs": [finite(x.sampled) if x.sampled.rank else None for x in positions],
        # The sampled token is always listed, also if it is not among the most likely.
        "top_logprobs": [
            msgspec.Raw(encode({top.text: finite(top) for top in reversed((*x.top, x.sampled))}))
            if x.sampled.rank
            else None
            for x in positions
        ],
        "text_offset": offsets,
    }
