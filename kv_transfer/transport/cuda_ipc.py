"""KV between GPUs of one host: the consumer maps the producer's cache and copies by itself.

Same protocol as mapped.py, with CUDA IPC handles in place of descriptors. The consumer's GPU reads
the producer's memory over NVLink or PCIe. If a process cannot open the handle, because its GPU
cannot reach the other GPU or the process does not see it, the next transport is used. The same
applies if the cache cannot be shared (memory from cuMemCreate, MIG).

Ran on one H200 (benchmarks/results), between engines of one GPU: copies in flight and the mapping
survive a producer that is killed. Not run between two GPUs yet.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import torch

from kv_transfer.cache.cuda_runtime import HANDLE_BYTES, CudaRuntime
from kv_transfer.cache.gpu_memory import DeviceRegion, device_regions
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.transport import Transport, TransportUnavailable
from kv_transfer.transport.mapped import MappedConsumer, MappedProducer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_transfer.protocol.link import ConsumerChannel, Link, ProducerChannel
    from kv_transfer.protocol.transport import LocalKv

logger = logging.getLogger(__name__)


class PeerGpuMemory:
    """Another worker's KV cache, mapped until `close`."""

    def __init__(self, cuda: CudaRuntime) -> None:
        self.regions: dict[int, DeviceRegion] = {}
        self._cuda = cuda
        self._mapped: list[int] = []

    def map(self, each: Sequence[Any], device: torch.device) -> torch.UntypedStorage:
        """Map an item of an offer's `handles`. Raises ValueError, KvTransferError."""
        handle, offset, size = each
        is_handle = isinstance(handle, bytes) and len(handle) == HANDLE_BYTES
        if not is_handle or type(offset) is not int or type(size) is not int:
            raise ValueError("not a handle, an offset and a size")
        if offset < 0 or size < 1:
            raise ValueError(f"{size} bytes from {offset}")
        address = self._cuda.open(handle)
        self._mapped.append(address)
        made: Any = torch._C._construct_storage_from_data_pointer(address + offset, device, size)
        return made  # type: ignore[no-any-return]

    def close(self) -> None:
        self.regions = {}
        while self._mapped:
            try:
                self._cuda.close(self._mapped.pop())
            except KvTransferError as error:  # the GPU is lost; its engine ends too
                logger.warning("cannot unmap a peer's KV cache: %s", error)


class CudaIpcTransport(Transport):
    """Transport between GPUs of one host that can read each other's memory."""

    name = "cuda_ipc"

    def __init__(self, cuda: CudaRuntime) -> None:
        self._cuda = cuda
        self._handles: list[tuple[bytes, int, int]] = []
        self._lock = threading.Lock()

    def prepare(self, local: LocalKv) -> None:
        """Export the cache. Torch lists all its allocations for this, which would hold up the steps
        of an engine in this process."""
        self._exported(_storages(local))

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        regions, storages = device_regions(local.regions), _storages(local)
        if not self._exported(storages):
            return None
        order = list(storages)
        return {
            "handles": self._handles,
            "groups": [
                {
                    "group": group,
                    "views": [
                        [order.index(view.untyped_storage().data_ptr()), view.storage_offset()]
                        for view in region.views
                    ],
                    "shape": list(region.views[0].shape),
                    "stride": list(region.views[0].stride()),
                    "split": region.split,
                }
                for group, region in regions.items()
            ],
        }

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        own = device_regions(local.regions)
        if not own:
            raise TransportUnavailable("the KV cache is not in GPU memory")
        device = next(iter(own.values())).views[0].device
        peer = PeerGpuMemory(self._cuda)
        try:
            storages = [peer.map(each, device) for each in offer["handles"]]
            # Stages of a pipeline may differ in their groups and layers.
            for each in offer["groups"]:
                if (region := own.get(each["group"])) is None:
                    continue
                mapped = _mapped(each, storages, region.views[0].dtype, self._cuda)
                if mapped.split != region.split:
                    raise ValueError("the two KV caches differ in blocks")
                peer.regions[each["group"]] = mapped
            if not peer.regions:
                raise ValueError("the two KV caches have no group in common")
        except (LookupError, TypeError, ValueError, RuntimeError, KvTransferError) as error:
            peer.close()
            raise TransportUnavailable(f"cannot map the producer's memory: {error}") from error
        return MappedConsumer(local, peer, self.name), {}

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        return MappedProducer(link, self.name)

    def _exported(self, storages: Mapping[int, int]) -> bool:
        """Export the cache once. Return False if there is none in GPU memory, or it cannot be
        exported."""
        with self._lock:
            if not self._handles:
                try:
                    self._handles = [self._export(*each) for each in storages.items()]
                except KvTransferError as error:
                    logger.warning("cuda_ipc is not offered: %s", error)
            return bool(self._handles)

    def _export(self, address: int, size: int) -> tuple[bytes, int, int]:
        """Return (handle of torch's allocation that contains these bytes, their offset in it, their
        size). Raises KvTransferError."""
        for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
            if 0 <= (offset := address - segment["address"]) < segment["total_size"]:
                return self._cuda.export(segment["address"]), offset, size
        raise KvTransferError("torch did not allocate the KV cache")


def _storages(local: LocalKv) -> dict[int, int]:
    """Return the addresses and sizes of the allocations of a cache in GPU memory."""
    regions = device_regions(local.regions).values()
    storages = (view.untyped_storage() for region in regions for view in region.views)
    return {x.data_ptr(): x.nbytes() for x in storages}


def _mapped(
    group: dict[str, Any],
    storages: list[torch.UntypedStorage],
    dtype: torch.dtype,
    cuda: CudaRuntime,
) -> DeviceRegion:
    """Return the region of a group of the producer's cache from its offer."""
    shape, stride = tuple(group["shape"]), tuple(group["stride"])
    views = [
        torch.empty(0, dtype=dtype, device=storages[index].device).set_(
            storages[index], offset, shape, stride
        )
        for index, offset in group["views"]
    ]
    return DeviceRegion(views, int(group["split"]), cuda=cuda)
