"""Keepalive of gRPC connections."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from pdserve.net import rpc
from tests.support.timeouts import WAIT_S
from tests.unit.pdserve.test_rpc import METHOD, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.unit.pdserve.test_rpc import Context, EchoCall, Handler


async def _stay(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@asynccontextmanager
async def idle_stream(server_options: rpc.Options) -> AsyncIterator[EchoCall]:
    """Open a stream that has carried a message both ways, with pings as often as gRPC allows."""
    handler: Handler = grpc.stream_stream_rpc_method_handler(_stay)
    options = rpc.channel_options(keepalive_s=0.05)
    async with (
        serving(handler, server_options) as address,
        grpc.aio.insecure_channel(address, options=options) as channel,
    ):
        stream: EchoCall = channel.stream_stream(METHOD)()
        await stream.write(b"hello")
        assert await stream.read() == b"hello"
        yield stream
        stream.cancel()


async def test_an_idle_stream_survives_the_pings_that_end_it_under_the_options_of_grpc() -> None:
    async with idle_stream(rpc.server_options(keepalive_s=0.05)) as ours, idle_stream([]) as theirs:
        with pytest.raises(grpc.aio.AioRpcError, match="Too many pings"):
            async with asyncio.timeout(WAIT_S):
                await theirs.read()
        await ours.write(b"still here")
        assert await ours.read() == b"still here"
