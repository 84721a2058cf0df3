"""GPU health from NVML, and a worker whose GPU is not healthy."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest

from pdserve.local.gpus import gpu_environment, visible_devices
from pdserve.v1 import worker_pb2 as w
from tests.cluster import Cluster
from tests.patience import WAIT_S
from tests.unit.workers.router_side import a_worker
from workers.gpu import fault_of, gpu_health, watch_gpus

WELL = w.GpuHealth(index=0, temperature_c=60, memory_used_bytes=60, memory_total_bytes=80)


class NVMLError(Exception):
    pass


def no_ecc(handle: int, _kind: int, _counter: int) -> int:
    if handle == 1:
        raise NVMLError("not supported")
    return 7


# The part of pynvml that is used: two cards, of which the second knows nothing of ECC.
NVML = SimpleNamespace(
    NVMLError=NVMLError,
    NVML_TEMPERATURE_GPU=0,
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
    NVML_VOLATILE_ECC=0,
    nvmlInit=lambda: None,
    nvmlShutdown=lambda: None,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUUID=lambda handle: f"GPU-{'ab'[handle]}123",
    nvmlDeviceGetName=lambda handle: ["Card A", b"Card B"][handle],
    nvmlDeviceGetTemperature=lambda handle, _sensor: 40 + handle,
    nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=1 << 30, total=1 << 36),
    nvmlDeviceGetTotalEccErrors=no_ecc,
    nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=90),
)


def test_each_card_is_told_with_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    first, second = gpu_health()
    assert (first.index, first.name, first.temperature_c) == (0, "Card A", 40)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (1 << 30, 1 << 36)
    assert (first.ecc_errors, first.utilization_percent) == (7, 90)
    assert (second.name, second.ecc_errors, second.utilization_percent) == ("Card B", 0, 90)


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        (None, None),
        ("", ()),
        ("0, 2", ("0", "2")),
        ("0,-1,2", ("0",)),
        ("GPU-1,MIG-2", ("GPU-1", "MIG-2")),
    ],
)
def test_visible_devices_end_at_the_first_that_is_none(
    value: str | None, entries: tuple[str, ...] | None
) -> None:
    assert visible_devices(value) == entries


def test_a_process_is_told_its_gpus_by_the_indices_that_nvml_has() -> None:
    assert gpu_environment(()) == {}
    assert gpu_environment((2, 0)) == {
        "CUDA_VISIBLE_DEVICES": "2,0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


@pytest.mark.parametrize(
    ("figures", "fault"),
    [
        ({}, ""),
        ({"temperature_c": 95}, ""),
        ({"temperature_c": 96}, "GPU 1 is at 96 degrees"),
        ({"ecc_errors": 3}, "GPU 1 has 3 uncorrected memory errors"),
    ],
)
def test_a_gpu_is_well_up_to_the_limits(figures: dict[str, int], fault: str) -> None:
    assert fault_of([WELL, w.GpuHealth(index=1, **figures)]) == fault


async def test_a_worker_is_out_while_its_gpu_is_not_well() -> None:
    gpus = [w.GpuHealth(index=0, temperature_c=99)]
    async with Cluster(prefill=1, decode=2) as cluster:
        service = cluster.workers["decode-0"].service
        watch = asyncio.create_task(watch_gpus(service.set_unhealthy, lambda: gpus, look_s=0.001))
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
