"""Takes a worker out of service when its GPUs are not well, and back when they are."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.gpu_health import gpu_health

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.v1 import worker_pb2 as w

logger = logging.getLogger(__name__)

LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits beyond which a GPU is not healthy."""

    max_temperature_c: int = 95
    max_ecc_errors: int = 0


def fault_of(gpus: Sequence[w.GpuHealth], limits: GpuLimits) -> str:
    """What is wrong with the first GPU that is not well, "" where all are. A figure that a card
    does not give is 0, and wrong with nobody."""
    for gpu in gpus:
        if gpu.ecc_errors > limits.max_ecc_errors:
            return f"GPU {gpu.index} has {gpu.ecc_errors} uncorrected memory errors"
        if limits.max_temperature_c < gpu.temperature_c:
            return f"GPU {gpu.index} is at {gpu.temperature_c} degrees"
    return ""


async def watch_gpus(
    report: Callable[[str], None],
    look: Callable[[], list[w.GpuHealth]] = gpu_health,
    *,
    limits: GpuLimits | None = None,
    look_s: float = LOOK_S,
) -> None:
    """Call `report` with the fault of a GPU, and with "" when it is gone, until cancelled.

    Return at once if there is no GPU.
    """
    limits, reported = limits or GpuLimits(), ""
    # NVML can take its time on a machine with many GPUs.
    while gpus := await asyncio.to_thread(look):
        fault = fault_of(gpus, limits)
        if fault != reported:
            logger.warning("%s", fault or "the GPUs are well again")
            reported = fault
            report(fault)
        await asyncio.sleep(look_s)
