"""Health of this process's GPUs from NVML (nvidia-ml-py); nothing where there is no GPU."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from pdserve.gpus import visible
from pdserve.v1 import worker_pb2 as w

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


def gpu_health() -> list[w.GpuHealth]:
    """One entry for each GPU that this process may use; empty without a driver. Never raises."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return list(_read_all(pynvml))
    except pynvml.NVMLError as error:
        logger.warning("reading GPU health failed: %s", error)
        return []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _read_all(nvml: Any) -> Iterator[w.GpuHealth]:
    for index, handle in visible(nvml):
        yield _read(nvml, index, handle)


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
