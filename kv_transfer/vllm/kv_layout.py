"""Layout of vLLM's KV cache, and its allocation in shared memory. Tested with vLLM 0.32.0 and
0.33.0 (CPU)."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch.overrides import TorchFunctionMode
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
from vllm.v1.kv_cache_interface import MambaSpec

from kv_transfer.cache.geometry import GroupKind, KvGeometry
from kv_transfer.cache.gpu_memory import device_region
from kv_transfer.cache.host_memory import KvRegion, SharedMemory
from kv_transfer.errors import UnsupportedLayout
from kv_transfer.protocol.messages import PROTOCOL_VERSION
from kv_transfer.protocol.plan import CopyPlan, Shard
from kv_transfer.vllm.kv_groups import HeldGroup
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig

    from kv_transfer.vllm.kv_groups import LayerGroup, ModelGroup

# Model types whose KV-cache specs `_kind_of` refuses. Refused before their weights are loaded.
_UNSUPPORTED_MODELS = ("deepseek_v41", "glm5_next", "qwen4_exp")
# Methods of speculative decoding whose drafts have no KV. Workers that differ only in these can
# exchange KV, so it is enough that decode workers speculate.
_WITHOUT_DRAFT_KV = ("ngram", "suffix")
# vLLM has two names for one format on NVIDIA's GPUs.
_SAME_DTYPE = {"fp8": "fp8_e4m3"}
# Words in the names of settings that determine the rotation of keys, and the tokens that a layer
# sees. `hf_overrides` can change them without effect on shapes and weights.
_POSITIONS = ("rope", "rotary", "max_position", "window", "attention_chunk", "layer_types")
_LONGEST_VALUE = 80
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 128, 1024  # of each file
# vLLM's backends of experts that launch cooperative kernels.
_COOPERATIVE = ("deepep", "mori", "moonep", "nixl_ep", "pplx")
# Parallelism that splits KV in ways that protocol/plan.py does not support.
_UNSUPPORTED_SPLITS = (
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


class _CacheAllocation(TorchFunctionMode):
    """Replaces the one call torch.zeros(n, dtype=int8) that allocates the KV cache by `allocate`.
    vLLM has no hook for the allocation of a CPU cache, and torch would write to each of its pages,
    which then take memory before a request uses them."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._allocate: Callable[[int], torch.Tensor] | None = allocate

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
        allocate = self._allocate
        if not is_cache or allocate is None or int(args[0]) <= 0:
            return func(*args, **kwargs)
        self._allocate = None
        return allocate(int(args[0]))


def allocate_in(shared: SharedMemory) -> AbstractContextManager[Any]:
    """Allocate vLLM's KV cache in `shared` inside this context."""

    def allocate(size: int) -> torch.Tensor:
        shared.grow(size)
        return torch.from_file(shared.path, shared=True, size=size, dtype=torch.int8)

    return _CacheAllocation(allocate)


def allocate_untouched() -> AbstractContextManager[Any]:
    """Allocate vLLM's KV cache in memory of this process inside this context."""

    def allocate(size: int) -> torch.Tensor:
        private = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(private, dtype=torch.int8)

    return _CacheAllocation(allocate)


def check_model(config: VllmConfig) -> None:
    """Raise ConfigError if the config shows that this model's KV cannot be transferred. Called
    before the weights are loaded, so that the start fails early."""
    model, parallel = config.model_config, config.parallel_config
    for name in _UNSUPPORTED_SPLITS:
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(
                f"{name} is {size}: KV is split by tensor-parallel ranks and pipeline stages only",
                field=f"engine_args.{name}",
            )
    text, kind = model.hf_text_config, ""
    if model.is_encoder_decoder:
        kind = "encoder-decoder models"
    elif str(text.model_type).removesuffix("_text") in _UNSUPPORTED_MODELS:
        kind = f"models of type {text.model_type}"
    elif getattr(model.hf_config, "rswa_window", None) is not None:
        kind = "models with a replayed window"
    elif model.has_inner_state and config.speculative_config is not None:
        kind = "models with state-space layers and speculative decoding"
    if kind:
        raise ConfigError(
            f"{kind} cannot hand over KV between workers: serve {model.model} aggregated"
            " (--aggregated 1 --prefill 0 --decode 0)",
            field="worker.model",
        )


def cooperative_kernels(config: VllmConfig) -> str:
    """Return the name of the kernels between ranks that need all their thread blocks at once."""
    parallel = config.parallel_config
    name = str(parallel.all2all_backend)
    is_used = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    is_one = is_used and name.startswith(_COOPERATIVE)
    return f"all2all_backend {name}" if is_one else ""


def _geometry(caches: list[torch.Tensor], num_blocks: int) -> KvGeometry:
    first = caches[0]
    item = first.element_size()
    if any(cache.shape != first.shape or cache.stride() != first.stride() for cache in caches):
        raise UnsupportedLayout("the layers' KV caches differ in shape")
    split, rest = divmod(first.shape[0], num_blocks)
    page = first[0].numel()
    if rest or not first[0].is_contiguous() or (split > 1 and first.stride(0) != page):
        raise UnsupportedLayout("a block's page is not contiguous")
    offsets = [int(cache.storage_offset()) * item for cache in caches]
    stride = offsets[1] - offsets[0] if len(offsets) > 1 else page * item
    if any(offset != offsets[0] + i * stride for i, offset in enumerate(offsets)):
        raise UnsupportedLayout("the layers are not evenly spaced")
    sizes = split * page * item, stride, split * first.stride(0) * item
    return KvGeometry(len(caches), num_blocks, *sizes, offsets[0])


def regions_of(
    groups: Sequence[LayerGroup], caches: Mapping[str, torch.Tensor], num_blocks: int
) -> dict[LayerGroup, KvRegion]:
    """Return the region of each group in the KV cache that vLLM registered. `num_blocks` is the
    block count of vLLM's scheduler. Raises UnsupportedLayout."""
    regions: dict[LayerGroup, KvRegion] = {}
    storages = {caches[name].untyped_storage().data_ptr() for g in groups for name in g.layers}
    for each in groups:
        tensors = [caches[name] for name in each.layers]
        first = tensors[0]
        if first.dim() != 4:
            raise UnsupportedLayout(f"the KV cache has {first.dim()} dimensions, must have 4")
        if first.device.type == "cuda":
            regions[each] = device_region(tensors, num_blocks)
        elif first.device.type != "cpu":
            raise UnsupportedLayout(f"the KV cache is on {first.device}")
        elif len(storages) > 1:
            raise UnsupportedLayout("the layers' KV caches do not share one allocation")
        else:
            storage = first.untyped_storage()
            geometry = _geometry(tensors, num_blocks)
            regions[each] = KvRegion(storage.data_ptr(), storage.nbytes(), geometry)
        places = first.shape[0] // num_blocks * first.shape[2]
        if places != each.spec.num_states:
            raise UnsupportedLayout(
                f"blocks have {places} places, the scheduler has {each.spec.num_states}"
            )
    return regions


def _cpu_packing(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """Return the name of the packing order of tokens in a block in vLLM's CPU attention."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_size, head_size))


def plan_of(config: VllmConfig, groups: Sequence[ModelGroup]) -> CopyPlan:
    """Return this process's shard of each group. Raises UnsupportedLayout."""
    tp, stage = config.parallel_config.tensor_parallel_size, get_pp_group().rank_in_group
    rank = get_tensor_model_parallel_rank()
    return CopyPlan(
        tuple(
            Shard(
                each.first.num_kv_heads,
                each.first.head_bytes,
                each.first.of.group,
                each.stage_layers,
                tp,
                rank,
                stage,
            )
            for each in groups
        )
    )


def _heads_of(config: VllmConfig, of: LayerGroup, held: int) -> int:
    """Return the number of the group's heads in the whole model. `held`: heads in a page here."""
    model, tp = config.model_config, config.parallel_config.tensor_parallel_size
    if isinstance(of.spec, MambaSpec):
        return 1 if of.spec.tp_replicated else tp
    if model.use_mla:
        return 1
    total = int(model.get_total_num_kv_heads())
    # Some layers have another number of heads than the model's config states.
    return total if max(1, total // tp) == held else held * tp


def held_of(
    config: VllmConfig, each: LayerGroup, caches: Mapping[str, torch.Tensor], region: KvRegion
) -> HeldGroup:
    """Describe a group of which this rank has layers. Raises UnsupportedLayout."""
    first = caches[each.layers[0]]
    is_state = each.group.kind is GroupKind.STATE
    # torch stores several quantised formats as uint8, so the dtype does not identify them.
    cache_dtype = str(config.cache_config.cache_dtype)
    cache_dtype = _SAME_DTYPE.get(cache_dtype, cache_dtype)
    is_quantised = first.dtype is torch.uint8 or "fp8" in cache_dtype or "fp4" in cache_dtype
    is_cpu = first.device.type == "cpu"
    split = each.group.block_size // first.shape[2]
    needs_equal_tp = is_state and not each.spec.tp_replicated
    needs_equal_tp |= "fp4" in cache_dtype or (is_cpu and split > 1 and not is_state)
    heads = first.shape[1]
    total = _heads_of(config, each, heads)
    expected = max(1, total // config.parallel_config.tensor_parallel_size)
    if heads != expected:
        raise UnsupportedLayout(f"{heads} heads in a page, expected {expected}")
    fields = {
        "kind": f"{type(each.spec).__name__} {each.group.kind} {each.group.reach}",
        "kv_heads": 1 if is_state else total,
        "head_content": first.shape[3],
        "dtype": str(first.dtype).removeprefix("torch."),
        "quantised": cache_dtype if is_quantised else "no",
        "block_size": each.group.block_size,
        "kernel_block_size": first.shape[2],
        "packing": "plain",
    }
    if is_state:
        fields["state"] = f"{each.spec.shapes} {each.spec.dtypes} {each.spec.mamba_cache_mode}"
    else:
        backend = get_current_attn_backend(config, list(each.layers))
        fields["attention"] = backend.get_name()
        if is_cpu:
            size = first.shape[3] // 2
            fields["packing"] = _cpu_packing(first.dtype, each.group.block_size, size)
    named = {name: str(value) for name, value in fields.items()}
    return HeldGroup(each, total, region.geometry.page_bytes // heads, named, needs_equal_tp)


def describe_model(config: VllmConfig) -> dict[str, str]:
    """Return the fields that determine the meaning of all bytes that workers exchange."""
    return {
        "connector": f"pdserve {PROTOCOL_VERSION}",
        "vllm": str(vllm.__version__),
        "model": _model_identity(config),
        "revision": str(config.model_config.revision or "local"),
        "weights": weights_digest(str(config.model_config.model)),
    }


def describe(config: VllmConfig, groups: Sequence[ModelGroup]) -> dict[str, str]:
    """Return everything that determines the meaning of KV bytes, for the compatibility key.

    It includes the number of tensor-parallel ranks only if KV cannot be split by heads, and never
    the number of pipeline stages (kv_transfer/protocol/plan.py). Fields are separate so that an
    error can name the field in which two workers differ, with both values.
    """
    layout = describe_model(config) | positions_of(config.model_config)
    layout |= {"speculative": _speculative(config), "groups": str(len(groups))}
    for n, each in enumerate(groups):
        prefix = f"group {n}: " if len(groups) > 1 else ""
        layout |= {f"{prefix}{name}": value for name, value in each.first.fields.items()}
        # Stages rely on this order, so that a range of layers means the same layers at both ends.
        names = [name for layers in each.stages for name in layers]
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        layout[f"{prefix}layers"] = f"{len(names)}, names {digest}"
    if any(each.first.needs_equal_tp for each in groups):
        layout["tensor_parallel_size"] = str(config.parallel_config.tensor_parallel_size)
    return layout


def has_draft_kv(config: VllmConfig) -> bool:
    """Return True if a speculative draft has KV in the cache."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method not in _WITHOUT_DRAFT_KV


def positions_of(model: Any) -> dict[str, str]:
    """Return the settings of a model that determine the meaning of a position in its KV, long
    values as digests."""
    text = model.hf_text_config
    found = {}
    for name, value in vars(text).items():
        if value is None or name.startswith("_") or not any(word in name for word in _POSITIONS):
            continue
        shown = json.dumps(value, sort_keys=True, default=lambda x: sorted(map(str, x)))
        if len(shown) > _LONGEST_VALUE:
            shown = hashlib.sha256(shown.encode()).hexdigest()[:16]
        found[f"config {name}"] = shown
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # vLLM selects the factors by the longest context
        original = rope.get("original_max_position_embeddings", 0)
        found["long factors"] = str(model.max_model_len > original)
    return found


def _speculative(config: VllmConfig) -> str:
    """Return the speculative method and its draft model, or "no" if no draft has KV."""
    speculative = config.speculative_config
    if not has_draft_kv(config):
        return "no"
    model = speculative.draft_model_config
    draft = str(getattr(model, "model", None))
    named = f"{speculative.method} {_last_name(draft)}, weights {weights_digest(draft)}"
    if model is None:
        return named
    positions = json.dumps(positions_of(model), sort_keys=True)
    return f"{named}, positions {hashlib.sha256(positions.encode()).hexdigest()[:8]}"


def _last_name(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def weights_digest(model: str) -> str:
    """Return a digest of samples from all weight files, "" if `model` is not a directory.

    The model's name does not identify the weights: a fine-tune may have the folder name of its
    base. Samples are enough, because training changes most weights. Reading a checkpoint of
    hundreds of gigabytes would delay each start.
    """
    digest, directory = hashlib.sha256(), Path(model)
    if not directory.is_dir():
        return ""
    for path in sorted(x for x in directory.iterdir() if x.suffix in _WEIGHTS):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} ".encode())
            for offset in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()[:16]


def _model_identity(config: VllmConfig) -> str:
    model = config.model_config
    text = model.hf_text_config
    shape = (
        text.hidden_size,
        text.num_hidden_layers,
        text.num_attention_heads,
        model.get_vocab_size(),
    )
    return f"{_last_name(str(model.model))}:{'x'.join(str(n) for n in shape)}"
