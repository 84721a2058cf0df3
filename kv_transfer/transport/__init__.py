"""The transports by name. A worker offers some in its order of preference; the source takes the
first it can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.tcp import TcpTransport
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.memory import KvRegion
    from kv_transfer.settings import KvSettings
    from kv_transfer.transport.base import Transport


def _nccl(settings: KvSettings) -> Transport:
    from kv_transfer.device.cuda import current_device
    from kv_transfer.nccl import binding
    from kv_transfer.transport import nccl

    device = current_device()
    return nccl.NcclTransport(
        binding.load(settings.nccl_library), device, nccl.limits_from(settings)
    )


def _cuda_ipc(settings: KvSettings) -> Transport:
    from kv_transfer.device.cuda import current_device
    from kv_transfer.transport import cuda_ipc

    return cuda_ipc.CudaIpcTransport(current_device(), cuda_ipc.limits_from(settings))


_MAKERS: dict[str, Callable[[KvSettings], Transport]] = {
    "shm": lambda settings: ShmTransport(),
    "tcp": lambda settings: TcpTransport(),
    "nccl": _nccl,
    "cuda_ipc": _cuda_ipc,
}
# Those that move a cache in GPU memory; the others move one in host memory.
ON_GPU = frozenset({"nccl", "cuda_ipc"})


def make(settings: KvSettings) -> list[Transport]:
    """The transports that the settings name, in their order; the caller closes them. Raises
    ConfigError for one that there is not, or that this machine cannot use, with the reason."""
    made: list[Transport] = []
    try:
        for name in settings.transports:
            if name not in _MAKERS:
                raise _refuse(f"{name!r} is none of {', '.join(_MAKERS)}")
            try:
                made.append(_MAKERS[name](settings))
            except (KvTransferError, ValueError) as error:
                raise _refuse(f"{name} cannot be used here: {error}") from error
    except BaseException:
        for transport in made:
            transport.close()
        raise
    return made


def check(settings: KvSettings, region: KvRegion) -> None:
    """Raises ConfigError where nothing that the settings name can move this cache."""
    if not region.is_host and not ON_GPU.intersection(settings.transports):
        raise _refuse(f"none reaches a KV cache in GPU memory: name {' or '.join(sorted(ON_GPU))}")
    block_bytes = region.geometry.block_bytes
    if not region.is_host and settings.staging_slot_bytes < block_bytes:
        raise ConfigError(
            f"kv.staging_slot_bytes: {settings.staging_slot_bytes} bytes hold no block of "
            f"{block_bytes}",
            field="kv.staging_slot_bytes",
        )


def _refuse(reason: str) -> ConfigError:
    return ConfigError(f"kv.transports: {reason}", field="kv.transports")
