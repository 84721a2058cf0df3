"""GPUs that a process may use (NVML and CUDA_VISIBLE_DEVICES), and how workers share them."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pdserve.config import refuse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pdserve.config import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"
_WORD = 64  # bits of one entry in NVML's sets of cores
_UTILIZATION = 0.9  # vLLM's default share of a GPU's memory


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield NVML, or None if there is no driver or no module."""
    nvml = None
    with contextlib.suppress(ImportError):
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            nvml = pynvml
    try:
        yield nvml
    finally:
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


def visible_gpus() -> dict[int, frozenset[int]]:
    """Return the NVML indices that this process may use, each with the CPU cores nearest to that
    GPU (none if NVML does not know); no GPUs without a driver."""
    with open_nvml() as nvml:
        try:
            return {} if nvml is None else {i: _nearest(nvml, x) for i, x in visible(nvml)}
        except nvml.NVMLError:
            return {}


def _nearest(nvml: Any, handle: Any) -> frozenset[int]:
    words = -(-(os.cpu_count() or 1) // _WORD)
    try:
        mask = list(nvml.nvmlDeviceGetCpuAffinity(handle, words))
    except nvml.NVMLError:  # not supported in some virtual machines
        return frozenset()
    return frozenset(i for i in range(words * _WORD) if mask[i // _WORD] >> i % _WORD & 1)


def visible(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Yield index and NVML handle of each. Raises NVML's errors."""
    allowed = visible_devices(os.environ.get(VISIBLE))
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        name = uuid.decode() if isinstance(uuid, bytes) else uuid
        if allowed is None or str(index) in allowed or name.startswith(allowed):
            yield index, handle


def visible_devices(value: str | None) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES (indices, or prefixes of UUIDs), or None for all.
    CUDA stops at the first entry that is no device, such as -1."""
    if value is None:
        return None
    entries: list[str] = []
    for entry in (x.strip() for x in value.split(",")):
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(entry)
    return tuple(entries)


def gpu_environment(gpus: Collection[int]) -> dict[str, str]:
    """Return the environment that limits a process to `gpus`; none means no limit."""
    if not gpus:
        return {}
    # CUDA orders GPUs by speed, NVML by bus.
    return {VISIBLE: ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpus_for(config: Config) -> dict[int, frozenset[int]]:
    """Return the GPUs that workers may use, with the cores nearest to each: none for the fake
    engine or a CPU build of torch."""
    if config.worker.engine != "vllm":
        return {}
    return {} if is_cpu_build() else visible_gpus()


def is_cpu_build() -> bool:
    """Return True if torch is absent or a CPU build, without importing it."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


# What a worker is given: GPUs to take from (none: any that no other worker names), and how many.
Wanted = tuple[tuple[int, ...], int]


def share_gpus(wanted: Sequence[Wanted], gpus: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the GPUs of each worker. Workers that take from the same GPUs get the next ones in
    turn; if there are too few, they share them. Raises ConfigError if there are not enough for one.
    """
    if not gpus:
        return [()] * len(wanted)
    named = {gpu for theirs, _ in wanted for gpu in theirs}
    free = tuple(gpu for gpu in gpus if gpu not in named)
    taken: Counter[tuple[int, ...]] = Counter()  # places taken, by the GPUs they are taken from
    found = []
    for theirs, count in wanted:
        pool = theirs or free
        if count > len(pool):
            reason = f"a worker needs {count} GPUs; it may use {len(pool)}"
            refuse("worker.engine_args.tensor_parallel_size", reason)
        at = taken[pool] % len(pool)
        at = at if at + count <= len(pool) else 0
        found.append(pool[at : at + count])
        taken[pool] = at + count
    return found


def memory_share(mine: tuple[int, ...], shares: Sequence[tuple[int, ...]]) -> float | None:
    """Return vLLM's `gpu_memory_utilization` for a worker whose GPUs `mine` others use too, or None
    if it has them alone."""
    sharers = max((sum(gpu in theirs for theirs in shares) for gpu in mine), default=1)
    return int(100 * _UTILIZATION / sharers) / 100 if sharers > 1 else None
