"""Layout of vLLM's KV cache, and its allocation in shared memory. Tried on vLLM 0.32.0 (CPU)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch.overrides import TorchFunctionMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend

from kv_transfer.device.region import device_region
from kv_transfer.errors import UnsupportedLayout
from kv_transfer.layout import KvGeometry
from kv_transfer.memory import KvRegion, SharedMemory, prefault
from kv_transfer.protocol.messages import PROTOCOL_VERSION
from kv_transfer.protocol.plan import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig


# Ways to split KV that protocol/plan.py does not know.
_UNSUPPORTED_SPLITS = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


class _SharedZeros(TorchFunctionMode):
    """Answers the one torch.zeros(n, dtype=int8) that allocates the KV cache with `shared`."""

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__()
        self._shared = shared

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_cache = func is torch.zeros and kwargs.get("dtype") is torch.int8 and len(args) == 1
        is_cache = is_cache and torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if not is_cache or self._shared.size or int(args[0]) <= 0:
            return func(*args, **kwargs)
        size = int(args[0])
        self._shared.grow(size)
        cache = torch.from_file(self._shared.path, shared=True, size=size, dtype=torch.int8)
        prefault(cache.data_ptr(), size)
        return cache


@contextmanager
def allocate_in(shared: SharedMemory) -> Iterator[None]:
    """Allocate vLLM's KV cache in `shared` while this is open."""
    with _SharedZeros(shared):
        yield


def _geometry(caches: list[torch.Tensor]) -> KvGeometry:
    first = caches[0]
    item = first.element_size()
    storages = {cache.untyped_storage().data_ptr() for cache in caches}
    if len(storages) != 1:
        raise UnsupportedLayout("the layers' KV caches do not share one allocation")
    if any(cache.shape != first.shape or cache.stride() != first.stride() for cache in caches):
        raise UnsupportedLayout("the layers' KV caches differ in shape")
    if not first[0].is_contiguous():
        raise UnsupportedLayout("a block's page is not contiguous")
    offsets = [int(cache.storage_offset()) * item for cache in caches]
    page = first[0].numel() * item
    stride = offsets[1] - offsets[0] if len(offsets) > 1 else page
    if any(offset != offsets[0] + i * stride for i, offset in enumerate(offsets)):
        raise UnsupportedLayout("the layers are not evenly spaced")
    return KvGeometry(len(caches), first.shape[0], page, stride, first.stride(0) * item, offsets[0])


def region_of(caches: dict[str, torch.Tensor], num_blocks: int, block_size: int) -> KvRegion:
    """Return the KV cache that vLLM registered, in which its scheduler counts `num_blocks` blocks
    of `block_size` tokens. Raises UnsupportedLayout."""
    tensors = list(caches.values())
    if not tensors:
        raise UnsupportedLayout("the model has no KV cache")
    if tensors[0].device.type == "cuda":
        region = device_region(tensors, num_blocks)
        tokens = region.split * tensors[0].shape[2]
        if tokens != block_size:
            raise UnsupportedLayout(f"blocks hold {tokens} tokens, the scheduler has {block_size}")
        return region
    if tensors[0].device.type != "cpu":
        raise UnsupportedLayout(f"the KV cache is on {tensors[0].device}")
    storage = tensors[0].untyped_storage()
    return KvRegion(storage.data_ptr(), storage.nbytes(), _geometry(tensors))


_WITHOUT_DRAFT_KV = ("ngram", "suffix")


def _cpu_packing(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """Name the order in which vLLM's CPU attention packs the tokens of a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_size, head_size))


def shard_of(config: VllmConfig, caches: dict[str, torch.Tensor]) -> Shard:
    """Return the KV heads that this process holds: dimension 1 of [blocks, heads, tokens,
    channels]. Raises UnsupportedLayout."""
    parallel, model = config.parallel_config, config.model_config
    for name in _UNSUPPORTED_SPLITS:
        if (size := getattr(parallel, name)) > 1:
            raise UnsupportedLayout(
                f"{name} is {size}: KV moves only between tensor-parallel ranks"
            )
    first = next(iter(caches.values()))
    if first.dim() != 4:
        raise UnsupportedLayout(f"the KV cache has {first.dim()} dimensions, must have 4")
    block_size, heads = config.cache_config.block_size, first.shape[1]
    shard = Shard(
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_bytes=block_size * first.shape[3] * first.element_size(),
        block_size=block_size,
        tp=parallel.tensor_parallel_size,
        rank=get_tensor_model_parallel_rank(),
    )
    if len(shard.heads) != heads:
        raise UnsupportedLayout(f"{heads} heads in a page, expected {len(shard.heads)}")
    return shard


def describe(
    config: VllmConfig,
    caches: dict[str, torch.Tensor],
    shard: Shard,
) -> dict[str, str]:
    """Return everything that gives the bytes of KV their meaning, for the compatibility key.

    The number of ranks that share the heads is not in it (kv_transfer/protocol/plan.py). An error
    names the field in which two workers differ, with both values.
    """
    first = next(iter(caches.values()))
    packing = "plain"
    if first.device.type == "cpu":
        packing = _cpu_packing(first.dtype, shard.block_size, first.shape[3] // 2)
    speculative = config.speculative_config
    if speculative is not None and speculative.method in _WITHOUT_DRAFT_KV:
        speculative = None
    return {
        "connector": f"pdserve {PROTOCOL_VERSION}",
        "vllm": str(vllm.__version__),
        "model": _model_identity(config),
        "revision": str(config.model_config.revision or "local"),
        "layers": str(len(caches)),
        "kv_heads": str(shard.num_kv_heads),
        "head_content": str(first.shape[3]),
        "dtype": str(first.dtype).removeprefix("torch."),
        # All quantised formats are uint8 to torch.
        "quantised": str(config.cache_config.cache_dtype) if first.dtype is torch.uint8 else "no",
        "speculative": "no" if speculative is None else str(speculative.method),
        "block_size": str(shard.block_size),
        "kernel_block_size": str(first.shape[2]),
        "attention": str(get_current_attn_backend(config, list(caches)).get_name()),
        "packing": packing,
    }


def _model_identity(config: VllmConfig) -> str:
    model = config.model_config
    text = model.hf_text_config
    shape = (
        text.hidden_size,
        text.num_hidden_layers,
        text.num_attention_heads,
        model.get_vocab_size(),
    )
    # The weights are not read: equal names and revisions are taken for equal weights.
    name = str(model.model).rstrip("/").rsplit("/", 1)[-1]
    return f"{name}:{'x'.join(str(n) for n in shape)}"
