"""Ten times as many clients as can be served, and clients that do not read. Queues are bounded,
refusals have their reason, and nothing is left afterwards."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import grpc.aio
import pytest

from pdserve import wire
from pdserve.errors import Overloaded, Refusal
from pdserve.net import http_server
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub
from router.api import answer_sinks
from router.api import grpc as grpc_api
from router.api import open as api_open
from tests.support.cluster import PLAIN, PROMPT, WAIT_S, Cluster, assert_same
from tests.support.timeouts import wait_until
from workers.fake.settings import FakeFaults

REQUESTS = "pdserve_requests_total"
RUNNING, QUEUED, TRIES = 4, 4, 10
# Verbose, so that what is kept for a connection on the way is soon full.
ENDLESS = replace(PLAIN, max_tokens=4000, logprobs=5)


async def test_requests_beyond_the_capacity_are_refused_and_leave_nothing() -> None:
    limits = {"queue": {"max_running_requests": RUNNING, "max_queued_requests": QUEUED}}
    async with Cluster(prefill=1, decode=1, router=limits) as cluster:
        expected = cluster.expected(PROMPT, PLAIN)
        requests = cluster.router.requests
        cluster.faults("prefill-0", FakeFaults(stalled=True))
        held = [asyncio.create_task(cluster.ask(PROMPT, PLAIN)) for _ in range(RUNNING + QUEUED)]
        await wait_until(lambda: requests.admission.queued == QUEUED)
        for _ in range(TRIES):
            asked = [cluster.ask(PROMPT, PLAIN) for _ in range(RUNNING + QUEUED)]
            for error in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(error, Overloaded)
                assert error.reason == Refusal.QUEUE_FULL
                assert error.retry_after_s > 0
            assert (requests.admission.queued, requests.admission.running) == (QUEUED, RUNNING)
        cluster.faults("prefill-0", FakeFaults())
        for answer in await asyncio.gather(*held):
            assert_same(answer, expected)
        await wait_until(lambda: not requests.log.open)
        assert requests.admission.queued == requests.admission.running == 0


class TestSlowReaders:
    @pytest.fixture(autouse=True)
    def small_buffers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(grpc_api, "MAX_UNSENT_DELTAS", 64)
        monkeypatch.setattr(answer_sinks, "MAX_UNSENT_BYTES", 4096)

        def bind_small(host: str, port: int) -> socket.socket:
            sock = http_server.bind(host, port)
            # Connections take it over; what the kernel holds otherwise is megabytes.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            return sock

        monkeypatch.setattr(api_open, "bind", bind_small)

    async def test_over_http(self) -> None:
        async with Cluster(prefill=1, decode=1, engine_args={"step_s": 0.002}) as cluster:
            host, _, port = cluster.http.rpartition(":")
            body = json.dumps(
                {
                    "model": "pdserve-demo",
                    "prompt": PROMPT,
                    "stream": True,
                    "max_tokens": ENDLESS.max_tokens,
                    "logprobs": ENDLESS.logprobs,
                    "ignore_eos": True,
                }
            ).encode()
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, (host, int(port)))
                head = (
                    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
                )
                await loop.sock_sendall(client, head % len(body) + body)
                assert await loop.sock_recv(client, 16) == b"HTTP/1.1 200 OK\r"
                await assert_cut(cluster)

    async def test_over_grpc(self) -> None:
        async with Cluster(prefill=1, decode=1, engine_args={"step_s": 0.002}) as cluster:
            request = g.GenerateRequest(
                token_ids=g.TokenIds(ids=PROMPT), sampling=wire.sampling_to_pb(ENDLESS)
            )
            # As HTTP/2 has it without gRPC's own guesses: what may be on the way is small.
            options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
            async with grpc.aio.insecure_channel(cluster.grpc, options=options) as channel:
                call = GenerationStub(channel).Generate(request, timeout=2 * WAIT_S)
                await call.read()
                await assert_cut(cluster)
                call.cancel()
                await wait_until(lambda: not cluster.router.requests.log.open)


async def assert_cut(cluster: Cluster) -> None:
    """The workers are free although the client is still there and has not read; others are
    answered."""
    requests = cluster.router.requests
    await wait_until(lambda: requests.admission.running == 0)
    await wait_until(lambda: not cluster.busy("prefill-0", "decode-0"))
    ended = [x for x in (await cluster.metrics()).splitlines() if x.startswith(REQUESTS)]
    assert ["cancelled" in x for x in ended] == [True], ended
    assert_same(await cluster.ask(PROMPT, PLAIN), cluster.expected(PROMPT, PLAIN))
