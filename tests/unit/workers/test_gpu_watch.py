"""GPUs that are not well take their worker out of service, judged by given figures."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.v1 import worker_pb2 as w
from tests.cluster import Cluster
from tests.patience import WAIT_S
from tests.unit.workers.router_side import a_worker
from workers.gpu_watch import GpuLimits, fault_of, watch_gpus

WELL = w.GpuHealth(index=0, temperature_c=60, memory_used_bytes=60, memory_total_bytes=80)
LIMITS = GpuLimits(max_temperature_c=90, max_ecc_errors=2)


@pytest.mark.parametrize(
    ("figures", "fault"),
    [
        ({}, ""),
        ({"temperature_c": 90}, ""),
        ({"temperature_c": 91}, "GPU 1 is at 91 degrees"),
        ({"ecc_errors": 2}, ""),
        ({"ecc_errors": 3}, "GPU 1 has 3 uncorrected memory errors"),
    ],
)
def test_a_gpu_is_well_up_to_the_limits(figures: dict[str, int], fault: str) -> None:
    assert fault_of([WELL, w.GpuHealth(index=1, **figures)], LIMITS) == fault


async def test_a_worker_is_out_while_its_gpu_is_not_well() -> None:
    """The router knows at once, and gives it nothing."""
    gpus = [w.GpuHealth(index=0, temperature_c=99)]
    async with Cluster(prefill=1, decode=2) as cluster:
        service = cluster.workers["decode-0"].service
        watch = asyncio.create_task(
            watch_gpus(service.set_unhealthy, lambda: gpus, limits=LIMITS, look_s=0.001)
        )
        await cluster.until_state("decode-0", "suspended")
        assert (await cluster.entries())["decode-0"].unhealthy == "GPU 0 is at 99 degrees"
        answer = await cluster.ask([20, 21, 22])
        assert answer.receipt is not None
        assert answer.receipt.decode_worker == "decode-1"
        gpus[:] = [WELL]
        await cluster.until_state("decode-0", "ready")
        watch.cancel()


async def test_without_a_gpu_the_watch_ends() -> None:
    async with asyncio.timeout(WAIT_S):
        await watch_gpus(lambda _: None, list)


async def test_a_worker_says_which_gpus_are_its_own() -> None:
    async with a_worker(gpus=(0, 2)) as server:
        assert server.info.settings["gpus"] == "0,2"
    async with a_worker() as server:
        assert "gpus" not in server.info.settings
