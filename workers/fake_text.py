"""Incremental text of one sequence as vLLM makes it: whole characters only, stop strings, and text
held back while a stop string may be forming."""

from __future__ import annotations

import codecs
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.types import StreamDelta
from workers.fake_tokens import token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.types import SamplingParams


def stamped(deltas: Iterable[StreamDelta], now: float) -> list[StreamDelta]:
    """`deltas` with the time for the text of their tokens."""
    return [_stamped(delta, f"{now:.6f} ") for delta in deltas]


def _stamped(delta: StreamDelta, text: str) -> StreamDelta:
    if not delta.token_ids:
        return delta
    if delta.finish_reason is None and not delta.logprobs:
        return StreamDelta(delta.stream_id, delta.token_ids, text)  # sooner than `replace`
    return replace(delta, text=text)


class FakeText:
    """State: all text so far, how much of it was reported, bytes of an incomplete character."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._reported = 0
        self._tokens = 0
        longest = max((len(x) for x in sampling.stop), default=1)
        self._hold_back = 0 if sampling.include_stop_str_in_output else longest - 1

    def prime(self, token_ids: Iterable[int]) -> None:
        """Takes tokens generated elsewhere: what that engine reported counts as reported."""
        for token_id in token_ids:
            self._tokens += 1
            self._text += self._decoder.decode(token_bytes(token_id))
        self.take(finished=False)

    def push(self, token_id: int, *, silent: bool = False) -> str | None:
        """Adds a token, or counts it without its text; returns the stop string that it completed.

        The text then ends before that string, or behind it where the request asks for that.
        """
        self._tokens += 1
        before = len(self._text)
        if not silent:
            self._text += self._decoder.decode(token_bytes(token_id))
        if self._tokens <= self._sampling.min_tokens:
            return None
        for stop in self._sampling.stop:
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                included = len(stop) if self._sampling.include_stop_str_in_output else 0
                self._text = self._text[: at + included]
                return stop
        return None

    def take(self, *, finished: bool) -> str:
        """The text that may be reported now and was not yet."""
        end = len(self._text) if finished else max(0, len(self._text) - self._hold_back)
        start, self._reported = self._reported, max(self._reported, end)
        return self._text[start : self._reported]
