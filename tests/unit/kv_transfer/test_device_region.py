"""Blocks of a GPU's KV cache to contiguous staging memory and back, here in host memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.cache import gpu_memory
from kv_transfer.cache.geometry import KvGeometry
from kv_transfer.cache.gpu_memory import DeviceRegion, device_region
from kv_transfer.cache.host_memory import KvRegion
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.settings import DEVICE_COPIES
from tests.support.timeouts import WAIT_S

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 4, 8, 5
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
# vLLM's physical layouts (vllm/v1/kv_cache_layout.py): the order of dimensions in memory.
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", "apart"]


def caches(layout: str, seed: int = 0, content: int = CONTENT) -> list[torch.Tensor]:
    """Return a view [blocks, heads, tokens, content] a layer; "apart" is one allocation a layer."""
    dice = torch.Generator().manual_seed(seed)
    sizes = SIZES | {"C": content}
    values = torch.randint(
        0, 2**15, [sizes[name] for name in "LBHNC"], dtype=torch.int16, generator=dice
    )
    if layout == "apart":
        return [layer.clone() for layer in values]
    memory = torch.empty([sizes[name] for name in layout], dtype=torch.int16)
    views = memory.permute([layout.index(name) for name in "LBHNC"])
    views.copy_(values)
    return list(views)


def stack(views: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([view.clone() for view in views])


def move(source: DeviceRegion, target: DeviceRegion, ids: list[int], to: list[int]) -> None:
    staging = torch.full((len(ids) * source.geometry.block_bytes + 3,), 0x5A, dtype=torch.uint8)
    source.gather(ids, staging)
    assert staging[-3:].tolist() == [0x5A] * 3
    target.scatter(to, staging)


@given(
    ours=st.sampled_from(LAYOUTS),
    theirs=st.sampled_from(LAYOUTS),
    tables=st.lists(st.permutations(range(BLOCKS)), min_size=2, max_size=2),
    count=st.integers(1, BLOCKS),
)
def test_blocks_pass_between_any_two_physical_layouts(
    ours: str, theirs: str, tables: list[list[int]], count: int
) -> None:
    ids, to = (table[:count] for table in tables)
    source, target = caches(ours, 1), caches(theirs, 2)
    want = stack(target)
    want[:, to] = stack(source)[:, ids]
    move(device_region(source, BLOCKS), device_region(target, BLOCKS), ids, to)
    assert torch.equal(stack(target), want)


@pytest.mark.parametrize("content", [CONTENT, 16])
def test_the_digest_is_that_of_the_same_pages_in_host_memory(content: int) -> None:
    """Pages may or may not be whole rows of 64 bytes."""
    dice = torch.Generator().manual_seed(3)
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, content)
    cache = torch.randint(0, 2**15, shape, dtype=torch.int16, generator=dice)
    page = cache[0, 0].nbytes
    geometry = KvGeometry(LAYERS, BLOCKS, page, BLOCKS * page, page)
    host = KvRegion(cache.data_ptr(), cache.nbytes, geometry)
    views = [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in cache]
    apart = device_region(views, BLOCKS)
    assert apart.digests([4, 1, 2]) == host.digests([4, 1, 2]) != host.digests([4, 2, 1])
    own = device_region(list(torch.zeros_like(cache)), BLOCKS)
    assert own.copy_from(apart, [4, 1], [0, 5]) == host.digests([4, 1])
    assert own.digests([0, 5]) == host.digests([4, 1])
    with pytest.raises(KvTransferError):
        own.copy_from(apart, [4, 1], [0])


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_digests_do_not_depend_on_the_physical_layout(layout: str, split: int) -> None:
    """Where blocks are runs of bytes, rows are summed in the order in which they lie in memory."""
    regions = [
        device_region(caches(each, content=16), BLOCKS // split) for each in (layout, "apart")
    ]
    assert regions[0].digests([2, 0]) == regions[1].digests([2, 0]) != regions[0].digests([0, 2])


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
def test_a_digest_copies_few_blocks_at_a_time(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    region, ids = device_region(caches(layout, content=16), BLOCKS), [4, 1, 2, 5, 0]
    whole = region.digests(ids)
    monkeypatch.setattr(gpu_memory, "DIGEST_BYTES", 2 * region.geometry.block_bytes)
    sums, pieces = region._sums, []
    monkeypatch.setattr(region, "_sums", lambda x: pieces.append(x) or sums(x))
    assert region.digests(ids) == whole
    assert pieces == [[4, 1], [2, 5], [0]]


def test_some_heads_of_each_block_pass_alone() -> None:
    """The producer's head 3 of four becomes the second of the consumer's."""
    source, target = caches("LBNHC", 1), caches("LHBNC", 2)
    want = stack(target)
    want[:, 5, 1] = stack(source)[:, 2, 3]
    regions = device_region(source, BLOCKS), device_region(target, BLOCKS)
    head = regions[0].geometry.page_bytes // HEADS
    every = range(LAYERS)
    theirs, ours = (
        regions[0].narrowed(every, 3 * head, head),
        regions[1].narrowed(every, head, head),
    )
    move(theirs, ours, [2], [5])
    assert torch.equal(stack(target), want)
    assert regions[0].narrowed(every, 3 * head, head) is theirs  # made once
    for start, size in ((0, head - 1), (1, head), (HEADS * head, head), (0, 0)):
        with pytest.raises(KvTransferError, match="not whole heads"):
            regions[0].narrowed(every, start, size)


def test_a_block_may_be_several_of_the_kernels() -> None:
    source, target = caches("LBHNC", 1), caches("LBNHC", 2)
    want = stack(target)
    want[:, [2, 3]] = stack(source)[:, [4, 5]]
    move(device_region(source, BLOCKS // 2), device_region(target, BLOCKS // 2), [2], [1])
    assert torch.equal(stack(target), want)


@pytest.mark.parametrize("ids", [[BLOCKS], [-1], [1, 1]])
def test_a_block_table_of_another_cache_is_refused(ids: list[int]) -> None:
    with pytest.raises(KvTransferError):
        device_region(caches("LBHNC"), BLOCKS).gather(ids, torch.zeros(10**4, dtype=torch.uint8))


def test_a_layout_unknown_to_vllm_is_refused() -> None:
    for views, blocks in (
        ([torch.zeros(4, 2, 4)], 4),
        ([torch.zeros(4, 2, 8, 4).transpose(2, 3)], 4),
        ([torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 4, 4)], 4),
        ([torch.zeros(4, 2, 4, 8)], 3),
    ):
        with pytest.raises(UnsupportedLayout):
            device_region(views, blocks)


def test_a_thread_takes_the_gpu_on_which_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    region: Any = device_region(list(torch.zeros((1, 2, 1, 4, 8))), 2)
    region.enter_thread()
    assert not taken  # in host memory
    region.views = (SimpleNamespace(device=torch.device("cuda", 1)),)
    region.enter_thread()
    assert taken == [torch.device("cuda", 1)]


def test_copies_of_many_links_take_the_memory_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's KV cache is smaller by as much (`ConnectorConfig.device_bytes`)."""
    began, go = threading.Semaphore(0), threading.Event()

    def sums_of(region: DeviceRegion, staging: torch.Tensor) -> torch.Tensor:
        began.release()
        assert go.wait(WAIT_S)
        return torch.zeros(2, 1, 2, dtype=torch.int64)

    monkeypatch.setattr(DeviceRegion, "_sums_of", sums_of)
    region = device_region(caches("LBHNC"), BLOCKS)
    with ThreadPoolExecutor(2 * DEVICE_COPIES) as links:
        for _ in range(DEVICE_COPIES):
            links.submit(region.digests, [0])
            links.submit(region.copy_from, region, [1], [1])
        try:
            assert all(began.acquire(timeout=WAIT_S) for _ in range(DEVICE_COPIES))
            assert not gpu_memory._copying.acquire(blocking=False)
        finally:
            go.set()
        assert all(began.acquire(timeout=WAIT_S) for _ in range(DEVICE_COPIES))
