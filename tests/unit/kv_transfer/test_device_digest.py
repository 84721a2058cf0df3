"""Digests of KV in GPU memory: of what moves and of nothing else, whatever the two ends' layouts;
and what they find on the way. The kernel that makes them is held to this in
test_gather_triton.py."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kv_transfer.device.digest import FIRST, SECOND, STEP
from kv_transfer.digest import SAMPLED_EVERY, DigestMode
from kv_transfer.reshard import Span
from kv_transfer.step import SourceEnded, SourceExpected, SourceProgress, TargetStart
from tests.unit.kv_transfer.flips import FlippingTransport, Flips
from tests.unit.kv_transfer.rig import TOKENS, Rig, until
from tests.unit.kv_transfer.test_kv_block_sizes import GPU, pool
from tests.unit.kv_transfer.torch_mover import DeviceCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_transfer.device.region import DeviceRegion
    from tests.unit.kv_transfer.test_kv_block_sizes import Pool

LAYERS, BLOCKS, HEADS, CONTENT = 2, 6, 3, 5
MASK = 2**64 - 1


def mixed(value: int) -> int:
    for shift, factor in ((30, FIRST), (27, SECOND)):
        value = (value ^ value >> shift) * factor & MASK
    return value ^ value >> 31


def filled(layout: str, block_size: int, table: list[int], tokens: int, skip: int) -> DeviceCache:
    """A cache whose blocks hold the numbers of a prompt from token `skip` of the first on."""
    cache = DeviceCache(layout, (LAYERS, BLOCKS, HEADS, block_size, CONTENT))
    for n in range(tokens):
        block, token = divmod(n + skip, block_size)
        for layer in range(LAYERS):
            for head in range(HEADS):
                start = ((layer * tokens + n) * HEADS + head) * CONTENT
                for i in range(CONTENT):
                    cache.cells[layer, table[block], head, token, i] = (start + i) * 7 % 251
    return cache


@pytest.mark.parametrize(("layout", "block_size", "skip"), [("NHD", 8, 3), ("HND", 16, 0)])
def test_it_is_the_sum_that_it_is_said_to_be(layout: str, block_size: int, skip: int) -> None:
    tokens, table = 19, [4, 1, 3]
    region = filled(layout, block_size, table, tokens, skip).region
    count = LAYERS * tokens * HEADS * CONTENT
    want = sum(mixed((n * 7 % 251 + (n + 1) * STEP) & MASK) for n in range(count)) & MASK
    held = table[: -(-(tokens + skip) // block_size)]
    assert region.digest(held, Span(skip, skip + tokens)) == want


def test_what_changes_changes_it_and_nothing_else_does() -> None:
    cache = filled("NHD", 8, [4, 1, 3], 19, 0)
    dice, tokens = random.Random(1), Span(0, 19)
    before = cache.region.digest([4, 1, 3], tokens)
    for _ in range(40):
        token = dice.randrange(24)
        cell = (dice.randrange(LAYERS), [4, 1, 3][token // 8], dice.randrange(HEADS), token % 8)
        bit = 1 << dice.randrange(8)
        cache.cells[cell][dice.randrange(CONTENT)] ^= bit
        after = cache.region.digest([4, 1, 3], tokens)
        assert (after == before) == (token >= 19)
        before = after
    cache.cells[0, 0] ^= 255
    assert cache.region.digest([4, 1, 3], tokens) == before
    assert cache.region.digest([4, 3, 1]) != cache.region.digest([4, 1, 3])
    one = cache.region.geometry.page_bytes // HEADS
    heads = {cache.region.narrowed(n * one, one).digest([4, 1, 3], tokens) for n in range(HEADS)}
    assert len(heads) == HEADS


class DeviceFlips(Flips):
    """Of one element of the chunk's first block."""

    def strike(self, region: DeviceRegion, block_ids: list[int]) -> None:  # type: ignore[override]
        self.seen += 1
        if self.left:
            self.left -= 1
            region.views[-1][block_ids[0], 0, 0, 0] ^= 4


@pytest.fixture(params=GPU)
def rig(request: pytest.FixtureRequest, clean: None) -> Iterator[tuple[Rig, DeviceFlips]]:
    flips, make = DeviceFlips(), GPU[request.param]()
    made = Rig(lambda: FlippingTransport(make(), flips))
    yield made, flips
    made.close()


def moved(source: Pool, target: Pool, transfer_id: str, tokens: int) -> None:
    """One transfer into blocks of which each chunk fills one."""
    (ours,), (theirs,) = source.workers, target.workers
    sizes = [each.ranks[0].shard.pool.block_size for each in (source, target)]
    table, to = (list(range(-(-tokens // size))) for size in sizes)
    start = TargetStart(
        transfer_id, f"d-{transfer_id}", (ours.half.address,), ours.instance_id, 0, tokens, to
    )
    target.step(starts=[start])
    source.step(expected=[SourceExpected(transfer_id, f"p-{transfer_id}")])
    source.step(progress=[SourceProgress(transfer_id, table, tokens)])
    source.step(ended=[SourceEnded(transfer_id, TOKENS, held=True)])
    until(lambda: ours.is_empty and theirs.is_empty, ours, theirs)
    theirs.collect()


@pytest.mark.parametrize("block_size", [16, 24])
def test_a_flipped_bit_on_a_gpu_is_sent_again_and_exact(
    rig: tuple[Rig, DeviceFlips], block_size: int
) -> None:
    made, flips = rig
    settings = {"chunk_bytes": 1, "digest": DigestMode.ALWAYS}
    source = pool(made, "s", (1, 16), "NHD", **settings)
    target = pool(made, "t", (1, block_size), "HND", **settings)
    (worker,) = target.workers
    flips.left = 1
    moved(source, target, "t", 70)
    assert worker.arrivals["d-t"].report.digest_mismatches == 1
    assert worker.failed == []
    held = [source.ranks[0].worker.made, target.ranks[0].worker.made]
    regions = [cache.region for cache in held if cache is not None]
    tables = [list(range(-(-70 // size))) for size in (16, block_size)]
    digests = {r.digest(t, Span(0, 70)) for r, t in zip(regions, tables, strict=True)}
    assert len(digests) == 1
    flips.left = 1000
    moved(source, target, "u", 70)
    assert worker.failed == ["d-u"]
    assert worker.codes == {"d-u": "transfer_corrupted"}


def test_a_gpus_chunks_are_sampled_unless_told_otherwise(rig: tuple[Rig, DeviceFlips]) -> None:
    made, flips = rig
    source = pool(made, "s", (1, 8), "NHD", chunk_bytes=1)
    target = pool(made, "t", (1, 8), "NHD")
    (worker,) = target.workers
    flips.left = 1000
    moved(source, target, "t", 40)  # five chunks, the first of which is looked at, then all
    assert worker.failed == ["d-t"]
    flips.left, flips.seen = 0, 0
    while flips.seen < SAMPLED_EVERY:
        moved(source, target, f"u{flips.seen}", 40)
    assert worker.failed == ["d-t"]
    assert worker.half.counters.digest_mismatches == 2
