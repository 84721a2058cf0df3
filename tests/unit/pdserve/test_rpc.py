"""gRPC plumbing: errors keep their class and fields."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from pdserve.errors import (
    Cancelled,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Refusal,
    TransferFailed,
    Unauthenticated,
    Unavailable,
)
from pdserve.net import rpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Context = grpc.aio.ServicerContext[Any, Any]
    Behavior = Callable[[bytes, Context], Awaitable[bytes]]
    Handler = grpc.RpcMethodHandler[bytes, bytes]
    EchoCall = grpc.aio.StreamStreamCall[bytes, bytes]

METHOD = "/test.Test/Call"


@asynccontextmanager
async def serving(
    handler: grpc.RpcMethodHandler[Any, Any], options: rpc.Options
) -> AsyncIterator[str]:
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Test", {"Call": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(behavior: Behavior) -> None:
    handler: Handler = grpc.unary_unary_rpc_method_handler(behavior)
    async with (
        serving(handler, rpc.server_options()) as address,
        rpc.open_channel(address) as channel,
    ):
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
        await method(b"")


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("top_p must be above 0", field="top_p"),
        ContextLengthExceeded("too long", field="prompt"),
        Overloaded("full", retry_after_s=1.5, reason=Refusal.QUEUE_FULL),
        Unauthenticated("an API key is needed"),
        TransferFailed("no blocks"),
        Cancelled("gone"),
        InternalError("bug: \u00e9"),
    ],
)
async def test_an_error_keeps_its_type_over_grpc(error: PdserveError) -> None:
    async def refuse(request: bytes, context: Context) -> bytes:
        await rpc.abort(context, error)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(refuse)
    assert caught.value.code() is error.grpc_status
    arrived = rpc.error_from_rpc(caught.value)
    assert type(arrived) is type(error)
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize(
    ("status", "metadata", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, (), Unavailable),
        (grpc.StatusCode.DATA_LOSS, (), InternalError),
        (grpc.StatusCode.UNAVAILABLE, ((rpc.ERROR_METADATA_KEY, b"\xff\xff"),), Unavailable),
    ],
)
def test_a_foreign_error_becomes_the_nearest_of_ours(
    status: grpc.StatusCode, metadata: tuple[tuple[str, bytes], ...], expected: type[PdserveError]
) -> None:
    foreign = grpc.aio.AioRpcError(
        status, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details="boom"
    )
    error = rpc.error_from_rpc(foreign)
    assert type(error) is expected
    assert error.message == "boom"
