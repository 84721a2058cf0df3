"""The router's side of a worker, scripted: a registry, and one session."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from msgspec import structs

from kv_transfer.settings import ConnectorConfig
from pdserve import wire
from pdserve.config import KvConfig, WorkerConfig
from pdserve.net import framing, rpc
from pdserve.types import ErrorInfo, ModelInfo, Role, SamplingParams, StreamDelta
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import (
    RegistryServicer,
    WorkerStub,
    add_RegistryServicer_to_server,
)
from tests.support.timeouts import WAIT_S
from workers.control.worker_drain import DrainTiming
from workers.fake.engine import FakeEngine
from workers.fake.settings import FakeSettings
from workers.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from workers.engine import Engine

MODEL = ModelInfo(name="fake", path="", max_model_len=4096, vocab_size=512, dtype="none")
PLAIN = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
# Longer than any pause of the machine. A test of one of these has its own fake engine.
PATIENT_KV = ConnectorConfig(hold_s=3600.0, receive_timeout_s=3600.0)
PAIRING_S = 3600.0
_DRAIN_TIMING = DrainTiming()
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class FakeRegistry(RegistryServicer):
    """A registry that records calls. `refusal`, `forget` and `failure` select its replies;
    `answers` is set if renewals are answered. `router_id`: of the link that takes renewals, "" as
    in older versions."""

    lease_s: float = 30.0
    router_id: str = ""
    refusal: str = ""
    status: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION
    refused: int = 0
    forget: bool = False
    failure: bool = False
    registered: list[w.WorkerInfo] = field(default_factory=list)
    renewals: list[w.RenewRequest] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # reasons of workers that left
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.answers.set()

    async def Register(  # noqa: N802
        self, request: w.RegisterRequest, context: Context
    ) -> w.RegisterResponse:
        if self.refusal:
            self.refused += 1
            self.changed.set()
            await context.abort(self.status, self.refusal)
        self.registered.append(request.worker)
        self.forget = False
        self.changed.set()
        return w.RegisterResponse(lease_s=self.lease_s, router_id=self.router_id)

    async def Renew(  # noqa: N802
        self, request: w.RenewRequest, context: Context
    ) -> w.RenewResponse:
        if self.failure:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        if self.forget:
            await context.abort(grpc.StatusCode.NOT_FOUND, "who are you")
        self.renewals.append(request)
        self.changed.set()
        await self.answers.wait()
        return w.RenewResponse(lease_s=self.lease_s)

    async def Deregister(  # noqa: N802
        self, request: w.DeregisterRequest, context: Context
    ) -> w.DeregisterResponse:
        self.left.append(request.worker_id)
        self.failures.append(request.failure)
        self.changed.set()
        return w.DeregisterResponse()

    async def until(self, what: Any) -> None:
        """Wait until `what()` is true; it is checked after each call."""
        async with asyncio.timeout(WAIT_S):
            while not what():
                self.changed.clear()
                await self.changed.wait()

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        server = rpc.make_server()
        add_RegistryServicer_to_server(self, server)
        address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()
        try:
            yield address
        finally:
            await server.stop(None)


def worker_config(role: Role = Role.AGGREGATED, *, router: str, **values: Any) -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{role}-0", role=role, engine="fake", routers=(router,), kv=KvConfig(), **values
    )


def fake_engine(instance_id: str, *, timing: FakeSettings | None = None) -> FakeEngine:
    settings = structs.replace(timing or FakeSettings(), pairing_s=PAIRING_S)
    return FakeEngine(MODEL, settings, PATIENT_KV, instance_id)


def engine_of(server: WorkerServer) -> FakeEngine:
    """Return the fake engine of a worker, to set faults."""
    engine = server.service._engine
    assert isinstance(engine, FakeEngine)
    return engine


@asynccontextmanager
async def running_worker(
    role: Role = Role.AGGREGATED,
    *,
    registry: FakeRegistry | None = None,
    timing: FakeSettings | None = None,
    engine: Engine | None = None,
    drain_timing: DrainTiming = _DRAIN_TIMING,
    max_unsent_bytes: int = framing.MAX_UNSENT_BYTES,
    **values: Any,
) -> AsyncIterator[WorkerServer]:
    """Run a registered worker with the configuration `values`. Assert at the exit that it has no
    streams or blocks."""
    registry = registry or FakeRegistry()
    async with registry.serving() as router:
        engine = engine or fake_engine(f"{role}-instance", timing=timing)
        config = worker_config(role, router=router, **values)
        server = WorkerServer(
            config,
            engine=engine,
            instance_id=f"{role}-instance",
            drain_timing=drain_timing,
            max_unsent_bytes=max_unsent_bytes,
        )
        await server.start()
        try:
            await server.registered()
            yield server
            assert (await server.drains.drain(WAIT_S))[0], server.service.ledger()
        finally:
            await server.stop()


def deltas_of(frame: w.StepFrame) -> list[StreamDelta]:
    """Return the deltas of a frame, by stream id."""
    plain = frame.tokens
    tokens = zip(plain.stream_ids, plain.token_ids, plain.texts, strict=True)
    deltas = [StreamDelta(stream_id, (token,), text) for stream_id, token, text in tokens]
    deltas += map(wire.delta_from_pb, frame.deltas)
    return sorted(deltas, key=lambda delta: delta.stream_id)


class FakeRouter(asyncio.Protocol):
    """A router's end of one session. State: the deltas of each stream, the renewals of the lease,
    which it acknowledges unless it `is_mute`, and the end of the session: the error that closed it,
    or None."""

    def __init__(
        self,
        server: WorkerServer | w.WorkerInfo,
        router_id: str = "router-1",
        *,
        is_mute: bool = False,
    ) -> None:
        info = server.info if isinstance(server, WorkerServer) else server
        self.address, self.instance_id, self.session_address = (
            info.address,
            info.instance_id,
            info.session_address,
        )
        self.router_id = router_id
        self.frames: list[w.StepFrame] = []
        self.deltas: dict[int, list[StreamDelta]] = {}
        self.renewals: list[w.RenewRequest] = []
        self._is_mute = is_mute
        self.ended: asyncio.Future[ErrorInfo | None]
        self._parser = framing.FrameParser(w.StepFrame)
        self._changed = asyncio.Event()

    async def __aenter__(self) -> FakeRouter:
        await self.open()
        await self.hello(self.instance_id)
        await self.until(lambda: self.frames or self.ended.done())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self._channel = rpc.open_channel(self.address)
        host, _, port = self.session_address.rpartition(":")
        self.transport, _ = await loop.create_connection(lambda: self, host, int(port))

    async def close(self) -> None:
        self.transport.abort()
        await self.ended
        await self._channel.close()

    def data_received(self, data: bytes) -> None:
        for frame in self._parser.feed(data):
            self.frames.append(frame)
            for delta in deltas_of(frame):
                self.deltas.setdefault(delta.stream_id, []).append(delta)
            if frame.HasField("renewal"):
                self.renewals.append(frame.renewal)
                if not self._is_mute:
                    renewed = w.RenewResponse(lease_s=3000.0, number=frame.renewal.number)
                    self.transport.write(framing.pack(w.Command(renewed=renewed)))
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        error = self.frames[-1].closed if self.frames else None
        self.ended.set_result(wire.error_from_pb(error) if error and error.code else None)
        self._changed.set()

    async def hello(self, instance_id: str) -> None:
        await self.send(w.Command(hello=w.Hello(router_id=self.router_id, instance_id=instance_id)))

    async def send(self, command: w.Command) -> None:
        self.transport.write(framing.pack(command))

    async def submit(
        self,
        stream_id: int,
        sampling: SamplingParams = PLAIN,
        *,
        tokens: Sequence[int] = (20, 21, 22),
        **values: Any,
    ) -> None:
        if not values.keys() & {"prefill", "decode", "aggregated"}:
            values["aggregated"] = w.AggregatedPhase()
        submit = w.Submit(
            stream_id=stream_id,
            request_id=f"request-{stream_id}",
            prompt_token_ids=tokens,
            sampling=wire.sampling_to_pb(sampling),
            **values,
        )
        await self.send(w.Command(submit=submit))

    async def begin(self, stream_id: int) -> None:
        """Submit a long request and wait for its first token."""
        await self.submit(stream_id, LONG)
        await self.until(lambda: self.deltas.get(stream_id))

    async def render(self, request: w.RenderRequest) -> w.RenderResponse:
        return await WorkerStub(self._channel).Render(request)

    async def cancel(self, stream_id: int) -> None:
        await self.send(w.Command(cancel=w.Cancel(stream_id=stream_id)))

    async def until(self, what: Any) -> None:
        """Wait until `what()` is true; it is checked after each frame."""
        async with asyncio.timeout(WAIT_S):
            while not what():
                self._changed.clear()
                await self._changed.wait()

    async def finish(self, stream_id: int) -> list[StreamDelta]:
        """Wait for the end of a stream and return all its deltas."""
        deltas = self.deltas.setdefault(stream_id, [])
        await self.until(lambda: deltas and deltas[-1].finish_reason is not None)
        return deltas

    async def status(self) -> w.WorkerStatus:
        return await WorkerStub(self._channel).GetStatus(w.GetStatusRequest(), timeout=WAIT_S)

    async def drain(self, timeout_s: float) -> w.DrainResponse:
        request = w.DrainRequest(timeout_s=timeout_s)
        return await WorkerStub(self._channel).Drain(request, timeout=WAIT_S)

    async def until_open(self, streams: int) -> None:
        """Wait until the worker reports this many open streams."""
        async with asyncio.timeout(WAIT_S):
            while (await self.status()).open_streams != streams:
                pass

    async def until_empty(self) -> None:
        """Wait until the worker reports no open stream and no pinned block."""
        async with asyncio.timeout(WAIT_S):
            while True:
                status = await self.status()
                if not status.open_streams and wire.ledger_from_pb(status.ledger).is_empty:
                    return


def error_of(deltas: list[StreamDelta]) -> tuple[str, str]:
    """Return code and field of the error that ended a stream."""
    assert deltas[-1].error is not None, deltas
    return deltas[-1].error.code, deltas[-1].error.field


def token_ids(deltas: list[StreamDelta]) -> list[int]:
    return [x for d in deltas for x in d.token_ids]
