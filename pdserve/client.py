"""Clients of the `Generation` service, with and without asyncio::

    async with Client("127.0.0.1:8001") as client:
        async for delta in client.generate("Why do leaves turn red?"):
            print(delta.text, end="")

    with SyncClient("127.0.0.1:8001") as client:
        for delta in client.generate([ChatMessage("user", "Why?")], max_tokens=100):
            print(delta.text, end="")

With the addresses of several routers, an answer continues at another router if the connection is
lost. No token is lost or repeated. A request with n above 1 starts again at another router only
before its first token.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, cast

import grpc.aio

from pdserve import wire
from pdserve.errors import Conflict, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from pdserve.model.tokenizer import ChatMessage, MessageImage
from pdserve.net import rpc
from pdserve.types import SamplingParams, ServiceClass, ToolCallDelta
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Coroutine,
        Iterator,
        Mapping,
        Sequence,
    )

    from pdserve.errors import PdserveError
    from pdserve.types import FinishReason, PositionLogprobs, Receipt, RoutedExperts, Usage

__all__ = [
    "ChatMessage",
    "Client",
    "Delta",
    "MessageImage",
    "ModelCard",
    "SamplingParams",
    "ServiceClass",
    "SyncClient",
    "Tool",
    "ToolCallDelta",
]

LIST_TIMEOUT_S = 10.0
# Default of `patience_s` if there are several routers.
PATIENCE_S = 30.0
_FIRST_PAUSE_S = 0.05
_MOST_DOUBLINGS = 4
# Statuses of a call whose connection to the router was lost. A status that the router itself sends
# has a pdserve error in its metadata (`rpc.has_error`).
_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; None
    allows any. Only `strict` or forced calls are guaranteed to follow the schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. The last delta has finish reason, usage and receipt. `text` excludes
    reasoning and tool calls."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage | None
    receipt: Receipt | None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    routed_experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that the router serves, or a LoRA adapter of the model `parent`."""

    name: str
    max_model_len: int
    vocab_size: int
    parent: str = ""


class Client:
    """A client of one or more routers, with one channel to each. Raises errors of the service as
    PdserveError, and Unavailable if no router answers. `patience_s` limits the time without
    progress while no router is reachable; the default is PATIENCE_S, or 0 for a single router.
    `pdserve.security.tls.tls_dialer` returns a `dialer` for TLS."""

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
        self._at = 0  # index of the router that gets the next call
        default_s = PATIENCE_S if len(addresses) > 1 else 0.0
        self._patience_s = default_s if patience_s is None else patience_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channels. Open answers end with an error."""
        for channel in self._channels:
            await channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        fill_context: bool = False,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        priority: int = 0,
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        tools: Sequence[Tool] = (),
        tool_choice: Literal["auto", "none", "required"] = "auto",
        tool_name: str = "",
        parallel_tool_calls: bool | None = None,
        include_reasoning: bool | None = None,
        enable_thinking: bool | None = None,
        inference_geo: str = "",
        stale_kv: str = "",
    ) -> AsyncIterator[Delta]:
        """Yield the answer to text, token ids or a conversation.

        Without `sampling` or `max_tokens`, or with `fill_context`, the answer may fill the context.
        `max_tokens` overrides `sampling.max_tokens`. A lower `priority` is served earlier. Requests
        of class BATCH wait for all others. Closing the iterator (`aclosing`) cancels the request.
        Raises PdserveError.

        `tools` require a conversation. `tool_name` forces a call of that tool.
        `parallel_tool_calls=False` allows at most one call. `include_reasoning=False` omits
        reasoning from the answer. `enable_thinking` turns reasoning on or off if the chat template
        supports it. For each of these, None selects the service's default. `inference_geo`: region
        where the request's data may be. `stale_kv`: if weights change, a value of StaleKv.
        """
        if max_tokens is not None:
            sampling = replace(sampling or SamplingParams(), max_tokens=max_tokens)
        request = _request(prompt)
        request.model, request.request_id, request.priority = model, request_id, priority
        request.inference_geo, request.stale_kv = inference_geo, stale_kv
        choice = "named" if tool_name else tool_choice
        request.tool_choice = getattr(g, f"TOOL_CHOICE_{choice.upper()}")
        request.tool_name = tool_name
        request.tools.extend(map(_tool, tools))
        for name, value in (
            ("parallel_tool_calls", parallel_tool_calls),
            ("include_reasoning", include_reasoning),
            ("enable_thinking", enable_thinking),
        ):
            if value is not None:
                setattr(request, name, value)
        if service_class is ServiceClass.BATCH:
            request.service_class = g.SERVICE_CLASS_BATCH
        if sampling is not None:
            request.sampling.CopyFrom(wire.sampling_to_pb(sampling))
        if fill_context:
            request.sampling.ClearField("max_tokens")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        async with aclosing(self._answer(request, deadline)) as messages:
            async for message in messages:
                yield _delta(message)

    async def _answer(
        self, request: g.GenerateRequest, deadline: float | None
    ) -> AsyncGenerator[g.GenerateResponse, None]:
        """Yield the messages of an answer, each token once, from any router. An answer with n above
        1 fails if its router is lost after the first token: a router resumes only one output."""
        failures, tokens = _Failures(), list[int]()
        if self._patience_s:
            # A router needs the id to end an earlier stream of the same answer (resume_token_ids).
            request.request_id = request.request_id or f"gen-{uuid.uuid4().hex}"
        while True:
            at = self._at
            timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            attempt = g.GenerateRequest(resume_token_ids=tokens)
            attempt.MergeFrom(request)
            call = self._stubs[at].Generate(attempt, timeout=timeout_s, metadata=self._metadata)
            try:
                async for message in call:
                    failures.count = 0
                    tokens += message.token_ids
                    # Only the model that a virtual model chose can continue its answer.
                    request.model = message.model or request.model
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                if tokens and request.sampling.n > 1:
                    raise _error_of(error) from error
                await self._pause(error, failures, at, deadline, has_begun=bool(tokens))
            finally:
                call.cancel()  # no effect if the call has ended

    async def list_models(self, *, timeout_s: float = LIST_TIMEOUT_S) -> list[ModelCard]:
        """Return the models that the routers serve. Raises PdserveError."""
        failures = _Failures()
        while True:
            at = self._at
            try:
                response = await self._stubs[at].ListModels(
                    g.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata
                )
                return [
                    ModelCard(m.name, m.max_model_len, m.vocab_size, m.parent)
                    for m in response.models
                ]
            except grpc.aio.AioRpcError as error:
                await self._pause(error, failures, at)

    async def _pause(
        self,
        rpc_error: grpc.aio.AioRpcError,
        failures: _Failures,
        at: int,
        deadline: float | None = None,
        *,
        has_begun: bool = False,
    ) -> None:
        """Select the next router. Sleep first if every router has failed in turn. Raises the
        PdserveError if a retry cannot help or `patience_s` is used up. An answer that has begun
        also waits for an overloaded router, because the client already has a part of it."""
        error = _error_of(rpc_error)
        now, routers = time.monotonic(), len(self._stubs)
        failures.since = failures.since if failures.count else now
        failures.count += 1
        is_temporary = isinstance(error, Unavailable | Conflict)
        is_temporary |= has_begun and isinstance(error, Overloaded)
        if not is_temporary or now - failures.since >= self._patience_s:
            raise error
        if self._at == at:  # else another call has already selected the next router
            self._at = (at + 1) % routers
        doublings = min(failures.count // routers - 1, _MOST_DOUBLINGS)
        pause_s = 0.0 if doublings < 0 else _FIRST_PAUSE_S * float(1 << doublings)
        if deadline is not None and deadline - now <= pause_s:
            raise DeadlineExceeded("the deadline passed before a router continued the answer")
        await asyncio.sleep(pause_s)


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _whole(
    method: Callable[Concatenate[Client, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[SyncClient, _P], _T]:
    @functools.wraps(method)
    def call(self: SyncClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._runner.run(method(self._client, *args, **kwargs))

    return call


def _streamed(
    method: Callable[Concatenate[Client, _P], AsyncIterator[_T]],
) -> Callable[Concatenate[SyncClient, _P], Iterator[_T]]:
    @functools.wraps(method)
    def call(self: SyncClient, /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        stream = cast("AsyncGenerator[_T, None]", method(self._client, *args, **kwargs))

        async def following() -> _T | None:
            return await anext(stream, None)

        try:
            while (delta := self._runner.run(following())) is not None:
                yield delta
        finally:
            self._runner.run(stream.aclose())

    return call


class SyncClient:
    """`Client` without asyncio, for one thread: the same arguments and methods. Closing an iterator
    (`contextlib.closing`) cancels its request."""

    def __init__(
        self,
        routers: str | Sequence[str],
        *,
        api_key: str = "",
        dialer: rpc.Dialer = rpc.PLAIN,
        patience_s: float | None = None,
    ) -> None:
        async def connect() -> Client:  # channels belong to the loop that creates them
            return Client(routers, api_key=api_key, dialer=dialer, patience_s=patience_s)

        self._runner = asyncio.Runner()
        try:
            self._client = self._runner.run(connect())
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    generate = _streamed(Client.generate)
    list_models = _whole(Client.list_models)


@dataclass(slots=True)
class _Failures:
    """Consecutive failures of one call, and the time of the first."""

    count: int = 0
    since: float = 0.0


def _error_of(rpc_error: grpc.aio.AioRpcError) -> PdserveError:
    if rpc_error.code() in _LOST and not rpc.has_error(rpc_error):
        return Unavailable(rpc_error.details() or "the connection to the router was lost")
    return rpc.error_from_rpc(rpc_error)


def _request(prompt: str | Sequence[int] | Sequence[ChatMessage]) -> g.GenerateRequest:
    if isinstance(prompt, str):
        return g.GenerateRequest(text=prompt)
    if not (prompt and isinstance(prompt[0], ChatMessage)):
        return g.GenerateRequest(token_ids=g.TokenIds(ids=cast("Sequence[int]", prompt)))
    chat = cast("Sequence[ChatMessage]", prompt)
    if any(message.name is not None for message in chat):
        raise InvalidRequest("gRPC messages have no 'name'", field="messages")
    return g.GenerateRequest(messages=g.ChatMessages(messages=map(_message, chat)))


def _message(message: ChatMessage) -> g.ChatMessage:
    calls = [(call.get("id"), call["function"]) for call in message.tool_calls]
    return g.ChatMessage(
        role=message.role,
        content=message.content,
        parts=map(_part, message.parts),
        reasoning=message.reasoning,
        tool_calls=[
            g.ToolCall(id=id_, name=x["name"], arguments=json.dumps(x["arguments"]))
            for id_, x in calls
        ],
        tool_call_id=message.tool_call_id,
    )


def _part(part: str | MessageImage) -> g.ContentPart:
    if isinstance(part, str):
        return g.ContentPart(text=part)
    name = "url" if isinstance(part.source, str) else "data"
    return g.ContentPart(image=g.Image(detail=part.detail, **{name: part.source}))  # type: ignore[arg-type]


def _tool(tool: Tool) -> g.Tool:
    schema = "" if tool.parameters is None else json.dumps(tool.parameters)
    return g.Tool(
        name=tool.name, description=tool.description, parameters_json=schema, strict=tool.strict
    )


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
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCallDelta(x.index, x.id, x.name, x.arguments) for x in message.tool_calls
        ),
        routed_experts=(
            wire.experts_from_pb(message.routed_experts)
            if message.HasField("routed_experts")
            else None
        ),
    )
