"""A streamed OpenAI completion, read from its bytes. No I/O and no clock."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks.errors import TargetError
from benchmarks.records import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.records import Timeline


class CompletionStream:
    """Turns server-sent events of ``/v1/completions`` into chunks of a timeline.

    A piece with token ids (``choices[0].token_ids``) or running usage tells its tokens; for any
    other their number is left open, and is settled at the end if pieces and tokens are as many.
    State: the unfinished line, the last usage and receipt seen, and whether the end was seen; only
    :meth:`feed` changes it.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._tail = b""
        self._usage: Mapping[str, object] | None = None
        self._counted = 0
        self._receipt: Mapping[str, object] | None = None
        self._is_last_empty = False
        self._is_done = False

    def feed(self, data: bytes, at_s: float) -> None:
        """Take bytes that arrived at ``at_s``; raises :class:`TargetError` for an error in them."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._is_done = True
            else:
                self._event(_decode(payload), at_s)

    def answer(self) -> Answer:
        """What the ended stream said; raises :class:`TargetError` if it broke off."""
        if not self._is_done:
            raise TargetError("the stream ended before [DONE]")
        usage = self._usage
        completion_tokens = None if usage is None else _count(usage.get("completion_tokens"))
        if usage is None or completion_tokens is None:
            raise TargetError(
                "no usage in the stream: stream_options.include_usage was not kept to"
            )
        if self._is_last_empty and len(self._timeline.chunk_s) > completion_tokens:
            self._timeline.drop_last_chunk()
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Answer(
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=completion_tokens,
            cached_tokens=_count(cached),
            receipt=self._receipt,
        )

    def _event(self, event: Mapping[str, object], at_s: float) -> None:
        error = event.get("error")
        if error:
            raise TargetError(f"error in the stream: {error_text(error)}")
        tokens = self._running_count(event.get("usage"))
        extension = event.get("pdserve")
        if isinstance(extension, dict) and isinstance(extension.get("receipt"), dict):
            self._receipt = extension["receipt"]
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        choice = choices[0]
        token_ids = choice.get("token_ids")
        if isinstance(token_ids, list):
            tokens = len(token_ids)
        if tokens == 0:
            return
        # Some servers send the finish reason with the last token and some after it; without counts
        # an empty last piece can be either, which answer() settles by the usage.
        is_empty = not choice.get("text") and tokens is None
        self._is_last_empty = is_empty and choice.get("finish_reason") is not None
        self._timeline.add_chunk(at_s, tokens)

    def _running_count(self, usage: object) -> int | None:
        if not isinstance(usage, dict):
            return None
        self._usage = usage
        total = _count(usage.get("completion_tokens"))
        if total is None:
            return None
        new, self._counted = total - self._counted, total
        return new


def error_text(error: object) -> str:
    """The message in an OpenAI error object, or whatever is there instead."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict):
            return str(inner.get("message", inner))
        return str(inner)
    return str(error)


def _decode(payload: bytes) -> Mapping[str, object]:
    try:
        event = json.loads(payload)
    except ValueError:
        raise TargetError(f"not JSON in the stream: {payload[:80]!r}") from None
    if not isinstance(event, dict):
        raise TargetError(f"not a JSON object in the stream: {payload[:80]!r}")
    return event


def _count(value: object) -> int | None:
    return value if type(value) is int else None
