"""A worker's role as a state machine, and at one worker that nobody settles."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import InvalidRequest, Unavailable
from pdserve.types import Role
from tests.cluster import Cluster
from tests.unit.workers.router_side import fake_engine
from workers import server
from workers.service import RoleState, WorkerService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PREFILL, DECODE = Role.PREFILL, Role.DECODE


@pytest.fixture
async def service() -> AsyncIterator[WorkerService]:
    service = WorkerService(fake_engine("e"), PREFILL, "e")
    await service.start()
    yield service
    await service.close()


async def test_a_role_changes_when_the_worker_is_empty_and_stays_when_it_is_kept(
    service: WorkerService,
) -> None:
    assert await service.change_role(DECODE, 1.0) == 0
    assert (service.role, service.role_state) == (DECODE, RoleState.PROVING)
    assert service.is_draining
    assert service.settle_role(keep=True)
    assert (service.role, service.role_state) == (DECODE, RoleState.SERVING)


async def test_a_role_that_is_not_kept_leaves_the_former_one(service: WorkerService) -> None:
    await service.change_role(DECODE, 1.0)
    service.settle_role(keep=False)
    assert (service.role, service.role_state) == (PREFILL, RoleState.SERVING)
    assert not service.settle_role(keep=True)


async def test_a_change_that_cannot_be_is_refused_and_changes_nothing(
    service: WorkerService,
) -> None:
    for role in (PREFILL, Role.AGGREGATED):
        with pytest.raises(InvalidRequest):
            await service.change_role(role, 1.0)
    with pytest.raises(InvalidRequest):
        await WorkerService(fake_engine("e"), Role.AGGREGATED, "e").change_role(DECODE, 1.0)
    changing = asyncio.create_task(service.change_role(DECODE, 1.0))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await service.change_role(DECODE, 1.0)
    await changing


async def test_a_role_that_nobody_settles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SETTLE_S", 0.05)
    async with Cluster(prefill=2, decode=1) as cluster:
        worker = cluster.workers["prefill-0"]
        await worker.set_role(DECODE, 1.0)
        await cluster.until(lambda: worker.service.role_state is RoleState.SERVING)
        await cluster.until_state("prefill-0", "ready")
        assert worker.info.role is PREFILL
        assert not worker.settle_role(keep=True)
