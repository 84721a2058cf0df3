"""The transports by name. Consumer and producer use the first one that both support."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kv_transfer.errors import KvTransferError
from kv_transfer.settings import AUTO, ON_GPU, ON_HOST
from kv_transfer.transport.mapped import MappedTransport
from kv_transfer.transport.tcp import TcpTransport
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kv_transfer.protocol.transport import LocalKv, Transport
    from kv_transfer.settings import ConnectorConfig


def _nccl(settings: ConnectorConfig) -> Transport:
    from kv_transfer.transport.nccl import binding
    from kv_transfer.transport.nccl.limits import limits_from
    from kv_transfer.transport.nccl.staging import current_gpu
    from kv_transfer.transport.nccl.transport import NcclTransport

    gpu = current_gpu()
    return NcclTransport(binding.load(), gpu, limits_from(settings))


def _cuda_ipc(settings: ConnectorConfig) -> Transport:
    from kv_transfer.cache import cuda_runtime
    from kv_transfer.transport.cuda_ipc import CudaIpcTransport
    from kv_transfer.transport.nccl.staging import current_gpu

    current_gpu()  # raises if there is none
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise KvTransferError(f"{name}: other processes cannot map expandable segments")
    return CudaIpcTransport(cuda_runtime.load())


def _nixl(settings: ConnectorConfig) -> Transport:
    from kv_transfer.transport.nixl import NixlTransport

    return NixlTransport(settings)


logger = logging.getLogger(__name__)

_MAKERS: dict[str, Callable[[ConnectorConfig], Transport]] = {
    "shm": MappedTransport,
    "tcp": lambda settings: TcpTransport(),
    "cuda_ipc": _cuda_ipc,
    "nixl": _nixl,
    "nccl": _nccl,
}


def make(
    settings: ConnectorConfig, *, on_gpu: bool = False, cooperative: str = ""
) -> list[Transport]:
    """Return the transports named in the settings, in order; the caller closes them. `cooperative`:
    names of the model's kernels that start only if all their thread blocks fit.

    AUTO selects every transport that works on this machine for a KV cache in GPU or host memory.
    Raises ConfigError with the reason if a named transport cannot be used, if AUTO finds none, or
    if `shared_dir` does not exist.
    """
    if settings.shared_dir and not Path(settings.shared_dir).is_dir():
        reason = f"kv.shared_dir: {settings.shared_dir} is not a directory"
        raise ConfigError(reason, field="kv.shared_dir")
    if settings.transports == (AUTO,):
        return _whichever(settings.names(on_gpu=on_gpu), settings, cooperative)
    made: list[Transport] = []
    try:
        for name in settings.transports:
            # No list.extend: if one fails, those before it are closed.
            made.append(_make(name, settings, cooperative))  # noqa: PERF401
    except BaseException:
        for transport in made:
            transport.close()
        raise
    return made


def _whichever(
    names: Iterable[str], settings: ConnectorConfig, cooperative: str
) -> list[Transport]:
    made: list[Transport] = []
    refusals = []
    for name in names:
        try:
            made.append(_make(name, settings, cooperative))
        except ConfigError as error:
            logger.warning("%s; it is not offered", error)
            refusals.append(str(error))
    if not made:
        raise ConfigError("; ".join(refusals), field="kv.transports")
    return made


def _make(name: str, settings: ConnectorConfig, cooperative: str) -> Transport:
    if name == "nccl" and cooperative:
        # Deadlock: a receive holds thread blocks until its send runs. The send may wait behind such
        # a kernel on the other group, and that kernel for one on this group.
        raise _refuse(
            f"nccl stops the engines beside {cooperative}: name cuda_ipc alone, or set"
            " engine_args.all2all_backend to allgather_reducescatter"
        )
    try:
        return _MAKERS[name](settings)
    except (KvTransferError, ValueError) as error:
        raise _refuse(f"{name} cannot be used here: {error}") from error


def check(transports: Sequence[Transport], local: LocalKv) -> None:
    """Raise ConfigError if none of the transports can move this cache. Prepare the others for the
    first link."""
    names = ON_HOST if local.is_host else ON_GPU
    reaching = [each for each in transports if each.name in names]
    if not reaching:
        where = "host" if local.is_host else "GPU"
        raise _refuse(f"none reaches a KV cache in {where} memory: name {' or '.join(names)}")
    for each in reaching:
        each.offer(local)  # exports the cache, which takes tens of ms: here no step waits for it


def _refuse(reason: str) -> ConfigError:
    return ConfigError(f"kv.transports: {reason}", field="kv.transports")
