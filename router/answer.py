"""The answer to one request as a face reads it: an async context manager and iterator.

    async with coordinator.generate(request) as answer:
        async for delta in answer:
            ...

Entering admits, places and submits; it raises PdserveError before anything was answered. Iterating
gives deltas; those that wait are merged into one, so that a slow reader costs a bounded buffer and
a fast one no task or queue per token. Leaving releases everything, finished or not.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from pdserve.lean import lean
from router.releases import Releases

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType

    from pdserve.errors import PdserveError
    from pdserve.types import (
        FinishReason,
        GenerateRequest,
        ModelInfo,
        PositionLogprobs,
        Receipt,
        Usage,
    )


@lean
@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A piece of an answer. The last one of an `index` has a finish reason; the last one of all has
    usage and receipt too."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    receipt: Receipt | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """How much may wait for a reader before its request is cut."""

    tokens: int = 8192
    characters: int = 256 * 1024


def merge(deltas: list[AnswerDelta]) -> AnswerDelta:
    """One delta that says what `deltas`, all of one index, say in turn."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return AnswerDelta(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(position for delta in deltas for position in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        receipt=last.receipt,
        index=last.index,
    )


class Out(Protocol):
    """Where the deltas of one request go."""

    def write(self, delta: AnswerDelta) -> bool:
        """Take a delta at once. Return False if the reader is too far behind: the request is then
        cancelled."""
        ...


class AnswerSink(Protocol):
    """Where an answer goes as it is made."""

    def push(self, delta: AnswerDelta) -> bool: ...

    def push_token(self, token_id: int, text: str) -> bool: ...

    def end(self) -> None: ...

    def fail(self, error: PdserveError, *, drop: bool = False) -> None: ...


class AnswerBuffer:
    """What was made of one answer and not read yet.

    Written synchronously by the coordinator (`push`, `end`, `fail`), read by one reader (`get`).
    What was pushed is read before an error is raised.
    """

    __slots__ = (
        *("_characters", "_direct", "_ended", "_error"),
        *("_limits", "_pending", "_tokens", "_waiter"),
    )

    def __init__(self, limits: BufferLimits) -> None:
        self._limits = limits
        self._pending: list[AnswerDelta] = []
        self._tokens = 0
        self._characters = 0
        self._ended = False
        self._error: PdserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._direct: Callable[[str], bool] | None = None

    def push(self, delta: AnswerDelta) -> bool:
        """Add a delta. False where the reader has fallen too far behind: the delta is kept, and the
        caller should end the answer with an error."""
        self._pending.append(delta)
        self._tokens += len(delta.token_ids)
        self._characters += len(delta.text)
        self._wake()
        return self._tokens <= self._limits.tokens and self._characters <= self._limits.characters

    def push_token(self, token_id: int, text: str) -> bool:
        """As `push`, for one token that says nothing else; past the reader where it allows."""
        direct, waiter = self._direct, self._waiter
        # Who waits has sent all that was read: what is written now is in order.
        if direct is not None and waiter is not None and not waiter.done() and direct(text):
            return True
        return self.push(AnswerDelta((token_id,), text))

    def write_with(self, direct: Callable[[str], bool]) -> None:
        """From now on a plain token of index 0 may be given to `direct` while the reader waits;
        False from it sends the token the usual way. It must not block."""
        self._direct = direct

    def end(self) -> None:
        """No delta follows."""
        self._ended = True
        self._wake()

    def fail(self, error: PdserveError, *, drop: bool = False) -> None:
        """End with `error`, raised after what is waiting, or instead of it with `drop`."""
        if self._ended or self._error is not None:
            return
        if drop:
            self._pending.clear()
            self._tokens = self._characters = 0
        self._error = error
        self._wake()

    @property
    def is_complete(self) -> bool:
        """Whether all was pushed that there is."""
        return self._ended

    @property
    def is_read(self) -> bool:
        """Whether all was read that there is, to an end without an error."""
        return self._ended and not self._pending and self._error is None

    @property
    def error(self) -> PdserveError | None:
        """What the answer ended with, if so."""
        return self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> AnswerDelta | None:
        """What is waiting, merged; None at the end. Raises the error that the answer ended with."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if len(self._pending) == 1:
            # The common case, once per token: a reader that keeps up.
            self._tokens = self._characters = 0
            return self._pending.pop()
        return merge(self._take())

    def _take(self) -> list[AnswerDelta]:
        """All that waits of one index. That of the usage, which ends the answer, comes last."""
        last = self._pending[-1]
        index = last.index
        if last.usage is None:
            index = self._pending[0].index
        else:
            index = next((x.index for x in self._pending if x.index != index), index)
        taken = [delta for delta in self._pending if delta.index == index]
        self._pending = [delta for delta in self._pending if delta.index != index]
        self._tokens -= sum(len(delta.token_ids) for delta in taken)
        self._characters -= sum(len(delta.text) for delta in taken)
        return taken


class AnswerStream:
    """One answer. `open_answer` starts it, registering each release on the stack that it is given;
    the releases are synchronous, so that no cancellation can come between them."""

    __slots__ = ("_buffer", "_open_answer", "_stack")

    def __init__(
        self,
        open_answer: Callable[[AnswerBuffer, Releases], Awaitable[None]],
        limits: BufferLimits | None = None,
    ) -> None:
        self._open_answer = open_answer
        self._buffer = AnswerBuffer(limits or BufferLimits())
        self._stack = Releases()

    async def __aenter__(self) -> Self:
        try:
            await self._open_answer(self._buffer, self._stack)
        except BaseException:
            self._stack.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def write_with(self, direct: Callable[[str], bool]) -> None:
        """See AnswerBuffer.write_with."""
        self._buffer.write_with(direct)

    @property
    def is_over(self) -> bool:
        """Whether all of it was read: iterating would end at once."""
        return self._buffer.is_read

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerDelta:
        delta = await self._buffer.get()
        if delta is None:
            raise StopAsyncIteration
        return delta


class Generates(Protocol):
    """What the faces ask of the coordinator."""

    def generate(self, request: GenerateRequest) -> AnswerStream:
        """The answer to `request`; nothing happens until it is entered."""
        ...

    async def serve(self, request: GenerateRequest, out: Out) -> None:
        """Write the answer to `request` to `out`. Raises PdserveError, before or after some deltas
        were written."""
        ...

    def models(self) -> Mapping[str, ModelInfo]:
        """The models that registered workers serve, by name."""
        ...

    def check_ready(self) -> None:
        """Raises Unavailable, naming what is missing, unless every model can be served now."""
        ...

    @property
    def open_requests(self) -> int:
        """Answers entered and not left."""
        ...
