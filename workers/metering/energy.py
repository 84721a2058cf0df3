"""Energy counters of the worker's processors: NVML for GPUs, RAPL for CPUs.

A counter covers a whole GPU or CPU, so a worker that shares one has no counter.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.process.gpus import open_nvml, visible
from workers.metering.worker_account import EnergyMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.metering.worker_account import WorkerAccount

    Counter = Callable[[], float]  # joules since any start; raises Unmeasured

logger = logging.getLogger(__name__)

READ_EVERY_S = 1.0
POWERCAP = Path("/sys/class/powercap")


class Unmeasured(Exception):
    """Energy cannot be measured; the message states the reason."""


@contextmanager
def nvml_counter(gpus: int) -> Iterator[Counter]:
    """Yield the counter of the first `gpus` GPUs visible to this process. Raises Unmeasured."""
    with open_nvml() as nvml:
        if nvml is None:
            raise Unmeasured("NVML is not available")

        def read() -> float:
            joules = 0.0
            try:
                for index, gpu in list(visible(nvml))[:gpus]:
                    if len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) > 1:
                        raise Unmeasured(f"GPU {index} has other processes too")
                    joules += nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
            except nvml.NVMLError as error:
                raise Unmeasured(f"NVML: {error}") from error
            return joules

        read()
        yield read


@contextmanager
def rapl_counter(root: Path = POWERCAP) -> Iterator[Counter]:
    """Yield the counter of all CPU packages of the machine. Raises Unmeasured."""
    if len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        raise Unmeasured("this worker has only some of the CPU's cores")
    # "intel-rapl:0" is a package (on AMD CPUs, too); "intel-rapl:0:0" is a part of it.
    folders = [x for x in sorted(root.glob("intel-rapl:*")) if x.name.count(":") == 1]
    if not folders:
        raise Unmeasured("there is no RAPL counter")
    last: dict[Path, int] = {}
    total_uj = 0

    def read() -> float:
        nonlocal total_uj
        for folder in folders:
            try:
                now = int((folder / "energy_uj").read_text())
                span = int((folder / "max_energy_range_uj").read_text())
            except (OSError, ValueError) as error:  # only root may read it by default
                raise Unmeasured(f"RAPL: {error}") from error
            # The counter wraps to 0 after its range.
            total_uj += (now - last.get(folder, now)) % (span + 1)
            last[folder] = now
        return total_uj / 1e6

    read()
    yield read


async def meter(counter: Counter, account: WorkerAccount) -> None:
    """Read the counter regularly for `account`, until cancelled or until a reading fails."""
    now, account.meter = asyncio.get_running_loop().time, EnergyMeter()
    try:
        while True:
            joules, at = await asyncio.to_thread(counter), now()
            account.meter.read(joules, at, account.busy.busy_until(at))
            await asyncio.sleep(READ_EVERY_S)
    except Unmeasured as reason:
        logger.warning("energy is not measured any more: %s", reason)
    finally:
        account.meter = None
