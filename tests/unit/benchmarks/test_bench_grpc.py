"""Replay over gRPC against a ``Generation`` service in this process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.errors import BenchError
from benchmarks.grpc_target import GrpcTarget
from benchmarks.records import Timeline
from benchmarks.targets import ServedModel
from pdserve import rpc
from pdserve.errors import Overloaded
from pdserve.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.patience import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MODEL = ServedModel("demo", 8192, 2048)
RECEIPT = common_pb2.Receipt(prefill_s=0.25, transfer_bytes=4096, decode_worker="decode-0")


class FakeGeneration(generation_pb2_grpc.GenerationServicer):
    """Streams what is asked for, the first two tokens in one message; ``fault`` changes that."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.client_left = asyncio.Event()

    async def ListModels(self, request: Any, context: Any) -> generation_pb2.ListModelsResponse:  # noqa: N802
        card = generation_pb2.ModelCard(name="demo", max_model_len=8192, vocab_size=2048)
        return generation_pb2.ListModelsResponse(models=[card])

    async def Generate(  # noqa: N802
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        if self.fault == "refuse":
            await rpc.abort(context, Overloaded("full", retry_after_s=1.0))
        left = request.sampling.max_tokens
        for size in (min(2, left), *[1] * (left - 2)):
            yield generation_pb2.GenerateResponse(token_ids=[5] * size, text="x")
            if self.fault == "hang":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.client_left.set()
        if self.fault == "break":
            return
        yield generation_pb2.GenerateResponse(
            finish_reason=common_pb2.FINISH_REASON_LENGTH,
            usage=common_pb2.Usage(
                prompt_tokens=len(request.token_ids.ids), completion_tokens=left, cached_tokens=1
            ),
            receipt=RECEIPT,
        )


@asynccontextmanager
async def _serving(servicer: FakeGeneration) -> AsyncIterator[str]:
    server = rpc.make_server()
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def _timeline(output_tokens: int) -> Timeline:
    loop = asyncio.get_running_loop()
    return Timeline(
        index=0,
        request_id="r",
        input_tokens=3,
        output_tokens=output_tokens,
        scheduled_s=0.0,
        now=loop.time,
    )


async def test_an_answer_is_counted_by_its_token_ids() -> None:
    servicer = FakeGeneration()
    async with _serving(servicer) as address:
        target = GrpcTarget(address)
        assert await target.model(None) == MODEL
        timeline = _timeline(4)
        await target.send(target.prepare(MODEL, "r", [7, 8, 9], 4), timeline)
        await target.aclose()
    record = timeline.record()
    assert (record.status, record.chunk_tokens) == ("ok", (2, 1, 1))
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (3, 4, 1)
    assert record.receipt is not None
    assert record.receipt["transfer_bytes"] == 4096
    assert record.receipt == json.loads(json.dumps(record.receipt))
    (request,) = servicer.requests
    assert (request.request_id, request.model) == ("r", "demo")
    assert list(request.token_ids.ids) == [7, 8, 9]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (4, 4, True)
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("fault", "message"),
    [("refuse", "RESOURCE_EXHAUSTED: full"), ("break", "no usage in the stream")],
)
async def test_a_fault_is_a_failed_request(fault: str, message: str) -> None:
    async with _serving(FakeGeneration(fault)) as address:
        target = GrpcTarget(address)
        with pytest.raises(Exception, match=message) as caught:
            await target.send(target.prepare(MODEL, "r", [7], 4), _timeline(4))
        assert type(caught.value).__name__ == "TargetError"
        await target.aclose()


async def test_cancelling_reaches_the_server() -> None:
    servicer = FakeGeneration("hang")
    async with _serving(servicer) as address:
        target = GrpcTarget(address)
        timeline = _timeline(4)
        prepared = target.prepare(MODEL, "r", [7], 4)
        sending = asyncio.create_task(target.send(prepared, timeline))
        async with asyncio.timeout(WAIT_S):
            while not timeline.chunk_s:  # noqa: ASYNC110 - a list tells nobody
                await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.wait_for(servicer.client_left.wait(), WAIT_S)
        await target.aclose()
    assert timeline.record().chunk_tokens == (2,)


async def test_a_service_that_is_not_there_is_refused() -> None:
    async with _serving(FakeGeneration()) as address:
        pass
    target = GrpcTarget(address)
    with pytest.raises(BenchError, match="UNAVAILABLE"):
        await target.model(None)
    await target.aclose()


@pytest.mark.parametrize("address", ["", "host", "host:", "host:port", "http://h:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(BenchError, match="--grpc"):
        GrpcTarget(address)


_PROGRAM = """
import argparse, sys
from benchmarks.cli import register
parser = argparse.ArgumentParser()
register(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.handler(args))
"""


async def test_the_command_replays_over_grpc() -> None:
    async with _serving(FakeGeneration()) as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, "bench", "replay", "--grpc", address, "--json"),
            *("--limit", "5", "--speedup", "1e6", "--scale-lengths", "1/32"),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode == 0, err.decode()
    result = json.loads(out)
    assert result["target"]["kind"] == "grpc"
    assert result["summary"]["ok"] == 5
    assert result["summary"]["receipts"]["totals"]["transfer_bytes"] == 5 * 4096
