"""KV between GPUs of one host: the consumer maps the producer's cache and copies by itself.

The protocol is that of mapped.py; the memory is shared by CUDA IPC handles, as torch makes them.
The consumer's GPU reads the producer's over NVLink or PCIe. A GPU that cannot reach the other's
memory, or a process that does not see that GPU, fails to open the handle, and the next transport is
used; so is it if the cache cannot be shared (memory from cuMemCreate, MIG).

Not run on a GPU yet.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import torch

from kv_transfer.device.region import DeviceRegion
from kv_transfer.transport.base import Transport, TransportUnavailable
from kv_transfer.transport.mapped import MappedConsumer, MappedProducer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.memory import KvRegion
    from kv_transfer.protocol.link import ConsumerChannel, Link, ProducerChannel
    from kv_transfer.transport.base import LocalKv

logger = logging.getLogger(__name__)


class PeerGpuMemory:
    """Another worker's KV cache, mapped. Unmapped with the last reference to its tensors."""

    def __init__(self, regions: Sequence[KvRegion]) -> None:
        self.regions = regions

    def close(self) -> None:
        self.regions = ()


class CudaIpcTransport(Transport):
    """Works between GPUs of one host that reach each other's memory."""

    name = "cuda_ipc"

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._lock = threading.Lock()

    def offer(self, local: LocalKv) -> dict[str, Any] | None:
        regions = [region for region in local.regions if isinstance(region, DeviceRegion)]
        if not regions:
            return None
        views = [view for region in regions for view in region.views]
        storages = {view.untyped_storage().data_ptr(): view for view in views}
        order = list(storages)
        with self._lock:
            if not self._handles:  # torch keeps an event and a wrapper for each export
                try:
                    with regions[0].side_stream():
                        self._handles = [_export(view) for view in storages.values()]
                except RuntimeError as error:
                    logger.warning("cuda_ipc is not offered: %s", error)
                    return None
        return {
            "handles": self._handles,
            "groups": [
                {
                    "views": [
                        [order.index(view.untyped_storage().data_ptr()), view.storage_offset()]
                        for view in region.views
                    ],
                    "shape": list(region.views[0].shape),
                    "stride": list(region.views[0].stride()),
                    "split": region.split,
                }
                for region in regions
            ],
        }

    def consumer(
        self, local: LocalKv, offer: dict[str, Any], link: Link
    ) -> tuple[ConsumerChannel, dict[str, Any]]:
        own = [region for region in local.regions if isinstance(region, DeviceRegion)]
        if not own:
            raise TransportUnavailable("the KV cache is not in GPU memory")
        device = own[0].views[0].device
        try:
            # On the engine's stream, torch would have the engine wait for the producer's.
            with own[0].side_stream():
                storages = [_open(handle, device) for handle in offer["handles"]]
            regions = [
                _mapped(group, storages, region.views[0].dtype)
                for group, region in zip(offer["groups"], own, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise TransportUnavailable(f"cannot map the producer's memory: {error}") from error
        shapes = [[(len(each.views), each.split) for each in side] for side in (regions, own)]
        if shapes[0] != shapes[1]:
            raise TransportUnavailable("the two KV caches differ in layers or blocks")
        return MappedConsumer(local, PeerGpuMemory(regions), self.name), {}

    def producer(self, local: LocalKv, details: dict[str, Any], link: Link) -> ProducerChannel:
        return MappedProducer(link, self.name)


def _mapped(
    group: dict[str, Any], storages: list[torch.UntypedStorage], dtype: torch.dtype
) -> DeviceRegion:
    """Return a group of the producer's cache, as its offer describes it."""
    shape, stride = tuple(group["shape"]), tuple(group["stride"])
    views = [
        torch.empty(0, dtype=dtype, device=storages[index].device).set_(
            storages[index], offset, shape, stride
        )
        for index, offset in group["views"]
    ]
    return DeviceRegion(views, int(group["split"]))


def _export(view: torch.Tensor) -> list[Any]:
    """Return torch's handle of the allocation in which the view lies. The first item is the number
    of the GPU in this process, which means nothing in another."""
    shared: Any = view.untyped_storage()
    return list(shared._share_cuda_())[1:]


def _open(handle: list[Any], device: torch.device) -> torch.UntypedStorage:
    """Map another process's allocation into the address space of our GPU."""
    return torch.UntypedStorage._new_shared_cuda(device.index, *handle)
