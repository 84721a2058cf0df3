"""CUDA IPC as a mapped transport. Handles are replaced by the memory itself: there is no GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from kv_transfer.cache.cuda_runtime import CudaRuntime
from kv_transfer.cache.geometry import PagePart
from kv_transfer.cache.gpu_memory import device_region
from kv_transfer.errors import KvTransferError
from kv_transfer.protocol.messages import ChunkReady
from kv_transfer.protocol.transport import LocalKv, TransportUnavailable
from kv_transfer.transport.cuda_ipc import CudaIpcTransport

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 2, 4, 16


class Link:
    """A link that keeps its messages."""

    def __init__(self) -> None:
        self.written: list[ChunkReady] = []

    @property
    def stream(self) -> Link:
        return self

    def buffer(self, message: ChunkReady) -> None:
        self.written.append(message)


class FakeCuda:
    """libcudart, with addresses in place of handles and copies in host memory."""

    def __init__(self, version: int = 13000) -> None:
        self.exported, self.mapped, self.errors_cleared = 0, 0, 0
        self.copies: list[int] = []  # the number of runs in each call
        self.copy_error = 0

        # ctypes sets attributes of a library's functions; methods have none.
        def get_handle(handle: Any, address: int) -> int:
            ctypes.memmove(handle, address.to_bytes(8), 8)
            self.exported += 1
            return 0

        def open_handle(out: Any, handle: Any, flags: int) -> int:
            out._obj.value = int.from_bytes(bytes(handle)[:8])
            self.mapped += bool(out._obj.value)
            return 0 if out._obj.value else 400

        def close_handle(address: int) -> int:
            self.mapped -= 1
            return 0

        def last_error() -> int:
            self.errors_cleared += 1
            return 0

        def runtime_version(out: Any) -> int:
            out._obj.value = version
            return 0

        def memcpy(to: int, source: int, size: int, kind: int, stream: int) -> int:
            assert kind == 4  # cudaMemcpyDefault
            ctypes.memmove(to, source, size)
            self.copies.append(1)
            return self.copy_error

        def memcpy_batch(*args: Any) -> int:
            to, source, sizes, count, attributes, first, kinds, _ = args
            assert (attributes._obj.srcAccessOrder, first._obj.value, kinds) == (1, 0, 1)
            assert ctypes.sizeof(attributes._obj) == 24  # driver_types.h
            words = [(ctypes.c_uint64 * count).from_address(x) for x in (to, source, sizes)]
            for each in zip(*words, strict=True):
                ctypes.memmove(*each)
            self.copies.append(count)
            return self.copy_error

        self.cudaRuntimeGetVersion = runtime_version
        self.cudaMemcpyAsync = memcpy
        if version >= 13000:
            self.cudaMemcpyBatchAsync = memcpy_batch
        self.cudaIpcGetMemHandle = get_handle
        self.cudaIpcOpenMemHandle = open_handle
        self.cudaIpcCloseMemHandle = close_handle
        self.cudaGetErrorString = lambda code: b"invalid resource handle"
        self.cudaGetLastError = last_error


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def transport(cuda: FakeCuda) -> CudaIpcTransport:
    return CudaIpcTransport(CudaRuntime(cuda))


def allocate(monkeypatch: pytest.MonkeyPatch, *tensors: torch.Tensor) -> None:
    """Let torch say that it allocated these tensors, each 512 bytes into an allocation."""
    segments = [{"address": t.data_ptr() - 512, "total_size": t.nbytes + 512} for t in tensors]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)


def cache(seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    return torch.randint(-99, 99, shape, dtype=torch.int16, generator=dice)


@pytest.mark.parametrize("is_apart", [False, True], ids=["one-allocation", "one-a-layer"])
def test_the_consumer_copies_announced_blocks_from_the_producers_cache(
    is_apart: bool, cuda: FakeCuda, transport: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = cache(1), cache(2)
    views = [layer.clone() for layer in source] if is_apart else list(source)
    allocate(monkeypatch, *(views if is_apart else [source]))
    producing = LocalKv({0: device_region(views, BLOCKS)}, None)
    consuming = LocalKv({0: device_region(list(target), BLOCKS)}, None)
    link = Link()
    offer = transport.offer(producing)
    assert offer is not None
    consumer, details = transport.consumer(consuming, offer, link)  # type: ignore[arg-type]
    producer = transport.producer(producing, details, link)  # type: ignore[arg-type]
    digest = producing.regions[0].digests([4, 2])
    size = producing.regions[0].size_bytes(2)
    whole = PagePart(0, 0, 0, producing.memory.geometry.page_bytes, 0, 0, len(views))
    producer.send(ChunkReady("t", 0, 2, size), [4, 2], whole)
    want = target.clone()
    want[:, [0, 5]] = source[:, [4, 2]]
    assert consumer.receive(link.written[0], [0, 5], whole).wait() == digest
    assert not cuda.copies  # a block is not one run of bytes
    assert torch.equal(target, want)
    assert cuda.mapped == (LAYERS if is_apart else 1)
    consumer.close()
    assert cuda.mapped == 0


def blocks_first(seed: int, order: tuple[int, ...] = (0, 1, 2, 3, 4)) -> torch.Tensor:
    """Return a cache [layers, blocks, heads, tokens, content] whose blocks are runs of bytes, with
    the dimensions of a block in `order`."""
    physical = cache(seed).permute(1, *(n for n in order if n != 1)).contiguous()
    back = [1, *(n for n in order if n != 1)]
    return physical.permute([back.index(n) for n in range(5)])


@pytest.mark.parametrize(("version", "calls"), [(13000, [2]), (12080, [1, 1])])
def test_blocks_that_are_one_run_of_bytes_at_both_ends_are_copied_by_copy_engines(
    version: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(version)
    transport = CudaIpcTransport(CudaRuntime(cuda))
    source, target, other = blocks_first(1), blocks_first(2), blocks_first(3, (0, 1, 3, 2, 4))
    allocate(monkeypatch, source)
    offer = transport.offer(LocalKv({0: device_region(list(source), BLOCKS)}, None))
    assert offer is not None
    region = device_region(list(source), BLOCKS)
    whole = PagePart(0, 0, 0, region.geometry.page_bytes, 0, 0, region.geometry.num_layers)
    chunk = ChunkReady("t", 0, 2, region.size_bytes(2), [4, 2])
    for ours in (target, other):
        local, want = LocalKv({0: device_region(list(ours), BLOCKS)}, None), ours.clone()
        consumer, _ = transport.consumer(local, offer, Link())  # type: ignore[arg-type]
        want[:, [0, 5]] = source[:, [4, 2]]
        assert consumer.receive(chunk, [0, 5], whole).wait() == region.digests([4, 2])
        assert torch.equal(ours, want)
        assert cuda.copies == calls  # `other` is laid out differently, and is not copied as bytes
    cuda.copy_error = 700
    consumer, _ = transport.consumer(LocalKv({0: region}, None), offer, Link())  # type: ignore[arg-type]
    with pytest.raises(KvTransferError, match="CUDA"):
        consumer.receive(chunk, [0, 5], whole)


def test_memory_that_cannot_be_mapped_goes_over_the_next_transport(
    cuda: FakeCuda, transport: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cache(1)
    allocate(monkeypatch, source)
    local, link = LocalKv({0: device_region(list(source), BLOCKS)}, None), Link()
    offer = transport.offer(local)
    assert offer is not None
    (group,) = offer["groups"]
    ((handle, offset, size),) = offer["handles"]
    for change, match in (
        ({"handles": [[bytes(64), offset, size]]}, "invalid resource handle"),
        ({"handles": [[handle[:63], offset, size]]}, "not a handle"),
        ({"handles": [["text", offset, size]]}, "not a handle"),
        ({"handles": [[handle, 1.5, size]]}, "not a handle"),
        ({"handles": [[handle, -1, size]]}, "bytes from -1"),
        ({"handles": [[handle, offset, 0]]}, "0 bytes"),
        ({"handles": [[handle]]}, "cannot map"),
        ({"groups": [group | {"split": 2}]}, "differ in blocks"),
        ({"groups": [group | {"shape": None}]}, "cannot map"),
        ({"groups": []}, "cannot map"),
    ):
        with pytest.raises(TransportUnavailable, match=match):
            transport.consumer(local, offer | change, link)  # type: ignore[arg-type]
    assert cuda.mapped == 0
    assert cuda.errors_cleared == 1  # else torch's next call would raise it


def test_the_cache_is_exported_once_for_all_links(
    cuda: FakeCuda, transport: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cache(1)
    allocate(monkeypatch, source)
    local = LocalKv({0: device_region(list(source), BLOCKS)}, None)
    transport.prepare(local)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", pytest.fail)  # an engine steps by now
    assert transport.offer(local) == transport.offer(local)
    assert cuda.exported == 1


def test_a_cache_that_cuda_does_not_share_is_not_offered(
    cuda: FakeCuda, transport: CudaIpcTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cache(1)
    local = LocalKv({0: device_region(list(source), BLOCKS)}, None)
    allocate(monkeypatch)  # nothing
    assert transport.offer(local) is None
    allocate(monkeypatch, source)
    cuda.cudaIpcGetMemHandle = lambda handle, address: 1
    assert CudaIpcTransport(CudaRuntime(cuda)).offer(local) is None
