"""Log probabilities in the two shapes that OpenAI gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import PositionLogprobs, TokenLogprob

# JSON has no infinity; OpenAI writes this for what is all but impossible.
LEAST_LOGPROB = -9999.0


class ChatLogprobs:
    """`{"content": [...], "refusal": null}`. Keeps nothing between chunks."""

    def shape(self, positions: Sequence[PositionLogprobs]) -> dict[str, object]:
        content = [
            {**_token(p.sampled), "top_logprobs": [_token(x) for x in p.top]} for p in positions
        ]
        return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Four parallel lists. State: the offset of the next token in the answer's text."""

    def __init__(self) -> None:
        self._offset = 0

    def shape(self, positions: Sequence[PositionLogprobs]) -> dict[str, object]:
        offsets: list[int] = []
        for position in positions:
            offsets.append(self._offset)
            self._offset += len(position.sampled.text)
        return {
            "tokens": [p.sampled.text for p in positions],
            "token_logprobs": [_finite(p.sampled) for p in positions],
            # The sampled token is always among them, likely or not.
            "top_logprobs": [
                {x.text: _finite(x) for x in reversed((*p.top, p.sampled))} for p in positions
            ],
            "text_offset": offsets,
        }


def _token(value: TokenLogprob) -> dict[str, object]:
    return {
        "token": value.text,
        "logprob": _finite(value),
        "bytes": list(value.text.encode("utf-8", "replace")),
    }


def _finite(value: TokenLogprob) -> float:
    # In this order a NaN becomes the least, too.
    return max(LEAST_LOGPROB, value.logprob)
