"""What is kept of one request, and how it is collected while the request runs.

Times are seconds since the run's start, on a monotonic clock, in whole microseconds once recorded,
so that a record is the same after it was written and read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from benchmarks.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Status = Literal["ok", "failed", "timed_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The timeline of one request.

    ``index`` is its row in the trace. ``scheduled_s`` is when it was due, ``sent_s`` when it was
    sent. ``chunk_s`` has the arrival of every piece of the stream that brought tokens, and
    ``chunk_tokens`` how many each brought, or None where the endpoint does not tell. The lengths
    asked for are ``input_tokens`` and ``output_tokens``; the counts that the endpoint reported are
    None where it reported none. ``receipt`` is the server's own account of the phases, as it came.
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint says about a finished request; None where it does not say."""

    prompt_tokens: int | None
    completion_tokens: int
    cached_tokens: int | None = None
    receipt: Mapping[str, object] | None = None


@dataclass(slots=True)
class Timeline:
    """Collects one request's record; changed only by the target that sends the request.

    It ends as ``ok`` by :meth:`complete` or as ``failed`` by :meth:`fail`; a request of which
    neither is heard is ``timed_out``.
    """

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
    answer: Answer | None = None
    chunk_s: list[float] = field(default_factory=list)
    _chunk_tokens: list[int | None] = field(default_factory=list)

    def mark_sent(self) -> None:
        """Note that the request goes out now."""
        self.sent_s = self.now()

    def add_chunk(self, at_s: float, tokens: int | None) -> None:
        """Note a piece of the stream with ``tokens`` tokens in it, None if that is not known."""
        self.chunk_s.append(at_s)
        self._chunk_tokens.append(tokens)

    def drop_last_chunk(self) -> None:
        """Forget the last piece, which turned out to hold no token."""
        self.chunk_s.pop()
        self._chunk_tokens.pop()

    def complete(self, answer: Answer) -> None:
        """Note that the stream ended well; raises :class:`TargetError` if its length is wrong.

        Every request asks for an exact number of tokens: a shorter answer would be a faster one,
        so it is not counted as good.
        """
        self.answer = answer
        if answer.completion_tokens != self.output_tokens:
            raise TargetError(
                "wrong length: the endpoint did not keep to min_tokens = max_tokens with ignore_eos"
            )
        if not self.chunk_s:
            raise TargetError("no tokens in the stream")
        self.end_s = self.now()
        self.status = "ok"

    def fail(self, error: str) -> None:
        """Note that the request failed, and why."""
        self.end_s = self.now()
        self.status = "failed"
        self.error = error

    def record(self) -> RequestRecord:
        """The record so far; a request that has not ended counts as timed out."""
        answer = self.answer
        timed_out = self.status == "timed_out"
        return RequestRecord(
            index=self.index,
            request_id=self.request_id,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            scheduled_s=round(self.scheduled_s, 6),
            sent_s=_microseconds(self.sent_s),
            chunk_s=tuple(round(at_s, 6) for at_s in self.chunk_s),
            chunk_tokens=self._counts(),
            end_s=_microseconds(self.end_s),
            status=self.status,
            error="no end before the drain timeout" if timed_out else self.error,
            prompt_tokens=None if answer is None else answer.prompt_tokens,
            completion_tokens=None if answer is None else answer.completion_tokens,
            cached_tokens=None if answer is None else answer.cached_tokens,
            receipt=None if answer is None else answer.receipt,
        )

    def _counts(self) -> tuple[int, ...] | None:
        known = [count for count in self._chunk_tokens if count is not None]
        if len(known) == len(self._chunk_tokens):
            return tuple(known)
        if self.answer is not None and self.answer.completion_tokens == len(self._chunk_tokens):
            return (1,) * len(self._chunk_tokens)
        return None


def _microseconds(at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s, 6)
