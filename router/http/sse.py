"""Server-sent events of one answer. What does not change from chunk to chunk is encoded once; a
token costs the JSON string of its text and one join."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import TYPE_CHECKING

from pdserve.errors import InternalError
from router.http.errors import error_body, to_json
from router.http.shapes import logprobs_object, pdserve_object, usage_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve._lanes import Lane
    from pdserve.errors import PdserveError
    from pdserve.types import Receipt, Usage
    from router.answer import AnswerDelta
    from router.http.asked import Streaming
    from router.http.exchange import LaneBetween, SenderBetween
    from router.http.shapes import Head, LogprobsShape, Shape

DONE = b"data: [DONE]\n\n"


def error_event(error: PdserveError) -> bytes:
    """The event that ends a stream which broke off; no DONE follows it."""
    return b"data: %b\n\n" % error_body(error)


class _Choice:
    """What all chunks of one index begin with."""

    __slots__ = ("before", "finished", "logprobs")

    def __init__(self, before: bytes, logprobs: LogprobsShape) -> None:
        self.before = before
        self.logprobs = logprobs
        self.finished = False


class EventWriter:
    """Deltas to the bytes to send. State: which indexes have begun, and whether they finished.

    The receipt goes into the chunk with the finish reason, or into the usage chunk where that was
    asked for.
    """

    def __init__(self, shape: Shape, head: Head, streaming: Streaming) -> None:
        self._shape = shape
        self._include_usage = include_usage = streaming.include_usage
        self.with_token_ids = streaming.token_ids
        fixed = {
            "id": head.answer_id,
            "object": shape.chunk_object,
            "created": head.created,
            "model": head.model,
        }
        self._head = b"data: %b" % to_json(fixed)[:-1]
        # With include_usage every chunk has a usage, null in all but the last.
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._after = shape.after + b',"logprobs":null,"finish_reason":null}]' + self._end
        self._choices: dict[int, _Choice] = {}

    def write(self, delta: AnswerDelta) -> bytes:
        """The events of `delta`; nothing for one that says nothing a client could see."""
        choice = self._choices.get(delta.index)
        if choice is None:
            return self._begin(delta)
        if delta.finish_reason is None and not (delta.logprobs or self.with_token_ids):
            if not delta.text:
                return b""
            return choice.before + encode_basestring(delta.text).encode() + self._after
        return self._full(choice, choice.before, delta)

    def token_sender(self, between: SenderBetween) -> Callable[[str], bool]:
        """Sends the event of a token of index 0 that is not its first, or says that it cannot."""
        send = between(self._choices[0].before, self._after)

        def send_token(text: str) -> bool:
            return not text or send(encode_basestring(text).encode())

        return send_token

    def token_lane(self, lane: LaneBetween) -> Lane | None:
        """The same as a lane, where there can be one."""
        return lane(self._choices[0].before, self._after)

    def _begin(self, delta: AnswerDelta) -> bytes:
        opening = b'%b,"choices":[{"index":%d,' % (self._head, delta.index)
        choice = _Choice(opening + self._shape.before, self._shape.new_logprobs())
        self._choices[delta.index] = choice
        return self._full(choice, opening + self._shape.before_first, delta)

    def _full(self, choice: _Choice, before: bytes, delta: AnswerDelta) -> bytes:
        logprobs = logprobs_object(choice.logprobs, delta.logprobs) if delta.logprobs else None
        parts = [
            before,
            to_json(delta.text),
            self._shape.after,
            b',"logprobs":',
            to_json(logprobs),
            b',"finish_reason":',
            to_json(delta.finish_reason),
        ]
        if self.with_token_ids:
            parts += (b',"token_ids":', to_json(list(delta.token_ids)))
        if delta.finish_reason is None:
            return b"".join((*parts, b"}]", self._end))
        choice.finished = True
        parts += (b',"stop_reason":', to_json(delta.stop_reason), b"}]")
        if not self._include_usage and delta.receipt is not None:
            parts += (b',"pdserve":', to_json(pdserve_object(delta.receipt)))
        parts.append(self._end)
        if self._include_usage and delta.usage is not None:
            parts.append(self._usage_chunk(delta.usage, delta.receipt))
        return b"".join(parts)

    def _usage_chunk(self, usage: Usage, receipt: Receipt | None) -> bytes:
        chunk = b'%b,"choices":[],"usage":%b' % (self._head, to_json(usage_object(usage)))
        if receipt is not None:
            chunk += b',"pdserve":' + to_json(pdserve_object(receipt))
        return chunk + b"}\n\n"

    def end(self) -> bytes:
        """Raises InternalError for an answer that broke off without saying why."""
        if not self._choices or not all(x.finished for x in self._choices.values()):
            raise InternalError("the answer ended without a finish reason")
        return DONE
