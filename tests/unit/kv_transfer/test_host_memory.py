"""Copies and digests of pages, and the memory of peers."""

from __future__ import annotations

import mmap
import os
import re
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.cache import host_memory as memory
from kv_transfer.cache.geometry import KvGeometry
from kv_transfer.cache.host_memory import KvRegion, PeerMemory, SharedMemory
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from tests.support.kv_caches import HostCache, geometry

if TYPE_CHECKING:
    from collections.abc import Iterator


BLOCKS = 24


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found: str = request.param
    if found == "compiled" and not memory.IS_COMPILED:
        pytest.skip("the extension was not built")
    monkeypatch.setattr(memory, "IS_COMPILED", found == "compiled")
    return found


def shapes(page: int) -> list[KvGeometry]:
    return [
        geometry(page=page),
        geometry(page=page, layers_inside=True),
        geometry(page=page, gap=24),
    ]


@pytest.mark.parametrize("page", [8, 16, 72, 1000, 4096])
def test_a_copy_moves_the_pages_and_nothing_else(way: str, page: int) -> None:
    source_ids, own_ids = [5, 0, 23, 7], [1, 20, 0, 9]
    for ours in shapes(page):
        for theirs in shapes(page):
            source, target = HostCache(theirs, seed=1), HostCache(ours, seed=2)
            want = target.blocks()
            digests = target.region.copy_from(source.region, source_ids, own_ids)
            for s, t in zip(source_ids, own_ids, strict=True):
                want[t] = source.block(s)
            assert target.blocks() == want
            assert digests == source.region.digests(source_ids)
            assert digests == target.region.digests(own_ids)


@pytest.mark.skipif(not memory.IS_COMPILED, reason="the extension was not built")
@given(data=st.data(), page=st.integers(1, 300), layers=st.integers(1, 3), blocks=st.integers(0, 4))
def test_both_ways_make_the_same_digests(data: Any, page: int, layers: int, blocks: int) -> None:
    cache = HostCache(geometry(layers, BLOCKS, page), seed=data.draw(st.integers(0, 9)))
    ids = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=blocks, max_size=blocks))
    compiled = cache.region.digests(ids)
    memory.IS_COMPILED = False
    try:
        assert cache.region.digests(ids) == compiled
    finally:
        memory.IS_COMPILED = True


@given(bit=st.integers(0, 64 * 8 * 3 - 1))
def test_each_bit_counts(bit: int) -> None:
    cache = HostCache(geometry(3, BLOCKS, 64), seed=3)
    before = cache.region.digests([4])
    layer, at = divmod(bit, 64 * 8)
    page = bytearray(cache.block(4)[layer])
    page[at // 8] ^= 1 << at % 8
    cache.put(4, layer, bytes(page))
    assert cache.region.digests([4]) != before


def test_pages_and_rows_that_change_places_count() -> None:
    cache = HostCache(geometry(3, BLOCKS, 64), seed=4)
    first, second, third = cache.block(2)
    before = cache.region.digests([2])
    cache.fill(2, [second, first, third])
    assert cache.region.digests([2]) != before
    cache.fill(2, [first[16:32] + first[:16] + first[32:], second, third])
    assert cache.region.digests([2]) != before
    cache.fill(2, [first, second, third])
    assert cache.region.digests([2]) == before


def test_a_part_of_each_page_is_digested_and_copied_by_itself(way: str) -> None:
    source, target = HostCache(geometry(page=64), seed=5), HostCache(geometry(page=32), seed=6)
    half = source.region.narrowed(range(3), 32, 32)
    digests = target.region.copy_from(half, [3], [8])
    assert target.block(8) == [page[32:] for page in source.block(3)]
    assert digests == half.digests([3]) != source.region.digests([3])
    with pytest.raises(KvTransferError, match="page"):
        source.region.narrowed(range(3), 48, 32)


@pytest.mark.parametrize("bad", [[24], [-1], [2**40]])
def test_an_invalid_block_id_is_refused_before_the_copy(bad: list[int]) -> None:
    source, target = HostCache(geometry(), seed=1), HostCache(geometry(), seed=2)
    before = target.snapshot()
    for from_ids, to_ids in ((bad, [0]), ([0], bad), ([0, 1], [2])):
        with pytest.raises(KvTransferError):
            target.region.copy_from(source.region, from_ids, to_ids)
    with pytest.raises(KvTransferError):
        target.region.digests(bad)
    with pytest.raises(KvTransferError):
        target.region.pages(bad)
    with pytest.raises(KvTransferError, match="differ"):
        target.region.copy_from(HostCache(geometry(page=32), seed=1).region, [0], [0])
    assert target.snapshot() == before


def test_a_layout_beyond_its_memory_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="spans"):
        KvRegion(0, geometry().span_bytes - 1, geometry())


@pytest.fixture
def shared() -> Iterator[HostCache]:
    cache = HostCache(geometry(), seed=7, shared=True)
    yield cache
    cache.close()


def test_a_peer_reads_what_the_owner_writes_and_cannot_write(shared: HostCache) -> None:
    assert shared.shared is not None
    peer = PeerMemory(shared.shared.fd, shared.shared.size, {0: geometry()})
    shared.write(3, seed=9)
    assert [bytes(page) for page in peer.regions[0].pages([3])] == shared.block(3)
    maps = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    assert any(line.split()[1].startswith("r--") for line in maps if "test-kv" in line)
    peer.close()
    peer.close()


def test_pages_of_a_peer_are_mapped_ahead_and_its_empty_ones_stay_empty() -> None:
    made, page = SharedMemory("test-kv-ahead"), mmap.PAGESIZE
    made.grow(64 * page)
    os.pwrite(made.fd, b"x" * page, 40 * page)
    used = os.fstat(made.fd).st_blocks
    peer = PeerMemory(made.fd, made.size, {0: KvGeometry(1, 64, page, page, page)})
    for thread in threading.enumerate():
        if thread.name == "kv-map":
            thread.join()
    smaps = Path("/proc/self/smaps").read_text(encoding="ascii")
    (mapping,) = re.findall(r"test-kv-ahead.*?VmFlags", smaps, re.DOTALL)
    assert f"{page >> 10} kB" in re.findall(r"Rss: +(.*)", mapping)
    assert os.fstat(made.fd).st_blocks == used
    peer.close()
    made.close()


def test_only_sealed_memory_of_the_right_size_is_mapped(shared: HostCache, tmp_path: Any) -> None:
    assert shared.shared is not None
    size = shared.shared.size
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, size)
    one, other = socket.socketpair()
    unsealed = os.memfd_create("test-kv-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, size)
    wrong = [(fd, size) for fd in (plain, unsealed, one.fileno(), 99999)]
    for fd, expected in [*wrong, (shared.shared.fd, size + 4096)]:
        with pytest.raises((OSError, ValueError)):
            PeerMemory(fd, expected, {0: geometry()})
    for fd in (plain, unsealed):
        os.close(fd)
    one.close()
    other.close()


def test_shared_memory_cannot_shrink_under_a_peer() -> None:
    made = SharedMemory("test-kv-seal")
    made.grow(mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(made.fd, 0)
    made.close()
    made.close()
