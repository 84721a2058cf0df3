"""GPUs that a process may use (NVML and CUDA_VISIBLE_DEVICES), and their division among workers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pdserve.config import refuse
from pdserve.process.gpu_machine import missing_compiler, unfit_driver

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pdserve.config import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"
_WORD = 64  # bits of one entry in NVML's sets of cores
_UTILIZATION = 0.9  # vLLM's default share of a GPU's memory


@contextlib.contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield the initialised module pynvml, or None if it or the driver is missing."""
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
    """Return the NVML indices of the GPUs that this process may use, each with its nearest CPU
    cores. The cores are empty if NVML does not know them. Without a driver there are no GPUs."""
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
    """Yield index and NVML handle of each visible GPU. Raises NVML's errors. The index of a slice
    of a GPU (MIG) is its position in CUDA_VISIBLE_DEVICES."""
    if slices := _visible_slices():
        for index, name in enumerate(slices):
            yield index, nvml.nvmlDeviceGetHandleByUUID(name)
        return
    allowed = visible_devices(os.environ.get(VISIBLE))
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        name = uuid.decode() if isinstance(uuid, bytes) else uuid
        if allowed is None or str(index) in allowed or name.startswith(allowed):
            yield index, handle


def visible_devices(value: str | None) -> tuple[str, ...] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES (indices, or prefixes of UUIDs), or None for all.
    Like CUDA, ignore the first entry that is not a device, such as -1, and all later ones."""
    if value is None:
        return None
    entries: list[str] = []
    for entry in (x.strip() for x in value.split(",")):
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(entry)
    return tuple(entries)


def _visible_slices() -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES if they are slices of GPUs. NVML does not list
    these among its devices."""
    entries = visible_devices(os.environ.get(VISIBLE)) or ()
    return entries if entries and all(x.startswith("MIG-") for x in entries) else ()


def gpu_environment(gpus: Collection[int]) -> dict[str, str]:
    """Return the environment variables that limit a process to `gpus`. If `gpus` is empty there is
    no limit. Raises ConfigError if the environment has fewer slices (MIG)."""
    if not gpus:
        return {}
    if slices := _visible_slices():
        if beyond := [x for x in gpus if x >= len(slices)]:
            refuse("worker.gpus", f"{VISIBLE} has {len(slices)} slices, and none {beyond[0]}")
        return {VISIBLE: ",".join(slices[x] for x in gpus)}
    # By default CUDA orders GPUs by speed, but the indices are NVML's, which orders them by bus.
    return {VISIBLE: ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpus_for(config: Config) -> dict[int, frozenset[int]]:
    """Return the GPUs that workers may use, with the nearest cores of each. There are none for the
    fake engine or a CPU build of torch."""
    if config.worker.engine != "vllm":
        return {}
    return {} if is_cpu_build() else visible_gpus()


def is_cpu_build() -> bool:
    """Return True if torch is absent or a CPU build, without importing it."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def check_packages() -> None:
    """Raise ConfigError, with what to install, if this Python cannot run workers with vLLM. The
    wheel requires neither torch nor vLLM, because their builds differ by machine."""
    if missing := [name for name in ("torch", "vllm") if find_spec(name) is None]:
        text = f"vllm needs packages that {sys.executable} does not have: {', '.join(missing)}"
        how = "for NVIDIA GPUs pip install 'pdserve[gpu]', for CPUs see docs/deploy.md (the wheel)"
        refuse("worker.engine", f"{text}; {how}")


def check_machine(cuda: str) -> None:
    """Raise ConfigError if this machine cannot run vLLM's build for this version of CUDA, such as
    `13.0`. Otherwise its first GPU call, or first kernel, would fail minutes later."""
    if problem := unfit_driver(int(cuda.split(".", 1)[0])) or missing_compiler():
        refuse("worker.engine", problem)


# (GPUs that the worker may use, number of them). If the first is empty, it may use any GPU that no
# other worker names.
Wanted = tuple[tuple[int, ...], int]


def share_gpus(wanted: Sequence[Wanted], gpus: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the GPUs of each worker. Workers with the same set of GPUs get the next ones in turn,
    and share them if there are too few. Raises ConfigError if one worker wants more GPUs than its
    set has."""
    if not gpus:
        return [()] * len(wanted)
    named = {gpu for theirs, _ in wanted for gpu in theirs}
    free = tuple(gpu for gpu in gpus if gpu not in named)
    taken: Counter[tuple[int, ...]] = Counter()  # GPUs handed out, by the set to choose from
    found = []
    for theirs, count in wanted:
        pool = theirs or free
        if count > len(pool):
            reason = f"a worker needs {count} GPUs, one a rank; it may use {len(pool)}"
            refuse("worker.engine_args.tensor_parallel_size", reason)
        at = taken[pool] % len(pool)
        at = at if at + count <= len(pool) else 0
        found.append(pool[at : at + count])
        taken[pool] = at + count
    return found


def memory_share(mine: tuple[int, ...], shares: Sequence[tuple[int, ...]]) -> float | None:
    """Return vLLM's `gpu_memory_utilization` for a worker on GPUs `mine`, or None if no other
    worker uses them. `shares` are the GPUs of all workers."""
    sharers = max((sum(gpu in theirs for theirs in shares) for gpu in mine), default=1)
    # Round down, so that the shares of one GPU together do not exceed _UTILIZATION.
    return int(100 * _UTILIZATION / sharers) / 100 if sharers > 1 else None
