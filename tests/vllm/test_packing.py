"""What vLLM's CPU attention writes into blocks of one size is, token by token, what it would write
into blocks of another."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops

from kv_transfer.errors import UnsupportedLayout
from kv_transfer.layout import KvGeometry
from kv_transfer.memory import KvRegion
from kv_transfer.reshard import Span
from kv_transfer.vllm_packing import isa_of, order_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
HEADS, HEAD_SIZE, BLOCKS, TOKENS = 2, 64, 4, 100


def written(
    key: torch.Tensor, value: torch.Tensor, isa: str, block_size: int
) -> tuple[torch.Tensor, list[int]]:
    """A cache [blocks, heads, tokens, 2 * head size] with these tokens, and the blocks they are
    in."""
    dtype = key.dtype
    cache = torch.zeros(BLOCKS, HEADS, block_size, 2 * HEAD_SIZE, dtype=dtype)
    table = [2, 0, 3, 1][: -(-TOKENS // block_size)]
    keys, values = cache.view(BLOCKS, HEADS, 2 * block_size, HEAD_SIZE).chunk(2, dim=2)
    places = [table[n // block_size] * block_size + n % block_size for n in range(TOKENS)]
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.tensor(places), isa)
    return cache, table


def region_of(cache: torch.Tensor, isa: str) -> KvRegion:
    page = cache[0].numel() * cache.itemsize
    geometry = KvGeometry(1, BLOCKS, page, BLOCKS * page, page)
    order = order_of(cache.dtype, HEAD_SIZE, isa, cache.shape[2])
    return KvRegion(cache.data_ptr(), cache.numel() * cache.itemsize, geometry, order)


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [
        ("vec", torch.float32),
        ("vec", torch.bfloat16),
        ("vec16", torch.float16),
        ("amx", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("ours", "theirs"), [(32, 64), (128, 32), (96, 64)])
def test_tokens_moved_lie_as_if_they_had_been_computed_there(
    isa: str, dtype: torch.dtype, ours: int, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.vllm_packing.isa_of", lambda *asked: isa)
    dice = torch.Generator().manual_seed(ours)
    key, value = torch.randn(2, TOKENS, HEADS, HEAD_SIZE, generator=dice).to(dtype)
    (source, table), (want, to) = (written(key, value, isa, size) for size in (ours, theirs))
    target = torch.zeros_like(want)
    moved = region_of(source, isa).take(table, Span(0, TOKENS))
    region_of(target, isa).put(to, TOKENS, moved)
    assert torch.equal(target, want)
    plain = torch.frombuffer(moved, dtype=dtype).view(TOKENS, HEADS, 2, HEAD_SIZE)
    assert torch.equal(plain, torch.stack([key, value], dim=2))


def test_blocks_that_the_kernel_would_pack_otherwise_have_no_order() -> None:
    isa = isa_of(torch.float32, 32, HEAD_SIZE)
    for block_size in (0, 16, 33):
        with pytest.raises(UnsupportedLayout, match=f"blocks of {block_size} tokens"):
            order_of(torch.float32, HEAD_SIZE, isa, block_size)
    with pytest.raises(UnsupportedLayout, match="are not packed as other"):
        order_of(torch.float32, HEAD_SIZE, "other", 32)
