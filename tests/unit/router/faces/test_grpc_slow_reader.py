"""A gRPC client that stops reading, with flow control as it comes: it holds up nobody for long."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from scripted import MAX_MODEL_LEN, MODEL, TIMEOUT_S, VOCAB_SIZE, ScriptedGenerator

from pdserve import rpc
from pdserve.errors import Cancelled, DeadlineExceeded
from pdserve.types import ModelInfo
from pdserve.v1 import generation_pb2 as g
from pdserve.v1.generation_pb2_grpc import GenerationStub
from router.answer import AnswerDelta, AnswerStream
from tests.patience import WAIT_S, skip

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import ExitStack
    from pathlib import Path

    from scripted import Faces

    from pdserve.errors import PdserveError
    from pdserve.types import GenerateRequest
    from router.answer import AnswerBuffer

PIECE = AnswerDelta(token_ids=(1,), text="x" * 100_000)


class Gushing(ScriptedGenerator):
    """Makes answers without end. `is_patient`: never more than the reader has taken, so that it is
    not its buffer that tells on it. `stuck` is set when the reader takes no more."""

    is_patient = False
    cut = False

    def generate(self, request: GenerateRequest) -> AnswerStream:
        self.requests.append(request)
        self.stuck = asyncio.Event()

        async def open_answer(buffer: AnswerBuffer, stack: ExitStack) -> None:
            gush = asyncio.create_task(self._gush(buffer))
            stack.callback(self.left.set)
            stack.callback(gush.cancel)

        return AnswerStream(open_answer)

    async def _gush(self, buffer: AnswerBuffer) -> None:
        waits = 0
        while True:
            if self.is_patient and buffer._pending:
                waits += 1
                if waits == 100:
                    self.stuck.set()
            elif not buffer.push(PIECE):
                self.cut = True
                buffer.fail(Cancelled("the client does not read its answer"), drop=True)
                return
            else:
                waits = 0
            await asyncio.sleep(0.001)


@pytest.fixture
def generator(model_dir: Path) -> Gushing:
    return Gushing({MODEL: ModelInfo(MODEL, str(model_dir), MAX_MODEL_LEN, VOCAB_SIZE, "float32")})


@asynccontextmanager
async def stops_reading(
    faces: Faces,
) -> AsyncIterator[grpc.aio.UnaryStreamCall[g.GenerateRequest, g.GenerateResponse]]:
    """The call of a client that has read one piece."""
    async with rpc.open_channel(faces.grpc_address) as channel, asyncio.timeout(WAIT_S):
        call = GenerationStub(channel).Generate(g.GenerateRequest(text="hi"))
        await call.read()
        yield call


async def status_of(
    call: grpc.aio.UnaryStreamCall[g.GenerateRequest, g.GenerateResponse],
) -> PdserveError:
    """What a client is told that reads on after all."""

    async def read_on() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as told:
        await read_on()
    return rpc.error_from_rpc(told.value)


async def test_whose_buffer_is_full_is_cut(faces: Faces, generator: Gushing) -> None:
    async with stops_reading(faces) as call:
        await generator.left.wait()
        assert generator.cut
        await faces.open_requests.drain(WAIT_S)  # it counts as open no longer
        assert isinstance(await status_of(call), Cancelled)


async def test_that_takes_too_long_is_ended_by_its_deadline(
    faces: Faces, generator: Gushing
) -> None:
    generator.is_patient = True
    async with stops_reading(faces) as call:
        await generator.stuck.wait()
        assert not generator.left.is_set()
        skip(2 * TIMEOUT_S)
        await generator.left.wait()
        await faces.open_requests.drain(WAIT_S)
        assert isinstance(await status_of(call), DeadlineExceeded)
