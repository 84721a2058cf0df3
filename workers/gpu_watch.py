"""Takes a worker out of service when its GPUs are not well, and back when they are."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from workers.gpu_health import gpu_health

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.failure_config import GpuConfig
    from pdserve.v1 import worker_pb2 as w
    from workers.worker import Worker

logger = logging.getLogger(__name__)


def fault_of(gpus: Sequence[w.GpuHealth], limits: GpuConfig) -> str:
    """What is wrong with the first GPU that is not well, "" where all are. A figure that a card
    does not give is 0, and wrong with nobody."""
    for gpu in gpus:
        free = gpu.memory_total_bytes - gpu.memory_used_bytes
        if gpu.ecc_errors > limits.max_ecc_errors:
            return f"GPU {gpu.index} has {gpu.ecc_errors} uncorrected memory errors"
        if 0 < limits.max_temperature_c < gpu.temperature_c:
            return f"GPU {gpu.index} is at {gpu.temperature_c} degrees"
        if gpu.memory_total_bytes and free < limits.min_free_memory_bytes:
            return f"GPU {gpu.index} has {free} bytes of memory left"
    return ""


class GpuWatch:
    """Owns one task, ended by `stop`, and none where there is no GPU."""

    def __init__(
        self,
        worker: Worker,
        limits: GpuConfig,
        changed: Callable[[], None],
        look: Callable[[], list[w.GpuHealth]] = gpu_health,
    ) -> None:
        """`changed` is called when the worker's `unhealthy` has changed."""
        self._worker = worker
        self._limits = limits
        self._changed = changed
        self._look = look
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._limits.look_s:
            self._task = asyncio.create_task(self._run(), name="gpu-watch")

    async def stop(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        # NVML can take its time on a machine with many GPUs.
        while gpus := await asyncio.to_thread(self._look):
            fault = fault_of(gpus, self._limits)
            if fault != self._worker.unhealthy:
                logger.warning("%s", fault or "the GPUs are well again")
                self._worker.unhealthy = fault
                self._changed()
            await asyncio.sleep(self._limits.look_s)
