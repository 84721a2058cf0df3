"""An async client of the `Generation` service.

async with Client("127.0.0.1:8001") as client:
    async for delta in client.generate("Why do leaves turn red?"):
        print(delta.text, end="")

With the addresses of several routers an answer that broke off with one of them goes on with
another: no token is lost, and none comes twice.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import grpc.aio

from pdserve import deadline as deadlines
from pdserve import rpc, wire
from pdserve.errors import Conflict, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from pdserve.resuming import Resuming
from pdserve.tokenizer import ChatMessage
from pdserve.types import ServiceClass
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence
    from types import TracebackType

    from pdserve.errors import PdserveError
    from pdserve.types import FinishReason, PositionLogprobs, Receipt, SamplingParams, Usage

LIST_TIMEOUT_S = 10.0
# How long routers may be away before an answer fails, where there are several.
PATIENCE_S = 30.0
_FIRST_PAUSE_S = 0.05
_MOST_DOUBLINGS = 4
# What a call ends with whose router went away; it comes without an error of ours.
_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last one has finish reason, usage and receipt."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage | None
    receipt: Receipt | None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that the router serves."""

    name: str
    max_model_len: int
    vocab_size: int


class Client:
    """Owns a channel to each router. Errors of the service are raised as PdserveError; one that no
    router answered is Unavailable. `patience_s` is how long an answer may make no progress while
    routers are away: with one router none. `pdserve.security.tls.tls_dialer` makes a `dialer` for
    TLS."""

    def __init__(
        self,
        routers: str | Sequence[str],
        *,
        api_key: str = "",
        dialer: rpc.Dialer = rpc.PLAIN,
        patience_s: float | None = None,
    ) -> None:
        addresses = (routers,) if isinstance(routers, str) else tuple(routers)
        if not addresses:
            raise InvalidRequest("a client needs the address of a router", field="routers")
        self._channels = [dialer.open_channel(address) for address in addresses]
        self._metadata = rpc.authorization(api_key)
        self._stubs = [GenerationStub(channel) for channel in self._channels]
        self._at = 0  # the router that is asked first
        default_s = PATIENCE_S if len(addresses) > 1 else 0.0
        self._patience_s = default_s if patience_s is None else patience_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the channels and every answer on them."""
        for channel in self._channels:
            await channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        fill_context: bool = False,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        priority: int = 0,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
    ) -> AsyncIterator[Delta]:
        """The answer to text, token ids or a conversation, piece by piece.

        Without `sampling`, or with `fill_context`, the answer may be as long as the context allows.
        A lower `priority` is served earlier; a batch's requests wait for all others.
        Closing the iterator (`aclosing`) cancels the request. Raises PdserveError.
        """
        request = _request(prompt)
        request.model = model
        request.request_id = request_id
        request.priority = priority
        if service_class is ServiceClass.BATCH:
            request.service_class = g.SERVICE_CLASS_BATCH
        if sampling is not None:
            request.sampling.CopyFrom(wire.sampling_to_pb(sampling))
        if fill_context:
            request.sampling.ClearField("max_tokens")
        async with aclosing(self._answer(request, deadlines.after(timeout_s))) as messages:
            async for message in messages:
                yield _delta(message)

    async def _answer(
        self, request: g.GenerateRequest, deadline: float | None
    ) -> AsyncGenerator[g.GenerateResponse, None]:
        """The messages of an answer, each token once, from whichever router gives them."""
        resuming = Resuming(request)
        if self._patience_s:
            request.request_id = request.request_id or f"gen-{uuid.uuid4().hex}"
            resuming.make_repeatable()
        attempts = _Attempts(len(self._stubs), self._patience_s)
        while True:
            at = self._at
            call = self._stubs[at].Generate(
                resuming.next_request(),
                timeout=deadlines.remaining(deadline),
                metadata=self._metadata,
            )
            try:
                async for message in call:
                    attempts.got_on()
                    new = resuming.take(message)
                    if new is not None:
                        yield new
                return
            except grpc.aio.AioRpcError as error:
                pause_s = attempts.failed(_retryable(error), has_begun=resuming.tokens > 0)
                if self._at == at:
                    self._at = (at + 1) % len(self._stubs)
            finally:
                # Without effect on a call that has ended.
                call.cancel()
            left_s = deadlines.remaining(deadline)
            if left_s is not None and left_s <= pause_s:
                raise DeadlineExceeded("no router gave the rest of the answer in time")
            await asyncio.sleep(pause_s)

    async def list_models(self, *, timeout_s: float = LIST_TIMEOUT_S) -> list[ModelCard]:
        """What the router serves. Raises PdserveError."""
        attempts = _Attempts(len(self._stubs), self._patience_s)
        while True:
            try:
                response = await self._stubs[self._at].ListModels(
                    g.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata
                )
                break
            except grpc.aio.AioRpcError as error:
                pause_s = attempts.failed(_retryable(error))
                self._at = (self._at + 1) % len(self._stubs)
            await asyncio.sleep(pause_s)
        return [ModelCard(m.name, m.max_model_len, m.vocab_size) for m in response.models]


class _Attempts:
    """State: how often routers have failed one after the other, and since when."""

    def __init__(self, routers: int, patience_s: float) -> None:
        self._routers = routers
        self._patience_s = patience_s
        self._failures = 0
        self._since = 0.0

    def got_on(self) -> None:
        self._failures = 0

    def failed(self, error: PdserveError, *, has_begun: bool = False) -> float:
        """Seconds to wait before the next router is asked: none before each was asked once. Raises
        `error` where another attempt makes no sense. An answer that has begun waits for room too.
        """
        if not self._failures:
            self._since = time.monotonic()
        self._failures += 1
        is_of_now = isinstance(error, Unavailable | Conflict)
        is_of_now |= has_begun and isinstance(error, Overloaded)
        if not is_of_now or time.monotonic() - self._since >= self._patience_s:
            raise error
        if self._failures < self._routers:
            return 0.0
        doublings = min(self._failures // self._routers - 1, _MOST_DOUBLINGS)
        return _FIRST_PAUSE_S * float(1 << doublings)


def _retryable(error: grpc.aio.AioRpcError) -> PdserveError:
    """The error of the service; Unavailable where the router went away without one."""
    if error.code() in _LOST and not rpc.has_error(error):
        return Unavailable(error.details() or "the router went away")
    return rpc.error_from_rpc(error)


def _request(prompt: str | Sequence[int] | Sequence[ChatMessage]) -> g.GenerateRequest:
    if isinstance(prompt, str):
        return g.GenerateRequest(text=prompt)
    if prompt and isinstance(prompt[0], ChatMessage):
        chat = [_message(cast("ChatMessage", item)) for item in prompt]
        return g.GenerateRequest(messages=g.ChatMessages(messages=chat))
    return g.GenerateRequest(token_ids=g.TokenIds(ids=cast("Sequence[int]", prompt)))


def _message(message: ChatMessage) -> g.ChatMessage:
    if message.name is not None:
        raise InvalidRequest("the name of a message does not travel over gRPC", field="messages")
    return g.ChatMessage(role=message.role, content=message.content)


def _delta(message: g.GenerateResponse) -> Delta:
    return Delta(
        request_id=message.request_id,
        index=message.index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=wire.logprobs_from_pb(message.logprobs),
        finish_reason=wire.finish_from_pb(message.finish_reason),
        stop_reason=wire.stop_reason_from_pb(message.stop_reason),
        usage=wire.usage_from_pb(message.usage) if message.HasField("usage") else None,
        receipt=wire.receipt_from_pb(message.receipt) if message.HasField("receipt") else None,
    )
