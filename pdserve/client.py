"""An async client of the `Generation` service.

async with Client("127.0.0.1:8001") as client:
    async for delta in client.generate("Why do leaves turn red?"):
        print(delta.text, end="")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import grpc.aio

from pdserve import rpc, wire
from pdserve.errors import InvalidRequest
from pdserve.tokenizer import ChatMessage
from pdserve.types import ServiceClass
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from types import TracebackType

    from pdserve.types import FinishReason, PositionLogprobs, Receipt, SamplingParams, Usage

LIST_TIMEOUT_S = 10.0


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
    """Owns one channel to a router. Errors of the service are raised as PdserveError; one that no
    router answered is Unavailable. `pdserve.access.tls.tls_dialer` makes a `dialer` for TLS."""

    def __init__(self, address: str, *, api_key: str = "", dialer: rpc.Dialer = rpc.PLAIN) -> None:
        self._channel = dialer.open_channel(address)
        self._metadata = rpc.authorization(api_key)
        self._stub = GenerationStub(self._channel)

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
        """Ends the channel and every answer on it."""
        await self._channel.close()

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
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                yield _delta(message)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        finally:
            # Without effect on a call that has ended.
            call.cancel()

    async def list_models(self, *, timeout_s: float = LIST_TIMEOUT_S) -> list[ModelCard]:
        """What the router serves. Raises PdserveError."""
        try:
            response = await self._stub.ListModels(
                g.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        return [ModelCard(m.name, m.max_model_len, m.vocab_size) for m in response.models]


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
