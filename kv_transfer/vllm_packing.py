"""How vLLM's CPU attention packs the tokens of a block, found out by asking the kernel that writes
them. Tried on vLLM 0.32.0 with its packings vec, vec16 and amx.

A page is [heads, tokens, 2 * head size]. The kernel takes each head's part of it as keys and behind
them values, and turns both, keys over the whole block, into what its instructions read best; no
element is changed. So where each goes can be told by writing their numbers.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
import torch

from kv_transfer.errors import UnsupportedLayout
from kv_transfer.tokens import TokenOrder

# What every CPU kernel's block size is a multiple of: others are never asked for.
_BLOCK_STEP = 32
# Small whole numbers, which every dtype of KV holds exactly.
_BASE = 128


def isa_of(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """The name of the packing."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_size, head_size))


@lru_cache(maxsize=8)
def order_of(dtype: torch.dtype, head_size: int, isa: str, block_size: int) -> TokenOrder:
    """For blocks of this size. Raises UnsupportedLayout where the packing keeps no token apart, or
    where blocks of this size are packed in another way."""
    if block_size < 1 or block_size % _BLOCK_STEP or isa_of(dtype, block_size, head_size) != isa:
        raise UnsupportedLayout(f"blocks of {block_size} tokens are not packed as {isa}")
    content = 2 * head_size
    numbers = torch.arange(block_size * content).view(block_size, 1, content)
    digits = [_packed(numbers // _BASE**n % _BASE, dtype, isa) for n in range(3)]
    found = sum(digit * _BASE**n for n, digit in enumerate(digits))
    assert isinstance(found, torch.Tensor)
    if not torch.equal(found.sort().values, numbers.flatten()):
        raise UnsupportedLayout(f"packing {isa} of {dtype} does not keep tokens apart")
    places = found.argsort().numpy().astype(np.int64).reshape(block_size, content)
    remake = partial(order_of, dtype, head_size, isa)
    return TokenOrder(places, dtype.itemsize, remake)


def _packed(values: torch.Tensor, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """What a page of one block and head holds when these [tokens, 1, 2 * head size] are written."""
    from vllm import _custom_ops as ops

    block_size, _, content = values.shape
    page = torch.zeros(1, 1, 2 * block_size, content // 2, dtype=dtype)
    key, value = (half.to(dtype).contiguous() for half in values.chunk(2, dim=2))
    keys, their_values = page.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, keys, their_values, torch.arange(block_size), isa)
    return page.flatten().to(torch.int64)
