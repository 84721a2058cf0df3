"""Interface between the API and a request: answer deltas, and the writer that receives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from pdserve.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve import types as t


def deadline_passed(tokens: int) -> DeadlineExceeded:
    """Return the error of an answer that ends after `tokens`."""
    return DeadlineExceeded(f"the deadline passed after {tokens} tokens")


class AnswerDelta(Struct):
    """A piece of an answer.

    The first delta has `prompt_logprobs` if the request wants them and is not resumed.
    `routed_experts`: as in StreamDelta. The last
    delta of each `index` has a finish reason; the last delta of the request also has usage and
    receipt.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[t.PositionLogprobs, ...] = ()
    finish_reason: t.FinishReason | None = None
    stop_reason: str | int | None = None
    usage: t.Usage | None = None
    receipt: t.Receipt | None = None
    index: int = 0
    prompt_logprobs: tuple[t.PositionLogprobs, ...] = ()
    routed_experts: t.RoutedExperts | None = None


class ParsedDelta(AnswerDelta):
    """A piece of a parsed answer: `text`, reasoning or tool calls."""

    reasoning: str = ""
    tool_calls: tuple[t.ToolCallDelta, ...] = ()


def pieces(delta: AnswerDelta) -> Iterator[tuple[str | int, str, t.ToolCallDelta | None]]:
    """Yield the parts of a delta as (kind, text, tool call). The kind is "reasoning", "text" or
    the index of the tool call."""
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
    """Receiver of the deltas of one request."""

    def write(self, delta: AnswerDelta) -> bool:
        """Accept a delta without waiting. Return False if the client reads too slowly; the request
        is then cancelled."""
        ...


class Discard:
    """Drops all deltas, for probes and for embeddings, which have no tokens."""

    def write(self, delta: AnswerDelta) -> bool:
        return True


class Generates(Protocol):
    """The method of RequestServer that the APIs use; documented in router/serve.py."""

    async def serve(self, request: t.GenerateRequest, out: Out) -> None: ...


class Embeds(Protocol):
    """The method of EmbeddingServer; documented in router/serve.py."""

    async def embed(self, request: t.GenerateRequest) -> bytes: ...


class Models(Protocol):
    """Methods of ServedModels; documented in router/fleet/served_models.py."""

    def models(self) -> Mapping[str, t.ModelInfo]: ...
    def adapters(self) -> Mapping[str, t.Adapter]: ...
    def check_ready(self) -> None: ...


def served(served_models: Models) -> Mapping[str, tuple[t.ModelInfo, t.Adapter | None]]:
    """Return each valid model name with its model, and its LoRA adapter if the name is one."""
    models = served_models.models()
    found: dict[str, tuple[t.ModelInfo, t.Adapter | None]] = {
        name: (model, None) for _, model in sorted(models.items()) for name in model.names
    }
    for name, adapter in sorted(served_models.adapters().items()):
        # An adapter stays registered for a while after the last worker of its model has left.
        if adapter.model in models:
            found.setdefault(name, (models[adapter.model], adapter))
    return found
