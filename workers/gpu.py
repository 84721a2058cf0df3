"""Health of this process's GPUs from NVML (nvidia-ml-py). Without a driver nothing is reported."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from pdserve.local.gpus import open_nvml, visible
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

MAX_TEMPERATURE_C = 95
_LOOK_S = 10.0


def gpu_health() -> list[w.GpuHealth]:
    """Return one entry for each GPU that this process may use. Never raises."""
    with open_nvml() as nvml:
        if nvml is None:
            return []
        try:
            return [_read(nvml, index, handle) for index, handle in visible(nvml)]
        except nvml.NVMLError as error:
            logger.warning("reading GPU health failed: %s", error)
            return []


def _read(nvml: Any, index: int, handle: Any) -> w.GpuHealth:
    name = nvml.nvmlDeviceGetName(handle)
    health = w.GpuHealth(index=index, name=name.decode() if isinstance(name, bytes) else name)
    # Each of these is missing on some cards or under some virtualisation.
    with contextlib.suppress(nvml.NVMLError):
        health.temperature_c = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    with contextlib.suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        health.memory_used_bytes, health.memory_total_bytes = memory.used, memory.total
    with contextlib.suppress(nvml.NVMLError):
        health.ecc_errors = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    with contextlib.suppress(nvml.NVMLError):
        health.utilization_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    return health


def fault_of(gpus: Sequence[w.GpuHealth]) -> str:
    """Return what is wrong with the first unhealthy GPU, or ""."""
    for gpu in gpus:
        if gpu.ecc_errors:
            return f"GPU {gpu.index} has {gpu.ecc_errors} uncorrected memory errors"
        if gpu.temperature_c > MAX_TEMPERATURE_C:
            return f"GPU {gpu.index} is at {gpu.temperature_c} degrees"
    return ""


async def watch_gpus(
    report: Callable[[str], None],
    look: Callable[[], list[w.GpuHealth]] = gpu_health,
    *,
    look_s: float = _LOOK_S,
) -> None:
    """Call `report` with the fault of a GPU, and with "" when it is gone, until cancelled.
    Return at once if there is no GPU."""
    reported = ""
    while gpus := await asyncio.to_thread(look):  # NVML can be slow
        if (fault := fault_of(gpus)) != reported:
            logger.warning("%s", fault or "the GPUs are healthy again")
            reported = fault
            report(fault)
        await asyncio.sleep(look_s)
