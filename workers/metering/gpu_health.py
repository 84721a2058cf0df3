"""Health of the GPUs of this process, from NVML (nvidia-ml-py). Without a driver there are no
GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import islice
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import Collector

from pdserve.observe.metrics import family
from pdserve.process.gpus import open_nvml, visible
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

MAX_TEMPERATURE_C = 95
_LOOK_S = 10.0
# Xid errors after which a GPU gives wrong results until it is reset (NVIDIA's Xid catalogue):
# its microcontroller halted (62), a row could not be remapped (64), NVLink failed (74), it left the
# bus (79), a memory error was not contained (95), its system processor does not answer (119, 120).
_FATAL_XIDS = frozenset({62, 64, 74, 79, 95, 119, 120})
_THROTTLES = {
    "power": "nvmlClocksEventReasonSwPowerCap",
    "power brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "heat": "nvmlClocksEventReasonSwThermalSlowdown",
    "heat (hardware)": "nvmlClocksEventReasonHwThermalSlowdown",
}
# Metric name without "pdserve_gpu_", field, factor.
_FIGURES = (
    ("temperature_celsius", "temperature_c", 1.0),
    ("memory_used_bytes", "memory_used_bytes", 1.0),
    ("memory_bytes", "memory_total_bytes", 1.0),
    ("utilization_ratio", "utilization_percent", 0.01),
    ("power_watts", "power_w", 1.0),
    ("energy_joules", "energy_j", 1.0),
    ("clock_hertz", "clock_mhz", 1e6),
    ("ecc_errors", "ecc_errors", 1.0),
    ("xid", "xid", 1.0),
)


class Gpus(Collector):
    """Metrics of the GPUs. `latest` has the last readings, one entry per GPU."""

    def __init__(self) -> None:
        self.latest: list[w.GpuHealth] = []

    async def watch(
        self, gpus: int, report: Callable[[str], None], *, look_s: float = _LOOK_S
    ) -> None:
        """Call `report` with a GPU's fault, and with "" when the fault is gone, until cancelled.

        Watches the first `gpus` GPUs visible to this process, which its engine uses. Returns at
        once if there are none.
        """
        reported = ""
        with open_nvml() as nvml:
            handles = _handles(nvml, gpus)
            if not handles:
                return
            with _xid_events(nvml, handles) as events:
                xids: dict[int, int] = {}
                while True:
                    # In a thread, because NVML can be slow.
                    self.latest = await asyncio.to_thread(_look, nvml, handles, events, xids)
                    fault = next((gpu.fault for gpu in self.latest if gpu.fault), "")
                    if fault != reported:
                        logger.warning("%s", fault or "the GPUs are healthy again")
                        reported = fault
                        report(fault)
                    await asyncio.sleep(look_s)

    def collect(self) -> Iterator[Metric]:
        for name, field, factor in _FIGURES:
            rows = [([str(gpu.index)], getattr(gpu, field) * factor) for gpu in self.latest]
            yield family(f"gpu_{name}", rows)
        for name, field in (("throttled", "throttled_by"), ("faulty", "fault")):
            why = [(str(gpu.index), getattr(gpu, field)) for gpu in self.latest]
            yield family(f"gpu_{name}", [(labels, bool(labels[1])) for labels in why])


Handles = dict[int, Any]


def _handles(nvml: Any, count: int) -> Handles:
    if nvml is None:
        return {}
    try:
        return dict(islice(visible(nvml), count))
    except nvml.NVMLError as error:
        logger.warning("reading GPUs failed: %s", error)
        return {}


@contextlib.contextmanager
def _xid_events(nvml: Any, handles: Handles) -> Iterator[Any]:
    """Yield the NVML event set that receives Xid errors, or None if events are not supported."""
    try:
        events = nvml.nvmlEventSetCreate()
    except nvml.NVMLError:
        yield None
        return
    try:
        for handle in handles.values():
            with contextlib.suppress(nvml.NVMLError):  # not supported under some virtualisation
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        yield events
    finally:
        nvml.nvmlEventSetFree(events)


def _look(nvml: Any, handles: Handles, events: Any, xids: dict[int, int]) -> list[w.GpuHealth]:
    """Read each GPU. `xids` keeps each GPU's last Xid error. Never raises."""
    with contextlib.suppress(nvml.NVMLError):  # NVMLError_Timeout: no further event
        while events is not None:
            event = nvml.nvmlEventSetWait_v2(events, 0)
            index = nvml.nvmlDeviceGetIndex(event.device)
            # Keep a fatal error: it lasts until the GPU is reset, which ends this process.
            if xids.get(index) not in _FATAL_XIDS:
                xids[index] = int(event.eventData)
    return [_read(nvml, index, handle, xids.get(index, 0)) for index, handle in handles.items()]


def _read(nvml: Any, index: int, handle: Any, xid: int) -> w.GpuHealth:
    health = w.GpuHealth(index=index, xid=xid)
    lost = remapping_failed = False

    @contextlib.contextmanager
    def if_known() -> Iterator[None]:
        """Skip a reading that some cards, and some virtualisation, do not support."""
        try:
            yield
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                raise

    try:
        with if_known():
            name = nvml.nvmlDeviceGetName(handle)
            health.name = name.decode() if isinstance(name, bytes) else name
        with if_known():
            health.temperature_c = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        with if_known():
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            health.memory_used_bytes, health.memory_total_bytes = memory.used, memory.total
        with if_known():
            health.ecc_errors = nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        with if_known():
            remapping_failed = bool(nvml.nvmlDeviceGetRemappedRows(handle)[3])
        with if_known():
            health.utilization_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        with if_known():
            health.power_w = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        with if_known():
            health.energy_j = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        with if_known():
            health.clock_mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        with if_known():
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            why = [text for text, bit in _THROTTLES.items() if reasons & getattr(nvml, bit)]
            health.throttled_by = ", ".join(why)
    except nvml.NVMLError:
        lost = True
    health.fault = _fault(health, lost=lost, remapping_failed=remapping_failed)
    return health


def _fault(gpu: w.GpuHealth, *, lost: bool, remapping_failed: bool) -> str:
    """Return the fault of a GPU, or "". Contained memory errors are not a fault, because they ended
    the work that used the memory, and the GPU does not use that memory again."""
    if lost:
        return f"GPU {gpu.index} is lost: it does not answer"
    if gpu.xid in _FATAL_XIDS:
        return f"GPU {gpu.index} must be reset: Xid {gpu.xid}"
    if remapping_failed:
        return f"GPU {gpu.index} has memory errors that it could not remap"
    if gpu.temperature_c > MAX_TEMPERATURE_C:
        return f"GPU {gpu.index} is at {gpu.temperature_c} degrees"
    return ""
