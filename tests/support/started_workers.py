"""How the workers of a test's cluster are started: each with a fake engine in this process, or each
with vLLM in its own."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from pdserve.config import WorkerConfig, parse
from tests.support.processes import worker_process
from tests.support.timeouts import START_S, WAIT_S
from workers.control.worker_drain import DrainTiming
from workers.fake.engine import FakeEngine
from workers.make_engine import make_engine
from workers.server import WorkerServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

# Longer than any pause of the machine. No test waits for the end of a lease.
LEASE_S = 60.0
_DRAIN_TIMING = DrainTiming()
_INSTANCES = itertools.count(1)


class StartedWorker(Protocol):
    """What a test does to a worker."""

    def freeze(self) -> None:
        """Let it do nothing until `thaw`."""

    def thaw(self) -> None: ...

    async def kill(self) -> None:
        """End it without a drain: every stream and transfer is cut."""

    async def end(self) -> int:
        """End it as a SIGTERM does. Return its exit code."""


@dataclass(frozen=True, slots=True)
class Engine:
    """`start` starts a worker with the configuration it gets, and ends it at the exit. `worker` and
    `engine_args` are the configuration of every worker, `start_s` limits its start."""

    start: Callable[[dict[str, Any]], AbstractAsyncContextManager[StartedWorker]]
    worker: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    start_s: float = WAIT_S


@dataclass(frozen=True, slots=True)
class FakeWorker:
    """A worker with a fake engine, in this process. Frozen, its engine makes no step."""

    server: WorkerServer
    engine: FakeEngine

    def freeze(self) -> None:
        self.engine.faults = structs.replace(self.engine.faults, stalled=True)

    def thaw(self) -> None:
        self.engine.faults = structs.replace(self.engine.faults, stalled=False)

    async def kill(self) -> None:
        await self.server.service.close()
        await self.server.stop()

    async def end(self) -> int:
        await self.server.stop()
        return 0


@asynccontextmanager
async def _fake_worker(
    values: dict[str, Any], *, drain_timing: DrainTiming
) -> AsyncIterator[FakeWorker]:
    config = parse(WorkerConfig, {"engine": "fake", **values})
    instance_id = f"{config.worker_id}-instance-{next(_INSTANCES)}"
    engine = make_engine(config, instance_id)
    assert isinstance(engine, FakeEngine)
    server = WorkerServer(config, engine=engine, instance_id=instance_id, drain_timing=drain_timing)
    await server.start()
    try:
        yield FakeWorker(server, engine)
    finally:
        await server.stop()


@asynccontextmanager
async def _vllm_worker(values: dict[str, Any]) -> AsyncIterator[StartedWorker]:
    async with worker_process(engine="vllm", **values) as running:
        yield running


def fake(drain_timing: DrainTiming = _DRAIN_TIMING) -> Engine:
    """Return a fake engine (workers/fake/settings.py)."""
    # Steps without any duration would starve everything else on this one event loop.
    return Engine(
        partial(_fake_worker, drain_timing=drain_timing),
        worker={"kv": {"hold_s": LEASE_S}},
        engine_args={"step_s": 0.001},
    )


def vllm(model: Path) -> Engine:
    """Return vLLM with a model that is served as `tiny`, a small KV cache, and float32, so that
    rounding does not change which token wins."""
    args = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 256}
    worker = {"model": str(model), "model_names": ("tiny",)}
    return Engine(_vllm_worker, worker=worker, engine_args=args, start_s=START_S)


FAKE = fake()
