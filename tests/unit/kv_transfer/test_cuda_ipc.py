"""CUDA IPC as a mapped transport. Handles are replaced by the memory itself: there is no GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kv_transfer.device.region import device_region
from kv_transfer.layout import PagePart
from kv_transfer.protocol.messages import ChunkReady
from kv_transfer.transport import cuda_ipc
from kv_transfer.transport.base import LocalKv, TransportUnavailable
from kv_transfer.transport.cuda_ipc import CudaIpcTransport

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 2, 4, 16


class Link:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[ChunkReady] = []

    def write(self, message: ChunkReady) -> None:
        self.written.append(message)


@pytest.fixture(autouse=True)
def handles(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.UntypedStorage]:
    numbers, shared = itertools.count(), dict[int, torch.UntypedStorage]()

    def export(view: torch.Tensor) -> list[Any]:
        number = next(numbers)
        shared[number] = view.untyped_storage()
        return [number]

    def opened(handle: list[Any], device: torch.device) -> torch.UntypedStorage:
        if handle[0] not in shared:
            raise RuntimeError("CUDA error: invalid resource handle")
        return shared[handle[0]]

    monkeypatch.setattr(cuda_ipc, "_export", export)
    monkeypatch.setattr(cuda_ipc, "_open", opened)
    return shared


def cache(seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    return torch.randint(-99, 99, shape, dtype=torch.int16, generator=dice)


@pytest.mark.parametrize("is_apart", [False, True], ids=["one-allocation", "one-a-layer"])
def test_the_consumer_copies_announced_blocks_from_the_producers_cache(is_apart: bool) -> None:
    source, target = cache(1), cache(2)
    views = [layer.clone() for layer in source] if is_apart else list(source)
    producing = LocalKv((device_region(views, BLOCKS),), None)
    consuming = LocalKv((device_region(list(target), BLOCKS),), None)
    transport, link = CudaIpcTransport(), Link()
    offer = transport.offer(producing)
    assert offer is not None
    consumer, details = transport.consumer(consuming, offer, link)  # type: ignore[arg-type]
    producer = transport.producer(producing, details, link)  # type: ignore[arg-type]
    digest = producing.regions[0].digests([4, 2])
    size = producing.regions[0].size_bytes(2)
    whole = PagePart(0, 0, 0, producing.regions[0].geometry.page_bytes)
    producer.send(ChunkReady("t", 0, 2, size), [4, 2], whole)
    want = target.clone()
    want[:, [0, 5]] = source[:, [4, 2]]
    assert consumer.receive(link.written[0], [0, 5], whole) == digest
    assert torch.equal(target, want)
    consumer.close()


def test_memory_that_cannot_be_mapped_goes_over_the_next_transport() -> None:
    local, link = LocalKv((device_region(list(cache(1)), BLOCKS),), None), Link()
    transport = CudaIpcTransport()
    offer = transport.offer(local)
    assert offer is not None
    (group,) = offer["groups"]
    for change, match in (
        ({"handles": [[99]]}, "invalid resource handle"),
        ({"groups": [group | {"views": group["views"][:2]}]}, "differ in layers"),
        ({"groups": [group | {"shape": None}]}, "cannot map"),
        ({"groups": []}, "cannot map"),
    ):
        with pytest.raises(TransportUnavailable, match=match):
            transport.consumer(local, offer | change, link)  # type: ignore[arg-type]


def test_the_cache_is_exported_once_for_all_links(handles: dict[int, torch.UntypedStorage]) -> None:
    local = LocalKv((device_region(list(cache(1)), BLOCKS),), None)
    transport = CudaIpcTransport()
    assert transport.offer(local) == transport.offer(local)
    assert len(handles) == 1


def test_a_cache_that_cuda_does_not_share_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(view: torch.Tensor) -> list[Any]:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(cuda_ipc, "_export", export)
    local = LocalKv((device_region(list(cache(1)), BLOCKS),), None)
    assert CudaIpcTransport().offer(local) is None
