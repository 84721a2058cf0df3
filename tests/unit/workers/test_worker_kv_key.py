"""A worker's key: its own at every start, its routers' to know, and nobody else's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.settings import from_extra_config
from pdserve.capability import CapabilityKey
from pdserve.config import KvConfig, WorkerConfig
from pdserve.errors import ConfigError
from pdserve.types import Role
from tests.unit.workers.router_side import FakeRegistry, RouterSide, a_worker
from workers.server import WorkerServer
from workers.vllm_engine import VllmEngine
from workers.vllm_settings import KvSettings


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_its_router_gets_the_key_and_no_status_or_log_has_it(
    role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    registry = FakeRegistry()
    async with a_worker(role, registry=registry) as server, RouterSide(server) as router:
        status = await router.status()
    (secret,) = registry.kv_keys
    assert CapabilityKey(secret) == server.kv_key
    assert secret not in status.SerializeToString()
    assert secret not in registry.registered[0].SerializeToString()
    for shown in (caplog.text, repr(server.info), repr(vars(server)), repr(status)):
        assert secret.hex() not in shown
        assert repr(secret) not in shown


async def test_every_start_has_another_key() -> None:
    registry = FakeRegistry()
    for _ in range(2):
        async with a_worker(Role.PREFILL, registry=registry):
            pass
    assert len(set(registry.kv_keys)) == 2


async def test_a_worker_whose_kv_stays_has_no_key() -> None:
    registry = FakeRegistry()
    async with a_worker(Role.AGGREGATED, registry=registry) as server:
        assert server.kv_key is None
    assert registry.kv_keys == [b""]


NIXL = WorkerConfig(role=Role.PREFILL, kv=KvConfig(connector="nixl", host="::1", lease_s=1.5))


async def test_nixl_asks_for_no_right_so_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engines.find_spec", lambda name: name)
    server = WorkerServer(NIXL)
    assert server.kv_key is None
    engine = server.service._engine
    assert isinstance(engine, VllmEngine)
    kv = engine._settings.kv
    assert kv == KvSettings(server.instance_id, {"kv_lease_duration": 2}, "nixl", "::1")


async def test_nixl_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engines.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        WorkerServer(NIXL)
    assert caught.value.field == "kv.connector"


async def test_the_fake_engine_has_no_nixl() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerServer(replace(NIXL, engine="fake"))
    assert caught.value.field == "kv.connector"


@pytest.mark.parametrize("worker_id", ["p0", ""])
async def test_the_engine_asks_for_capabilities_of_the_key_and_name_that_routers_get(
    worker_id: str,
) -> None:
    server = WorkerServer(WorkerConfig(worker_id=worker_id, role=Role.PREFILL, engine="vllm"))
    engine = server.service._engine
    assert isinstance(engine, VllmEngine)
    assert engine._settings.kv is not None
    settings = from_extra_config(engine._settings.kv.extra)
    assert settings.checks_capabilities
    assert settings.kv_key == server.kv_key
    assert settings.worker_id == server.worker_id != ""
    assert engine._settings.kv.instance_id == server.instance_id
    assert server.kv_key is not None
    assert server.kv_key.reveal().hex() not in repr(engine._settings)
