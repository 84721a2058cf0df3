"""What is recorded of one request.

Times are seconds since the start of the run on a monotonic clock, rounded to microseconds, so that
a record does not change when it is written and read.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - msgspec reads the annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.errors import TargetError

if TYPE_CHECKING:
    from benchmarks.client import Piece


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """The timeline of one request; until it ends it is `timed_out`.

    `index` is its row in the trace, `scheduled_s` the time it was due. `chunk_s` holds the arrival
    of each piece of the stream that brought tokens, `chunk_tokens` how many each brought (None if
    the endpoint does not tell). `input_tokens` and `output_tokens` were requested; the counts the
    endpoint reported may be None. `receipt` is the server's report on the phases.
    """

    index: int
    request_id: str
    input_tokens: int
    output_tokens: int
    scheduled_s: float
    sent_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] | None = field(default_factory=list)
    end_s: float | None = None
    status: Literal["ok", "failed", "timed_out"] = "timed_out"
    error: str | None = "no end before the drain timeout"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    receipt: Mapping[str, Any] | None = None

    def add(self, piece: Piece, at_s: float) -> None:
        """Note a piece of the stream at its arrival."""
        for name, count in (piece.usage or {}).items():
            setattr(self, name, count)
        self.receipt = piece.receipt or self.receipt
        # Some servers send the finish reason after the last token, in a piece without text.
        if piece.tokens or (piece.tokens is None and piece.text):
            self.chunk_s.append(round(at_s, 6))
            if piece.tokens is None:
                self.chunk_tokens = None
            elif self.chunk_tokens is not None:
                self.chunk_tokens.append(piece.tokens)

    def complete(self, at_s: float) -> None:
        """Note a good end. Raises TargetError if the answer does not have the requested length.

        Each request asks for an exact number of tokens: a shorter answer would look faster.
        """
        made = self.completion_tokens
        if made is None:
            raise TargetError("no usage in the stream (stream_options.include_usage was ignored)")
        if made != self.output_tokens:
            raise TargetError(
                f"{made} tokens instead of {self.output_tokens}: the endpoint ignored min_tokens "
                "or ignore_eos"
            )
        if not self.chunk_s:
            raise TargetError("no tokens in the stream")
        if self.chunk_tokens is None and len(self.chunk_s) == made:
            self.chunk_tokens = [1] * made
        self.end_s, self.status, self.error = round(at_s, 6), "ok", None

    def fail(self, error: str, at_s: float) -> None:
        self.end_s, self.status, self.error = round(at_s, 6), "failed", error
