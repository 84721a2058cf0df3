"""Which GPUs a process may use, as NVML (nvidia-ml-py) and CUDA_VISIBLE_DEVICES say."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """NVML while it is open; None where there is no driver, or no module. Neither way raises."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_gpus() -> tuple[int, ...]:
    """NVML's indices of those that this process may use; none without a driver. Never raises."""
    with open_nvml() as nvml:
        if nvml is None:
            return ()
        try:
            return tuple(index for index, _ in visible(nvml))
        except nvml.NVMLError:
            return ()


def visible(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Index and NVML's handle of each; raises NVML's errors."""
    allowed = visible_devices(os.environ.get(VISIBLE))
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        name = uuid.decode() if isinstance(uuid, bytes) else uuid
        if allowed is None or str(index) in allowed or name.startswith(allowed):
            yield index, handle


def visible_devices(value: str | None) -> tuple[str, ...] | None:
    """The entries of CUDA_VISIBLE_DEVICES: indices, or the beginnings of UUIDs; None for all.

    CUDA ends the list at the first entry that is no device, such as -1.
    """
    if value is None:
        return None
    entries: list[str] = []
    for entry in (x.strip() for x in value.split(",")):
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(entry)
    return tuple(entries)


def gpu_environment(gpus: Collection[int]) -> dict[str, str]:
    """The environment of a process that has `gpus` alone; nothing where it may have all.

    CUDA's own order is by speed; NVML's indices are in the order of the bus.
    """
    if not gpus:
        return {}
    return {VISIBLE: ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
