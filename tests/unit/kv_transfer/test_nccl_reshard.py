"""The whole way of a request's KV without a GPU: plan, gather into slots, NCCL, scatter; from one
prefill GPU to a decode pool of another TP and block size, with a fault on the way."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest
import torch

from kv_transfer.gather import PageLayout, RankCache, gather, paged, scatter
from kv_transfer.nccl.binding import Result
from kv_transfer.reshard import Piece, PoolLayout, Span, plan_all, split
from tests.unit.kv_transfer.nccl_world import SLOT_BYTES, World

CHANNELS, LAYERS, HEADS, TOKENS = 2, 2, 4, 27
TABLES = ([5, 0, 3, 2], [1, 2])
POISON = -1


def pool(tp: int, block_size: int) -> PoolLayout:
    return PoolLayout(
        tp=tp,
        stage_layers=(LAYERS,),
        num_kv_heads=HEADS,
        head_bytes=2 * CHANNELS * 2,
        block_size=block_size,
        dtype="int16",
    )


def rank_cache(layout: PoolLayout, rank: int, blocks: int) -> RankCache:
    shape = (2, blocks, layout.block_size, len(layout.heads(rank)), CHANNELS)
    caches = [torch.full(shape, POISON, dtype=torch.int16) for _ in range(LAYERS)]
    views = tuple(paged(cache, PageLayout.PLANES_BLOCKS_TOKENS) for cache in caches)
    return RankCache(layout.layers(rank), layout.heads(rank), views)


def place(cache: RankCache, table: list[int], layer: int, token: int) -> torch.Tensor:
    """[planes, heads, channels] of one token."""
    block, offset = table[token // cache.block_size], token % cache.block_size
    return cache.views[layer][block, :, offset]


@pytest.mark.parametrize("breaks_at", [None, 0, 7])
def test_kv_reaches_a_pool_of_other_shape_whole_in_spite_of_an_error(
    breaks_at: int | None,
) -> None:
    prefill, decode = pool(1, 8), pool(2, 16)
    world = World(decodes=2)
    source = rank_cache(prefill, 0, 6)
    targets = [rank_cache(decode, rank, 4) for rank in range(2)]
    truth = torch.arange(LAYERS * TOKENS * 2 * HEADS * CHANNELS, dtype=torch.int16)
    truth = truth.view(LAYERS, TOKENS, 2, HEADS, CHANNELS)
    for layer, token in product(range(LAYERS), range(TOKENS)):
        place(source, TABLES[0], layer, token).copy_(truth[layer, token])

    waiting: deque[tuple[str, Piece]] = deque()
    for piece in plan_all(prefill, decode, tokens=Span(0, TOKENS), spread=1):
        for part in split(piece, head_bytes=prefill.head_bytes, slot_bytes=SLOT_BYTES):
            waiting.append((f"t:{len(waiting)}", part))
    flying: dict[str, tuple[Piece, int]] = {}
    total = len(waiting)
    arrived = 0
    while arrived < total:
        while (
            waiting
            and world.prefill.ring.free
            and world.decodes[waiting[0][1].target_rank].ring.free
        ):
            op_id, part = waiting.popleft()
            process = world.decodes[part.target_rank]
            size = part.size_bytes(prefill.head_bytes)
            sent = world.prefill.ask(process, op_id, size_bytes=size)
            staging = torch.frombuffer(world.prefill.memory, dtype=torch.uint8)
            gather(source, part, TABLES[0], staging[sent * SLOT_BYTES : (sent + 1) * SLOT_BYTES])
            flying[op_id] = part, process.ask(world.prefill, op_id, size_bytes=size)
        if arrived == breaks_at:
            world.decodes[0].nccl.break_comms(Result.REMOTE_ERROR)
            breaks_at = None
        world.step()
        for op_id, (part, slot) in list(flying.items()):
            process = world.decodes[part.target_rank]
            ended = process.outcome(op_id)
            if ended is not None:
                assert ended.reason == ""
                staging = torch.frombuffer(process.memory, dtype=torch.uint8)
                target = targets[part.target_rank]
                slot_bytes = staging[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
                scatter(target, part, TABLES[1], slot_bytes)
                del flying[op_id]
                arrived += 1
    for rank, target in enumerate(targets):
        heads = decode.heads(rank)
        for layer, token in product(range(LAYERS), range(TOKENS)):
            expected = truth[layer, token, :, heads.start : heads.end]
            assert torch.equal(place(target, TABLES[1], layer, token), expected)
        untouched = sum(int((view == POISON).sum()) for view in target.views)
        assert (
            untouched == sum(v.numel() for v in target.views) - LAYERS * TOKENS * 2 * 2 * CHANNELS
        )
    world.assert_quiet()
