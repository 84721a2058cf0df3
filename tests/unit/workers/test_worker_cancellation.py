"""Whoever goes away, however: the worker ends with no stream, no block and no task."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from tests.patience import WAIT_S
from tests.unit.workers.router_side import (
    LONG,
    PLAIN,
    FakeRegistry,
    RouterSide,
    a_worker,
    engine_of,
    token_ids,
)
from workers.fake.settings import FakeFaults, FakeSettings

if TYPE_CHECKING:
    from workers.server import WorkerServer

SLOW = FakeSettings(step_s=0.005)


def decode_phase(source: WorkerServer, transfer_id: str = "t") -> w.DecodePhase:
    assert source.info.kv is not None
    return w.DecodePhase(
        transfer_id=transfer_id,
        producer_addresses=source.info.kv.addresses,
        producer_instance_id=source.instance_id,
    )


async def test_a_cancelled_stream_says_no_more_and_the_others_go_on() -> None:
    async with a_worker(timing=SLOW) as server, RouterSide(server) as router:
        await router.submit(1, LONG)
        await router.submit(2, replace(PLAIN, max_tokens=30))
        await router.until(lambda: router.deltas.get(1))
        await router.cancel(1)
        await router.cancel(1)
        await router.cancel(99)
        assert len(token_ids(await router.finish(2))) == 30
        assert router.deltas[1][-1].finish_reason is None
        await router.until_empty()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_the_end_of_a_stream_cancels_all_that_came_over_it(how: str) -> None:
    async with a_worker(timing=SLOW) as server, RouterSide(server, "other") as other:
        router = RouterSide(server)
        await router.open()
        await router.hello(server.instance_id)
        for stream_id in range(5):
            await router.submit(stream_id, LONG)
        await router.until(lambda: len(router.deltas) == 5)
        await other.submit(1, replace(PLAIN, max_tokens=20))
        if how == "close":
            router.transport.close()
        else:
            router.transport.abort()
        await other.until_empty()
        assert len(token_ids(await other.finish(1))) == 20
        await router.close()


async def test_a_decode_that_is_cancelled_in_mid_transfer_frees_both_sides() -> None:
    async with (
        a_worker(Role.PREFILL) as prefill,
        a_worker(Role.DECODE) as decode,
        RouterSide(prefill) as to_prefill,
        RouterSide(decode) as to_decode,
    ):
        engine_of(prefill).faults = FakeFaults(delay_transfer_s=1000.0)
        await to_decode.submit(1, decode=decode_phase(prefill))
        await to_prefill.submit(1, prefill=w.PrefillPhase(transfer_id="t"))
        await to_prefill.finish(1)
        async with asyncio.timeout(WAIT_S):
            while not (await to_prefill.status()).ledger.in_flight_blocks:
                pass
        await to_decode.cancel(1)
        await to_decode.until_empty()
        await to_prefill.until_empty()


async def test_a_worker_that_stops_with_work_open_ends_the_streams() -> None:
    registry = FakeRegistry()
    async with a_worker(registry=registry, timing=SLOW) as server:
        router = RouterSide(server)
        await router.open()
        await router.hello(server.instance_id)
        await router.submit(1, LONG)
        await router.until(lambda: router.deltas.get(1))
        await server.stop()
        await router.ended
        await router.close()
        assert registry.left == [server.info.worker_id]
        assert server.service.open_streams == 0


async def test_a_storm_of_cancels_leaves_nothing() -> None:
    async with a_worker(timing=SLOW) as server, RouterSide(server) as router:
        for stream_id in range(200):
            await router.submit(stream_id, LONG)
            if stream_id % 2:
                await router.cancel(stream_id - 1)
        for stream_id in range(200):
            await router.cancel(stream_id)
        await router.until_empty()
        await router.submit(1000)
        assert len(token_ids(await router.finish(1000))) == PLAIN.max_tokens
