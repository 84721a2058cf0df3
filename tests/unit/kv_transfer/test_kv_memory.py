"""Regions, shared memory and the write fence, also against processes that die or stand still."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.digest import NO_DIGEST, digest
from kv_transfer.errors import KvTransferError, UnsupportedLayout
from kv_transfer.layout import PagePart
from kv_transfer.memory import KvRegion, PeerMemory, SharedMemory, WriteFence, boot_id, parts_of
from tests.patience import WAIT_S
from tests.unit.kv_transfer.caches import Cache, geometry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.layout import KvGeometry

ROOT = Path(__file__).resolve().parents[3]


@st.composite
def shapes(draw: Any, layers: int, page: int) -> KvGeometry:
    """Any geometry of these pages that vLLM could make."""
    return geometry(
        layers,
        draw(st.integers(1, 12)),
        page,
        layers_inside=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 0, 8])),
    )


@given(st.data(), st.integers(1, 4), st.sampled_from([1, 16, 40, 64, 1088]), st.booleans())
def test_a_copy_moves_the_named_blocks_and_nothing_else(
    data: Any, layers: int, page: int, digests: bool
) -> None:
    ours = Cache(data.draw(shapes(layers, page)), seed=1)
    theirs = Cache(data.draw(shapes(layers, page)), seed=2)
    ids = st.integers(0, ours.region.geometry.num_blocks - 1)
    to = data.draw(st.lists(ids, unique=True, max_size=12))
    blocks = theirs.region.geometry.num_blocks
    origin = st.integers(0, blocks - 1)
    source = data.draw(
        st.one_of(
            st.lists(origin, min_size=len(to), max_size=len(to)),
            st.builds(lambda s: [(s + i) % blocks for i in range(len(to))], origin),
        )
    )
    before, want = theirs.snapshot(), bytearray(ours.snapshot())
    for s, d in zip(source, to, strict=True):
        for layer, content in enumerate(theirs.block(s)):
            start = ours.region.geometry.page_offset(layer, d)
            want[start : start + page] = content
    mark = ours.region.copy_from(theirs.region, source, to, digests)
    assert mark == (digest(theirs.region.pages(source)) if digests else NO_DIGEST)
    assert ours.region.digest(to) == digest(ours.region.pages(to))
    assert ours.snapshot() == want
    assert theirs.snapshot() == before


@pytest.mark.parametrize(
    ("source", "to", "match"),
    [
        ([0], [0, 1], "1 blocks for 2 places"),
        ([0, 1], [0], "2 blocks for 1 places"),
        ([24], [0], "outside"),
        ([0], [24], "outside"),
        ([-1], [0], "outside"),
        ([0], [-1], "outside"),
        ([0, 1, 2], [3, 4, 2**62], "outside"),
    ],
)
def test_a_copy_that_names_no_blocks_writes_nothing(
    source: list[int], to: list[int], match: str
) -> None:
    ours, theirs = Cache(geometry(), seed=1), Cache(geometry(), seed=2)
    before = ours.snapshot()
    with pytest.raises(KvTransferError, match=match):
        ours.region.copy_from(theirs.region, source, to)
    assert ours.snapshot() == before


@pytest.mark.parametrize("other", [geometry(layers=2), geometry(page=32)])
def test_regions_of_other_pages_are_not_copied(other: KvGeometry) -> None:
    ours, theirs = Cache(geometry(), seed=1), Cache(other, seed=2)
    with pytest.raises(KvTransferError, match="differ"):
        ours.region.copy_from(theirs.region, [0], [0])


@given(st.data(), st.integers(1, 24))
def test_a_part_of_each_page_moves_between_pages_of_any_length(data: Any, size: int) -> None:
    """Into an equal part of each of the target's pages, and nothing beside it changes."""
    ours, theirs = Cache(geometry(page=24), seed=1), Cache(geometry(page=40), seed=2)
    part = PagePart(
        data.draw(st.integers(0, 40 - size)), data.draw(st.integers(0, 24 - size)), size
    )
    before = ours.blocks()
    to, source = parts_of(ours.region, theirs.region, part)
    to.copy_from(source, [4, 5, 0], [7, 8, 20])
    want = list(before)
    for s, d in ((4, 7), (5, 8), (0, 20)):
        want[d] = [
            old[: part.target_start]
            + new[part.source_start : part.source_start + size]
            + old[part.target_start + size :]
            for old, new in zip(before[d], theirs.block(s), strict=True)
        ]
    assert ours.blocks() == want


def test_a_part_that_is_the_whole_page_is_the_region_itself() -> None:
    """So that neighbouring blocks still move as one."""
    region = Cache(geometry(page=24), seed=1).region
    assert region.narrowed(0, 24) is region
    assert parts_of(region, region, None) == (region, region)


@pytest.mark.parametrize(("start", "size"), [(0, 0), (0, -1), (-1, 2), (0, 65), (1, 64), (64, 1)])
def test_a_page_has_no_part_outside_it(start: int, size: int) -> None:
    with pytest.raises(KvTransferError, match="of a page of 64"):
        Cache(geometry(), seed=1).region.narrowed(start, size)


def test_the_pages_of_blocks_are_views_of_them_by_layer() -> None:
    cache = Cache(geometry(gap=8), seed=1)
    pages = [bytes(p) for p in cache.region.pages([5, 2])]
    assert pages == [cache.block(b)[layer] for layer in range(3) for b in (5, 2)]


@pytest.mark.parametrize("block", [-1, 24])
def test_there_are_no_pages_outside_the_cache(block: int) -> None:
    """Behind the last block of a layer lies the first one of the next."""
    with pytest.raises(KvTransferError, match="outside"):
        Cache(geometry(), seed=1).region.pages([0, block])


def test_a_layout_longer_than_its_cache_is_refused() -> None:
    cache = Cache(geometry(), seed=1)
    with pytest.raises(UnsupportedLayout, match="spans"):
        KvRegion(cache.region.address, 100, geometry())


# -- shared memory


@pytest.fixture
def shared() -> Iterator[Cache]:
    cache = Cache(geometry(), seed=1, shared=True)
    yield cache
    cache.close()


def peer_of(cache: Cache, **changed: Any) -> PeerMemory:
    """The cache as another worker maps it."""
    assert cache.shared is not None
    wanted = {
        "path": cache.shared.path,
        "inode": cache.shared.inode,
        "size": cache.shared.size,
        "geometry": cache.region.geometry,
    }
    return PeerMemory(**{**wanted, **changed})


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_peer_writes_where_the_owner_reads_and_leaves_nothing_open(shared: Cache) -> None:
    theirs = Cache(geometry(), seed=2)
    before, mapped = open_descriptors(), Path("/proc/self/maps").read_text(encoding="ascii")
    for _ in range(3):
        peer = peer_of(shared)
        peer.region.copy_from(theirs.region, [3, 4], [7, 9])
        peer.close()
        peer.close()
    assert [shared.block(7), shared.block(9)] == [theirs.block(3), theirs.block(4)]
    assert open_descriptors() == before
    count = Path("/proc/self/maps").read_text(encoding="ascii").count("test-kv")
    assert count == mapped.count("test-kv")


def test_memory_closed_by_its_owner_stays_with_whoever_mapped_it(shared: Cache) -> None:
    peer = peer_of(shared)
    shared.close()
    peer.region.copy_from(Cache(geometry(), seed=2).region, [0], [0])
    peer.close()
    with pytest.raises((OSError, ValueError)):
        peer_of(shared)


def test_a_path_of_a_peer_leads_to_sealed_memory_or_nowhere(shared: Cache, tmp_path: Path) -> None:
    """A peer may name any path; no file of this user may be opened for writing because of it."""
    assert shared.shared is not None
    size = shared.shared.size
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(size))
    plain = os.memfd_create("plain")
    os.ftruncate(plain, size)
    before = open_descriptors()
    with victim.open("r+b") as opened:
        read, write = os.pipe()
        refused: list[dict[str, Any]] = [
            {"path": str(victim)},
            {"path": f"/proc/{os.getpid()}/fd/../fd/{shared.shared.fd}"},
            {"path": f"/proc/{os.getpid()}/fd/{opened.fileno()}", "inode": victim.stat().st_ino},
            {"path": f"/proc/{os.getpid()}/fd/{plain}", "inode": os.fstat(plain).st_ino},
            {"path": f"/proc/{os.getpid()}/fd/{read}"},
            {"path": f"/proc/{os.getpid()}/fd/999999"},
            {"path": "/dev/null"},
            {"path": ""},
            {"inode": shared.shared.inode + 1},
            {"size": size - 1},
            {"size": size + 1},
            {"size": 0},
            {"size": -1},
            {"size": 2**62},
            {"geometry": geometry(blocks=25)},
        ]
        for change in refused:
            with pytest.raises((OSError, ValueError)):
                peer_of(shared, **change)
        os.close(read)
        os.close(write)
    assert open_descriptors() == before
    assert victim.read_bytes() == bytes(size)
    os.close(plain)


def test_shared_memory_cannot_shrink_under_a_peer(shared: Cache) -> None:
    assert shared.shared is not None
    with pytest.raises(PermissionError):
        os.ftruncate(shared.shared.fd, 0)


def test_processes_of_one_kernel_agree_on_its_name() -> None:
    command = [sys.executable, "-c", "from kv_transfer.memory import boot_id; print(boot_id())"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == boot_id() != ""


# -- the fence


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    shared = SharedMemory("test-fence")
    shared.grow(4096)
    yield shared
    shared.close()


def fence_of_source(memory: SharedMemory, slot: int) -> tuple[WriteFence, int]:
    fd = os.open(memory.path, os.O_RDWR | os.O_CLOEXEC)
    return WriteFence(fd, slot), fd


def test_a_sealed_fence_is_not_entered_again(memory: SharedMemory) -> None:
    target = WriteFence(memory.fd, 1)
    source, fd = fence_of_source(memory, 1)
    for _ in range(2):
        assert source.enter()
        assert not target.seal()
        source.leave()
    assert target.seal()
    assert target.seal()
    assert not source.enter()
    os.close(fd)


def test_links_have_fences_of_their_own(memory: SharedMemory) -> None:
    (first, one), (second, two) = fence_of_source(memory, 1), fence_of_source(memory, 2)
    assert first.enter()
    assert WriteFence(memory.fd, 2).seal()
    assert not second.enter()
    assert not WriteFence(memory.fd, 1).seal()
    first.leave()
    assert first.enter()
    os.close(one)
    os.close(two)


CHILD = """
import os, sys, time
from kv_transfer.memory import WriteFence
fence = WriteFence(os.open(sys.argv[1], os.O_RDWR), 1)
print(fence.enter(), flush=True)
sys.stdin.readline()
fence.leave()
print(fence.enter(), flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def source_process(memory: SharedMemory) -> Iterator[subprocess.Popen[str]]:
    """A source that is inside a copy until it reads a line, and then tries to begin another."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, memory.path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def state_of(process: subprocess.Popen[str]) -> str:
    stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0]


def test_a_source_killed_inside_a_copy_writes_no_more(memory: SharedMemory) -> None:
    target = WriteFence(memory.fd, 1)
    with source_process(memory) as process:
        assert not target.seal()
        process.kill()
        process.wait(WAIT_S)
        assert target.seal()


def test_a_source_stopped_inside_a_copy_may_still_write(memory: SharedMemory) -> None:
    target = WriteFence(memory.fd, 1)
    with source_process(memory) as process:
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + WAIT_S
        while state_of(process) != "T":
            assert time.monotonic() < until
        assert not target.seal()
        process.kill()
        process.wait(WAIT_S)
        assert target.seal()


def test_a_source_that_leaves_its_copy_finds_the_fence_sealed(memory: SharedMemory) -> None:
    target = WriteFence(memory.fd, 1)
    with source_process(memory) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.send_signal(signal.SIGSTOP)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert not target.seal()
        process.send_signal(signal.SIGCONT)
        # It leaves and enters at once: either may win, and who lost must know.
        entered = process.stdout.readline() == "True\n"
        assert target.seal() is not entered


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["enter", "leave", "seal"]), max_size=12))
def test_nobody_is_inside_a_sealed_fence(steps: list[str]) -> None:
    memory = SharedMemory("test-fence")
    memory.grow(4096)
    target = WriteFence(memory.fd, 1)
    source, fd = fence_of_source(memory, 1)
    inside = sealed = False
    for step in steps:
        if step == "enter":
            assert source.enter() is not sealed
            inside = not sealed
        elif step == "leave":
            source.leave()
            inside = False
        else:
            assert target.seal() is not inside
            sealed = not inside
    os.close(fd)
    memory.close()
