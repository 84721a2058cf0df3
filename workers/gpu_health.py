"""Health of this process's GPUs from NVML (nvidia-ml-py); nothing where there is no GPU."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from pdserve.local.gpus import open_nvml, visible
from pdserve.v1 import worker_pb2 as w

logger = logging.getLogger(__name__)


def gpu_health() -> list[w.GpuHealth]:
    """One entry for each GPU that this process may use; empty without a driver. Never raises."""
    with open_nvml() as nvml:
        if nvml is None:
            return []
        try:
            return [_read(nvml, index, handle) for index, handle in visible(nvml)]
        except nvml.NVMLError as error:
            logger.warning("reading GPU health failed: %s", error)
            return []


def _read(nvml: Any, index: int, handle: Any) -> w.GpuHealth:
    health = w.GpuHealth(index=index, name=_text(nvml.nvmlDeviceGetName(handle)))
    # Each of these is missing on some card or under some virtualisation.
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


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
