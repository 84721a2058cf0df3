"""The counter of energy of what computes here: NVML's of the GPUs, or RAPL's of the CPUs.

A counter is of a whole GPU or CPU. So there is none for a worker that shares them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.local.gpus import open_nvml, visible
from workers.accounting import EnergyMeter

if TYPE_CHECKING:
    from workers.accounting import WorkerAccount

logger = logging.getLogger(__name__)

READ_EVERY_S = 1.0
POWERCAP = Path("/sys/class/powercap")


class Unmeasured(Exception):
    """Energy is not measured, for this reason."""


class NvmlCounter:
    """The first GPUs of those that this process may use."""

    source = "nvml"

    def __init__(self, gpus: int) -> None:
        """Raises Unmeasured."""
        self._stack = ExitStack()
        self._nvml: Any = self._stack.enter_context(open_nvml())
        if self._nvml is None:
            raise Unmeasured("NVML is not available")
        try:
            self._gpus = list(visible(self._nvml))[:gpus]
        except self._nvml.NVMLError as error:
            raise Unmeasured(f"NVML: {error}") from error

    def read(self) -> float:
        """Return joules since the driver started. Raises Unmeasured."""
        nvml, joules = self._nvml, 0.0
        try:
            for index, gpu in self._gpus:
                if len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)) > 1:
                    raise Unmeasured(f"GPU {index} has other processes too")
                joules += nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3
        except nvml.NVMLError as error:
            raise Unmeasured(f"NVML: {error}") from error
        return joules

    def close(self) -> None:
        self._stack.close()


class RaplCounter:
    """All CPU packages of the machine. State: the last value of each, in µJ, and the sum."""

    source = "rapl"

    def __init__(self, root: Path = POWERCAP) -> None:
        """Raises Unmeasured."""
        if len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
            raise Unmeasured("this worker has only some of the CPU's cores")
        # "intel-rapl:0" is a package, of AMD's CPUs too, and "intel-rapl:0:0" a part of it.
        folders = [x for x in sorted(root.glob("intel-rapl:*")) if x.name.count(":") == 1]
        if not folders:
            raise Unmeasured("there is no RAPL counter")
        self._last: dict[Path, int] = {}
        self._joules = 0.0
        try:
            self._ranges = {x: int((x / "max_energy_range_uj").read_text()) for x in folders}
        except (OSError, ValueError) as error:
            raise Unmeasured(f"RAPL: {error}") from error
        self.read()

    def read(self) -> float:
        """Return joules since the first call. Raises Unmeasured."""
        for folder, span in self._ranges.items():
            try:
                now = int((folder / "energy_uj").read_text())
            except (OSError, ValueError) as error:  # only root may read it by default
                raise Unmeasured(f"RAPL: {error}") from error
            # The counter begins at 0 again after its range.
            self._joules += (now - self._last.get(folder, now)) % (span + 1) / 1e6
            self._last[folder] = now
        return self._joules

    def close(self) -> None:
        """Nothing is held."""


Counter = NvmlCounter | RaplCounter


def open_counter(gpus: int) -> Counter:
    """Return the counter of so many GPUs, or of the CPUs for 0. Raises Unmeasured."""
    counter: Counter = NvmlCounter(gpus) if gpus else RaplCounter()
    try:
        counter.read()
    except Unmeasured:
        counter.close()
        raise
    return counter


async def meter(counter: Counter, account: WorkerAccount) -> None:
    """Share out what the counter counts, until cancelled or until it cannot be read any more."""
    now, account.meter = asyncio.get_running_loop().time, EnergyMeter()
    try:
        while True:
            joules, at = await asyncio.to_thread(counter.read), now()
            account.meter.read(joules, at, account.busy.busy_until(at))
            await asyncio.sleep(READ_EVERY_S)
    except Unmeasured as reason:
        logger.warning("energy is not measured any more: %s", reason)
    finally:
        account.meter = None
