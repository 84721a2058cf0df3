"""A worker as a process: its cores, what it reports, how it stops, how it exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.config import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.net import rpc
from pdserve.types import Role
from tests.support import processes
from tests.support.fake_router import (
    LONG,
    WAIT_S,
    FakeRegistry,
    FakeRouter,
    running_worker,
    worker_config,
)
from workers.main import pin, run_worker, thread_environment
from workers.make_engine import make_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.processes import RunningProcess
    from workers.vllm.start.settings import VllmSettings


@asynccontextmanager
async def a_process(
    router: str, role: Role = Role.AGGREGATED, **values: object
) -> AsyncIterator[RunningProcess]:
    async with processes.worker_process(
        worker_id="w0", role=role, routers=[router], **values
    ) as running:
        yield running


async def test_a_signal_drains_it_leaves_the_router_and_exits_with_0() -> None:
    registry = FakeRegistry()
    async with registry.serving() as router, a_process(router, Role.PREFILL) as child:
        facts = await child.report("ready")
        assert facts["worker_id"] == "w0"
        assert facts["address"] == registry.registered[0].address
        child.process.send_signal(signal.SIGINT)
        assert await child.exit_code() == 0
        assert (registry.left, registry.failures) == (["w0"], [""])


async def test_a_second_signal_ends_the_drain() -> None:
    registry = FakeRegistry()
    slow: dict[str, Any] = {"engine_args": {"step_s": 0.05}, "drain_timeout_s": 10_000.0}
    async with registry.serving() as router, a_process(router, **slow) as child:
        await child.report("ready")
        async with FakeRouter(registry.registered[0]) as client:
            await client.submit(1, LONG)
            await client.until(lambda: client.deltas.get(1))
            child.process.send_signal(signal.SIGTERM)
            await registry.until(lambda: any(x.draining for x in registry.renewals))
            assert child.process.returncode is None
            child.process.send_signal(signal.SIGTERM)
            assert await child.exit_code() == 0
    assert registry.left == ["w0"]


async def test_a_refused_registration_exits_with_1_and_the_reason() -> None:
    registry = FakeRegistry(refusal="another model is served here")
    async with registry.serving() as router, a_process(router) as child:
        assert "another model is served here" in await child.report("failed")
        assert await child.exit_code() == 1


async def test_a_worker_with_a_dead_engine_exits_with_1_and_reports_it() -> None:
    registry = FakeRegistry()
    async with (
        registry.serving() as router,
        a_process(router, engine_args={"crash_at_step": 1}) as child,
    ):
        await child.report("ready")
        async with FakeRouter(registry.registered[0]) as client:
            await client.submit(1)
            assert (await client.finish(1))[-1].error is not None
            failure = await child.report("failed")
            assert "the engine died" in failure
            assert await child.exit_code() == 1
    assert registry.failures == [failure]


async def test_an_engine_that_cannot_compute_never_registers_and_exits_with_the_reason() -> None:
    registry = FakeRegistry()
    async with (
        registry.serving() as router,
        a_process(router, engine_args={"cannot_compute": True}) as child,
    ):
        assert "the engine cannot compute" in await child.report("failed")
        assert await child.exit_code() == 1
    assert not registry.registered


async def test_a_stop_while_it_waits_for_its_router_exits_with_0() -> None:
    async with FakeRegistry().serving() as router:
        pass
    async with a_process(router) as child:
        assert await child.report("doing")
        while await child.report("doing") != "registering":
            pass
        child.process.send_signal(signal.SIGTERM)
        assert await child.exit_code() == 0


def test_a_configuration_that_cannot_be_served_is_refused_by_name() -> None:
    config = worker_config(router="127.0.0.1:1", engine_args={"nonsense": 1})
    with pytest.raises(ConfigError) as caught:
        run_worker(config)
    assert caught.value.field == "engine_args.nonsense"


async def test_health_is_serving_until_the_drain() -> None:
    async with running_worker() as server, rpc.open_channel(server.info.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "pdserve.v1.Worker"):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert (await server.readiness.drain(WAIT_S))[0]
        reply = await stub.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_names_the_worker_service() -> None:
    async with running_worker() as server, rpc.open_channel(server.info.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast("Any", channel))
        call = stub.ServerReflectionInfo(iter([request]))
        reply = await anext(aiter(call))
        names = [x.name for x in reply.list_services_response.service]
        assert "pdserve.v1.Worker" in names
        call.cancel()


def test_every_thread_pool_has_one_thread_a_core() -> None:
    assert thread_environment(()) == {}
    environment = thread_environment((0, 1, 5))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert set(environment.values()) == {"3"}


@pytest.mark.parametrize(("thread_pools", "threads"), [(True, "1"), (False, "None")])
def test_a_pinned_process_and_its_children_have_those_cores(
    *, thread_pools: bool, threads: str
) -> None:
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, subprocess, sys; from workers.main import pin; "
        f"pin([int(sys.argv[1])], thread_pools={thread_pools});"
        "ask = 'import os; print(os.sched_getaffinity(0), os.environ.get(\"OMP_NUM_THREADS\"))';"
        "subprocess.run([sys.executable, '-c', ask], check=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(core)],
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == f"{{{core}}} {threads}"


def test_threads_of_an_engine_on_a_gpu_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    seen: list[VllmSettings] = []
    monkeypatch.setattr("workers.vllm.engine.VllmEngine", lambda settings, _: seen.append(settings))
    for gpus in ((), (0,)):
        make_engine(WorkerConfig(model=str(tmp_path), cores=(2, 3), gpus=gpus), "engine")
    assert [settings.threads for settings in seen] == [2, None]


def test_cores_that_are_not_ours_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in thread_environment([0]):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError) as caught:
        pin([1 << 12])
    assert caught.value.field == "cores"
