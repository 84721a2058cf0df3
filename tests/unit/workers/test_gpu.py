# ruff: noqa: N802, N815 - NVML has these names
"""GPU health from NVML, and a worker whose GPU is not healthy."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.process.gpus import gpu_environment, visible, visible_devices
from pdserve.v1 import worker_pb2 as w
from tests.support.cluster import Cluster
from tests.support.fake_router import running_worker
from tests.support.timeouts import WAIT_S, wait_until
from workers.metering.gpu_health import Gpus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


TIMEOUT, NOT_SUPPORTED, LOST = 10, 3, 15
HANDLES = {0: "first", 1: "second"}  # as NVML has them, not numbers


class Nvml:
    """The part of pynvml that is used: two cards, of which the second lacks most figures."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = LOST
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_CLOCK_SM = 1
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 128
    nvmlClocksEventReasonSwThermalSlowdown = 32
    nvmlClocksEventReasonHwThermalSlowdown = 64

    def __init__(self) -> None:
        self.temperature_c, self.ecc, self.remap_failed = 40, 7, 0
        self.lost: set[str] = set()
        self.xids: list[tuple[str, int]] = []
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(HANDLES)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return HANDLES[index]

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return next(index for index, known in HANDLES.items() if known == handle)

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"GPU-{handle}"

    def nvmlEventSetCreate(self) -> list[str]:
        return []

    def nvmlEventSetFree(self, events: list[str]) -> None:
        events.clear()

    def nvmlDeviceRegisterEvents(self, handle: str, _type: int, events: list[str]) -> None:
        events.append(handle)

    def nvmlEventSetWait_v2(self, events: list[str], _timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise NVMLError(TIMEOUT)
        handle, xid = self.xids.pop(0)
        assert handle in events
        return SimpleNamespace(device=handle, eventData=xid)

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        if handle in self.lost:
            raise NVMLError(LOST)
        return handle.encode()

    def nvmlDeviceGetTemperature(self, _handle: str, _sensor: int) -> int:
        return self.temperature_c

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return all other figures, for the first card only."""
        figures = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=1 << 30, total=1 << 36),
            "nvmlDeviceGetTotalEccErrors": self.ecc,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, self.remap_failed),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90),
            "nvmlDeviceGetPowerUsage": 250_000,
            "nvmlDeviceGetTotalEnergyConsumption": 5_000,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 4 | 64,
        }

        def read(handle: str, *_: object) -> object:
            if handle == "second":
                raise NVMLError(NOT_SUPPORTED)
            return figures[name]

        return read


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


@asynccontextmanager
async def watching(report: Callable[[str], None], cards: int = len(HANDLES)) -> AsyncIterator[Gpus]:
    """Watch the GPUs. Yield after the first look."""
    gpus = Gpus()
    watch = asyncio.create_task(gpus.watch(cards, report, look_s=0.001))
    await wait_until(lambda: gpus.latest)
    async with asyncio.timeout(WAIT_S):
        yield gpus
    watch.cancel()
    await asyncio.wait({watch})


async def test_each_gpu_is_reported_with_the_figures_it_has(nvml: Nvml) -> None:
    async with watching(lambda _: None) as gpus:
        first, second = gpus.latest
        shown = {
            (sample.name, *sample.labels.values()): sample.value
            for metric in gpus.collect()
            for sample in metric.samples
        }
    assert not nvml.is_open
    assert first == w.GpuHealth(
        index=0,
        name="first",
        temperature_c=40,
        memory_used_bytes=1 << 30,
        memory_total_bytes=1 << 36,
        ecc_errors=7,
        utilization_percent=90,
        power_w=250,
        energy_j=5,
        clock_mhz=1980,
        throttled_by="power, heat (hardware)",
    )
    assert second == w.GpuHealth(index=1, name="second", temperature_c=40)
    assert shown["pdserve_gpu_power_watts", "0"] == 250
    assert shown["pdserve_gpu_clock_hertz", "0"] == 1.98e9
    assert shown["pdserve_gpu_energy_joules_total", "0"] == 5
    assert shown["pdserve_gpu_throttled", "0", "power, heat (hardware)"] == 1
    assert shown["pdserve_gpu_faulty", "1", ""] == 0


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
def test_visible_devices_end_at_the_first_invalid_entry(
    value: str | None, entries: tuple[str, ...] | None
) -> None:
    assert visible_devices(value) == entries


def test_a_process_gets_its_gpus_by_their_nvml_indices() -> None:
    assert gpu_environment(()) == {}
    assert gpu_environment((2, 0)) == {
        "CUDA_VISIBLE_DEVICES": "2,0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_slices_of_a_gpu_are_given_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml:
        def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
            return f"handle of {name}"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a, MIG-b")
    assert dict(visible(Nvml())) == {0: "handle of MIG-a", 1: "handle of MIG-b"}
    assert gpu_environment((1,)) == {"CUDA_VISIBLE_DEVICES": "MIG-b"}
    with pytest.raises(ConfigError, match="2 slices, and none 2"):
        gpu_environment((2,))


@pytest.mark.parametrize(
    ("changes", "xids", "fault"),
    [
        ({"ecc": 3}, [94], ""),  # contained: what used the memory has ended
        ({"temperature_c": 95}, [], ""),
        ({"temperature_c": 96}, [], "GPU 0 is at 96 degrees"),
        ({"remap_failed": 1}, [], "GPU 0 has memory errors that it could not remap"),
        ({}, [13, 95, 31], "GPU 0 must be reset: Xid 95"),
        ({"lost": {"first"}}, [], "GPU 0 is lost: it does not answer"),
    ],
)
async def test_a_gpu_is_well_up_to_the_limits(
    nvml: Nvml, changes: dict[str, Any], xids: list[int], fault: str
) -> None:
    vars(nvml).update(changes)
    nvml.xids = [("first", xid) for xid in xids]
    async with watching(lambda _: None) as gpus:
        assert gpus.latest[0].fault == fault


async def test_a_card_that_the_engine_does_not_take_is_not_watched(nvml: Nvml) -> None:
    nvml.lost = {"second"}
    async with watching(lambda _: None, cards=1) as gpus:
        assert [gpu.index for gpu in gpus.latest] == [0]


async def test_cards_are_watched_where_nvml_has_no_events(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> list[str]:
        raise NVMLError(NOT_SUPPORTED)

    monkeypatch.setattr(nvml, "nvmlEventSetCreate", refused)
    nvml.temperature_c = 96
    async with watching(lambda _: None) as gpus:
        assert gpus.latest[0].fault == "GPU 0 is at 96 degrees"


async def test_a_worker_is_out_while_its_gpu_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch continues when a GPU is lost."""
    nvml = Nvml()
    nvml.lost = {"second"}
    async with Cluster(prefill=1, decode=2) as cluster:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)  # for the watch below alone
        async with watching(cluster.workers["decode-0"].readiness.set_unhealthy):
            await cluster.until_state("decode-0", "suspended")
            unhealthy = (await cluster.entries())["decode-0"].unhealthy
            assert unhealthy == "GPU 1 is lost: it does not answer"
            answer = await cluster.ask([20, 21, 22])
            assert answer.receipt is not None
            assert answer.receipt.decode_worker == "decode-1"
            nvml.lost = set()
            await cluster.until_state("decode-0", "ready")


async def test_without_a_gpu_the_watch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    async with asyncio.timeout(WAIT_S):
        await Gpus().watch(1, lambda _: None)


async def test_a_worker_reports_its_gpus() -> None:
    async with running_worker(gpus=(0, 2)) as server:
        assert server.info.gpus == (0, 2)
