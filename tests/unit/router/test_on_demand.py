"""Models that may have no worker: who waits for one, for how long, and when to come again."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.config import QueueConfig
from pdserve.errors import Overloaded, Unavailable
from pdserve.types import Adapter, Role
from router.fleet.link_pool import LinkPool
from router.fleet.on_demand import ASKED_LOAD, START_S, OnDemandModels
from router.fleet.registry import Fleet
from tests.support.router_stack import ScriptedWorker
from tests.support.timeouts import WAIT_S

MODEL = ScriptedWorker("a", Role.AGGREGATED).info.model.name


def on_demand(fleet: Fleet, patience_s: float) -> OnDemandModels:
    adapters = {"tuned": Adapter("tuned", "digest", "/path", MODEL)}
    return OnDemandModels(
        (MODEL,), fleet, adapters, QueueConfig(timeout_s=patience_s, max_queued_requests=1)
    )


async def test_a_request_waits_for_the_first_worker_and_the_model_stays_known() -> None:
    worker = ScriptedWorker("a", Role.AGGREGATED)
    fleet = Fleet(lease_s=WAIT_S)
    async with worker.serving(), LinkPool(fleet, router_id="r"):
        models = on_demand(fleet, WAIT_S)
        assert dict(models.loads()) == {MODEL: None}
        assert models.is_missing(MODEL)
        waiting = asyncio.create_task(models.wait_for("", WAIT_S))  # the only model
        await asyncio.sleep(0)
        assert dict(models.loads()) == {MODEL: ASKED_LOAD}
        with pytest.raises(Overloaded, match="1 requests wait") as refused:
            await models.wait_for(MODEL, WAIT_S)
        assert refused.value.retry_after_s == START_S
        fleet.register(worker.info)
        await waiting
        assert not models.is_missing(MODEL)
        assert models.with_missing(fleet.models()).keys() == {MODEL}
        fleet.deregister("a", worker.info.instance_id)
        assert models.is_missing(MODEL)
        assert models.with_missing({}) == {MODEL: worker.info.model}
        ((_, text),) = models.texts()
        assert text.startswith("no worker until it is asked for; a start takes ")


async def test_the_load_of_a_model_is_unknown_until_it_was_served() -> None:
    worker = ScriptedWorker("a", Role.AGGREGATED)
    fleet = Fleet(lease_s=WAIT_S)
    async with worker.serving(), LinkPool(fleet, router_id="r"):
        models = on_demand(fleet, WAIT_S)
        fleet.register(worker.info)
        assert dict(models.loads()) == {MODEL: None}
        while models.is_missing(MODEL):
            assert await fleet.capacity_change(until=fleet.now() + WAIT_S)
        assert dict(models.loads()) == {MODEL: 0.0}
        fleet.deregister("a", worker.info.instance_id)
        assert dict(models.loads()) == {MODEL: 0.0}


async def test_a_request_for_an_adapter_asks_for_its_model() -> None:
    models = on_demand(Fleet(), 0.0)
    with pytest.raises(Unavailable, match=f"model {MODEL} had no worker"):
        await models.wait_for("tuned", WAIT_S)
    assert dict(models.loads()) == {MODEL: ASKED_LOAD}


async def test_no_request_waits_longer_than_its_limit_and_deadline() -> None:
    fleet = Fleet()
    for patience_s, timeout_s in ((0.0, WAIT_S), (WAIT_S, 0.0)):
        with pytest.raises(Unavailable, match="had no worker") as refused:
            await on_demand(fleet, patience_s).wait_for(MODEL, timeout_s)
        assert refused.value.retry_after_s == START_S
    await on_demand(fleet, WAIT_S).wait_for("another", WAIT_S)
