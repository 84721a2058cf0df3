"""How an answer looks: the parts in which the two endpoints differ, and whole answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import InternalError
from pdserve.lean import lean
from router.http.logprobs import ChatLogprobs, CompletionLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.types import FinishReason, PositionLogprobs, Receipt, Usage
    from router.answer import AnswerDelta


class LogprobsShape(Protocol):
    """Makes the `logprobs` of one choice, chunk by chunk."""

    def shape(self, positions: Sequence[PositionLogprobs]) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """`before_first`, `before` and `after` stand around the JSON string of a chunk's text."""

    whole_object: str
    chunk_object: str
    before_first: bytes
    before: bytes
    after: bytes
    whole_text: Callable[[str], dict[str, object]]
    new_logprobs: Callable[[], LogprobsShape]


CHAT = Shape(
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    before_first=b'"delta":{"role":"assistant","content":',
    before=b'"delta":{"content":',
    after=b"}",
    whole_text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    new_logprobs=ChatLogprobs,
)
COMPLETION = Shape(
    whole_object="text_completion",
    chunk_object="text_completion",
    before_first=b'"text":',
    before=b'"text":',
    after=b"",
    whole_text=lambda text: {"text": text},
    new_logprobs=CompletionLogprobs,
)


@lean
@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer say alike. `created` is in Unix seconds."""

    answer_id: str
    model: str
    created: int


def usage_object(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def pdserve_object(receipt: Receipt) -> dict[str, object]:
    """Our own part of an answer, beside OpenAI's."""
    return {"receipt": receipt}


class WholeAnswer:
    """Collects the deltas of an answer that is not streamed."""

    def __init__(self, shape: Shape, head: Head, *, with_token_ids: bool = False) -> None:
        self._shape = shape
        self._head = head
        self._with_token_ids = with_token_ids
        self._choices: dict[int, _Choice] = {}
        self._usage: Usage | None = None
        self._receipt: Receipt | None = None

    def add(self, delta: AnswerDelta) -> None:
        choice = self._choices.setdefault(delta.index, _Choice())
        choice.texts.append(delta.text)
        choice.logprobs += delta.logprobs
        choice.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
        self._usage = delta.usage or self._usage
        self._receipt = delta.receipt or self._receipt

    def payload(self) -> dict[str, object]:
        """Raises InternalError for an answer that broke off without saying why."""
        if not self._choices or any(c.finish_reason is None for c in self._choices.values()):
            raise InternalError("the answer ended without a finish reason")
        payload: dict[str, object] = {
            "id": self._head.answer_id,
            "object": self._shape.whole_object,
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(i, c) for i, c in sorted(self._choices.items())],
        }
        if self._usage is not None:
            payload["usage"] = usage_object(self._usage)
        if self._receipt is not None:
            payload["pdserve"] = pdserve_object(self._receipt)
        return payload

    def _choice(self, index: int, choice: _Choice) -> dict[str, object]:
        return {
            "index": index,
            **self._shape.whole_text("".join(choice.texts)),
            "logprobs": logprobs_object(self._shape.new_logprobs(), choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if self._with_token_ids else {}),
        }


class _Choice:
    __slots__ = ("finish_reason", "logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[PositionLogprobs] = []
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None


def logprobs_object(
    shape: LogprobsShape, positions: Iterable[PositionLogprobs]
) -> dict[str, object] | None:
    """None where no log probabilities were asked for."""
    listed = list(positions)
    return shape.shape(listed) if listed else None
