"""What is recorded of one request.

Times are seconds since the start of the run on a monotonic clock, rounded to microseconds, so that
a record does not change when it is written and read.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - msgspec reads the annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from benchmarks.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.client import Piece

Status = Literal["ok", "failed", "timed_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The timeline of one request.

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
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] | None = None
    end_s: float | None = None
    status: Status
    error: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    receipt: Mapping[str, object] | None = None


@dataclass(slots=True)
class Timeline:
    """Collects the record of one request while it runs. It is `timed_out` until it ends."""

    index: int
    request_id: str
    input_tokens: int
    output_tokens: int
    scheduled_s: float
    now: Callable[[], float]
    sent_s: float | None = None
    end_s: float | None = None
    status: Status = "timed_out"
    error: str | None = None
    usage: Mapping[str, int | None] = field(default_factory=dict)
    receipt: Mapping[str, object] | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int | None] = field(default_factory=list)
    _is_last_empty: bool = False

    def add(self, piece: Piece) -> None:
        """Note a piece of the stream at its arrival."""
        self.usage = piece.usage or self.usage
        self.receipt = piece.receipt or self.receipt
        if piece.has_choice and piece.tokens != 0:
            # Some servers send the finish reason with the last token and some after it. Without
            # counts an empty last piece may be either; complete() decides by the usage.
            self._is_last_empty = (
                piece.tokens is None and not piece.text and piece.finish_reason is not None
            )
            self.chunk_s.append(self.now())
            self.chunk_tokens.append(piece.tokens)

    def complete(self) -> None:
        """Note a good end. Raises TargetError if the answer does not have the requested length.

        Each request asks for an exact number of tokens: a shorter answer would look faster.
        """
        made = self.usage.get("completion_tokens")
        if made is None:
            raise TargetError("no usage in the stream (stream_options.include_usage was ignored)")
        if self._is_last_empty and len(self.chunk_s) > made:
            self.chunk_s.pop()
            self.chunk_tokens.pop()
        if made != self.output_tokens:
            raise TargetError(
                f"{made} tokens instead of {self.output_tokens}: the endpoint ignored min_tokens "
                "or ignore_eos"
            )
        if not self.chunk_s:
            raise TargetError("no tokens in the stream")
        self.end_s, self.status = self.now(), "ok"

    def fail(self, error: str) -> None:
        """Note that the request failed."""
        self.end_s, self.status, self.error = self.now(), "failed", error

    def record(self) -> RequestRecord:
        """Return the record so far."""
        timed_out = self.status == "timed_out"
        return RequestRecord(
            index=self.index,
            request_id=self.request_id,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            scheduled_s=round(self.scheduled_s, 6),
            sent_s=None if self.sent_s is None else round(self.sent_s, 6),
            chunk_s=tuple(round(at_s, 6) for at_s in self.chunk_s),
            chunk_tokens=self._counts(),
            end_s=None if self.end_s is None else round(self.end_s, 6),
            status=self.status,
            error="no end before the drain timeout" if timed_out else self.error,
            prompt_tokens=self.usage.get("prompt_tokens"),
            completion_tokens=self.usage.get("completion_tokens"),
            cached_tokens=self.usage.get("cached_tokens"),
            receipt=self.receipt,
        )

    def _counts(self) -> tuple[int, ...] | None:
        known = [count for count in self.chunk_tokens if count is not None]
        if len(known) == len(self.chunk_tokens):
            return tuple(known)
        if self.usage.get("completion_tokens") == len(self.chunk_tokens):
            return (1,) * len(self.chunk_tokens)
        return None
