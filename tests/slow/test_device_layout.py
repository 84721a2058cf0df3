"""The layouts of a KV cache in GPU memory, as vLLM itself makes the views, read by our region."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kv_transfer.cache.gpu_memory import device_region
from kv_transfer.vllm.connector import PdConnector

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_SIZE = 3, 5, 2, 32, 8


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("kernel_tokens", [32, 16])
def test_a_block_leaves_in_one_form_from_every_layout(
    layout: KVCacheLayout, kernel_tokens: int
) -> None:
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    page = spec.page_size_bytes
    layer_stride, block_stride = compute_layout_strides(spec, BLOCKS, LAYERS, layout)[:2]
    size = page * BLOCKS * LAYERS
    raw = torch.zeros(size, dtype=torch.int8)
    names = [str(n) for n in range(LAYERS)]
    tensor = KVCacheTensor(size, names, layer_stride, block_stride)
    if kernel_tokens != TOKENS and block_stride != page:
        with pytest.raises(ValueError, match="dense, unpadded pages"):
            create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_tokens)
        return
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_tokens)
    for layer, view in enumerate(views):
        tokens = torch.arange(view.shape[0] * kernel_tokens).view(view.shape[0], kernel_tokens)
        for head in range(HEADS):
            view[:, head, :, :] = (tokens * 8 + layer * 2 + head)[:, :, None].to(view.dtype)
    region = device_region(views, BLOCKS)
    assert region.geometry.block_bytes == page * LAYERS
    assert (region.block_layout is not None) == layout.is_block_outermost
    if layout.is_block_outermost:
        block = ctypes.string_at(region.block_address(3), page * LAYERS)
        assert block == raw[3 * page * LAYERS : 4 * page * LAYERS].numpy().tobytes()
    staging = torch.zeros(page * LAYERS, dtype=torch.uint8)
    region.gather([3], staging)
    split = TOKENS // kernel_tokens
    wire = staging.view(torch.bfloat16).view(LAYERS, split, HEADS, kernel_tokens, 2 * HEAD_SIZE)
    want = torch.arange(3 * TOKENS, 4 * TOKENS).view(split, kernel_tokens)
    for layer in range(LAYERS):
        for head in range(HEADS):
            numbers = (want * 8 + layer * 2 + head).bfloat16()
            assert (wire[layer, :, head] == numbers[:, :, None]).all()


@pytest.mark.parametrize(
    ("device", "block_size", "is_hybrid", "asks"),
    [
        ("cuda", 16, False, True),
        ("cuda", 16, True, False),  # with several ranks, the size that vLLM asks with is not final
        ("cuda", 128, False, False),
        ("cpu", 16, False, False),
    ],
)
def test_a_gpu_is_asked_for_blocks_that_are_one_run_of_bytes(
    device: str, block_size: int, is_hybrid: bool, asks: bool
) -> None:
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(is_hybrid=is_hybrid),
        cache_config=SimpleNamespace(block_size=block_size),
    )
    name = PdConnector.get_required_kvcache_layout(config)
    assert (name is not None) == asks
    assert name is None or KVCacheLayout[name].is_block_outermost


def test_vllm_is_told_that_a_cache_that_peers_map_cannot_sleep() -> None:
    """vLLM 0.33 refuses `enable_sleep_mode` then."""
    assert not PdConnector.supports_sleep_mode(KVTransferConfig())
