"""What the API gives to a request and gets from it: deltas, and where they go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve import types as t


class AnswerDelta(Struct):
    """A piece of an answer. The first one has `prompt_logprobs`, if they were asked for and nothing
    is resumed. The last one of an `index` has a finish reason; the last one of all has
    usage and receipt too."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[t.PositionLogprobs, ...] = ()
    finish_reason: t.FinishReason | None = None
    stop_reason: str | int | None = None
    usage: t.Usage | None = None
    receipt: t.Receipt | None = None
    index: int = 0
    prompt_logprobs: tuple[t.PositionLogprobs, ...] = ()


class ParsedDelta(AnswerDelta):
    """A piece of a parsed answer: `text`, reasoning or tool calls."""

    reasoning: str = ""
    tool_calls: tuple[t.ToolCallDelta, ...] = ()


def pieces(delta: AnswerDelta) -> Iterator[tuple[str | int, str, t.ToolCallDelta | None]]:
    """Return what a delta adds: the kind, "reasoning", "text" or the number of a call, the text,
    and the piece of the call."""
    if isinstance(delta, ParsedDelta):
        if delta.reasoning:
            yield "reasoning", delta.reasoning, None
        if delta.text:
            yield "text", delta.text, None
        for call in delta.tool_calls:
            yield call.index, call.arguments, call
    elif delta.text:
        yield "text", delta.text, None


class Out(Protocol):
    """Where the deltas of one request go."""

    def write(self, delta: AnswerDelta) -> bool:
        """Take a delta, without waiting. Return False if the client reads too slowly: the request
        is then cancelled."""
        ...


class Discard:
    """The reader of what nobody waits to read: a probe, or an embedding, which has no tokens."""

    def write(self, delta: AnswerDelta) -> bool:
        return True


class Generates(Protocol):
    """What the API uses of RequestServer, which explains it (router/request.py)."""

    async def serve(self, request: t.GenerateRequest, out: Out) -> None: ...
    def models(self) -> Mapping[str, t.ModelInfo]: ...
    def adapters(self) -> Mapping[str, t.Adapter]: ...
    def check_ready(self) -> None: ...


def served(generator: Generates) -> Mapping[str, tuple[t.ModelInfo, t.Adapter | None]]:
    """Return all that a request can name as its model: models by their names, then LoRA adapters
    with their model."""
    models = generator.models()
    found: dict[str, tuple[t.ModelInfo, t.Adapter | None]] = {
        name: (model, None) for _, model in sorted(models.items()) for name in model.names
    }
    for name, adapter in sorted(generator.adapters().items()):
        if adapter.model in models:
            found.setdefault(name, (models[adapter.model], adapter))
    return found
