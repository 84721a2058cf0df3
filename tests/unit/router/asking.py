"""What the coordinator's tests ask, and how they read the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.types import GenerateRequest, SamplingParams
from router.answer import AnswerDelta

if TYPE_CHECKING:
    from router.answer import AnswerStream

PROMPT = tuple(range(1, 41))


def request(**changes: Any) -> GenerateRequest:
    """Forty prompt tokens and up to eight of an answer, unless `changes` say otherwise."""
    values: dict[str, Any] = {
        "request_id": "r1",
        "model": "demo",
        "prompt_token_ids": PROMPT,
        "sampling": SamplingParams(max_tokens=8),
    }
    return GenerateRequest(**(values | changes))


async def read(answer: AnswerStream) -> AnswerDelta:
    """All that is left of an answer, as one delta."""
    deltas = [delta async for delta in answer]
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    last = deltas[-1]
    return AnswerDelta(
        token_ids=tokens,
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        receipt=last.receipt,
    )
