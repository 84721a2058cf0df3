"""Storms of aborts, one for each feature that takes part in a hand-over.

Clients leave at every point of their answers and come back, while KV caches of some 100 blocks
evict and preempt. The services have one worker of each role, where the feature needs no other, and
hand over every answer.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.chaos.scenarios import Scenario, abort
from pdserve.demo import MODEL_DIR

_MIB: Final = 1 << 20
_ENGINE: Final = "worker.engine_args"
_SMALL: Final[tuple[tuple[str, Any], ...]] = (
    ("router.policy", "least_loaded"),
    # Ranks share the cores of the machine: a step may take seconds.
    ("router.lease_s", 20.0),
    ("router.health.stall_s", 20.0),
    ("up.cores_per_worker", 0),
    ("up.prefill.workers", 1),
    ("up.decode.workers", 1),
    (f"{_ENGINE}.kv_cache_memory_bytes", 12 * _MIB),
    (f"{_ENGINE}.max_num_batched_tokens", 128),
    (f"{_ENGINE}.max_model_len", 1536),
)
# Sampling of speculative decoding draws other random numbers than decoding without.
_GREEDY: Final = ("greedy", "stream", "structured", "logprobs")
_PREFIXES: Final = ("router.policy", "prefix_aware")
_TIERS: Final = (_PREFIXES, ("worker.kv.tiers.host_gib", 1 / 32))
_DISK: Final = (
    *_TIERS,
    ("worker.kv.tiers.disk_path", "{run}/tier"),
    ("worker.kv.tiers.disk_gib", 1 / 16),
)
_NO_PREFIXES: Final = ((f"{_ENGINE}.enable_prefix_caching", False),)
_EXPERTS: Final = "up.decode.engine_args.enable_expert_parallel"


def _speculating(method: str, tokens: int, **more: Any) -> tuple[tuple[str, Any], ...]:
    keys = {"method": method, "num_speculative_tokens": tokens, **more}
    return tuple((f"{_ENGINE}.speculative_config.{name}", x) for name, x in keys.items())


def _cache(mib: int) -> tuple[str, int]:
    return f"{_ENGINE}.kv_cache_memory_bytes", mib * _MIB


def _storm(name: str, what: str, *config: tuple[str, Any], kind: str = "", **more: Any) -> Scenario:
    """Return a storm on the demo model, or on the `kind` of model in the folder of checkpoints."""
    model = ((("worker.model", f"{{models}}/{kind}"),) if kind else ()) + more.pop("model", ())
    files = ((kind,) if kind else ()) + more.pop("files", ())
    return Scenario(
        f"storm_{name}",
        what,
        abort,
        config=(*_SMALL, *config),
        needs_vllm=True,
        model=model,
        files=files,
        at_once=8,
        **more,
    )


_NGRAM: Final = _speculating("ngram", 4, prompt_lookup_max=3)
_EAGLE: Final = _speculating("eagle", 3, model="{models}/eagle")
_ADAPTERS: Final = ("lora1", "lora2", "lora3")
_LORA: Final = (
    *((f"worker.adapters.{name}", f"{{models}}/{name}") for name in _ADAPTERS),
    (f"{_ENGINE}.max_lora_rank", 8),
)
_ALL: Final = (
    _storm("base", "one prefill and one decode worker"),
    _storm("tiers", "KV tier in host memory", *_TIERS),
    _storm("tiers_disk", "KV tiers in host memory and on disk", *_DISK),
    _storm("ngram", "n-gram speculation", *_NGRAM, kinds=_GREEDY),
    _storm(
        "draft",
        "speculation with a draft model",
        *_speculating("draft_model", 3, model=str(MODEL_DIR)),
        _cache(24),
        kinds=_GREEDY,
    ),
    _storm("eagle", "EAGLE speculation", *_EAGLE, kinds=_GREEDY, files=("eagle",)),
    _storm(
        "tiers_eagle", "the same, with tiers", *_TIERS, *_EAGLE, kinds=_GREEDY, files=("eagle",)
    ),
    _storm(
        "dp_decode",
        "two data-parallel ranks decode",
        ("up.decode.data_parallel_size", 2),
        (_EXPERTS, True),
        kind="Qwen3-MoE",
    ),
    _storm(
        "pp_prefill",
        "two pipeline stages prefill",
        ("up.prefill.engine_args.pipeline_parallel_size", 2),
    ),
    _storm(
        "tp_decode",
        "two tensor-parallel ranks decode",
        ("up.decode.engine_args.tensor_parallel_size", 2),
    ),
    _storm(
        "hybrid",
        "state-space layers (Mamba-2)",
        _cache(24),
        kind="Granite-hybrid",
        model=_NO_PREFIXES,
    ),
    _storm("windows", "full attention and windows", kind="Gemma-2"),
    _storm("tiers_windows", "the same, with tiers", *_TIERS, kind="Gemma-2"),
    _storm("mla", "MLA", _cache(24), kind="DeepSeek-V2"),
    _storm(
        "copies",
        "prefixes are copied from a decode worker with a larger cache",
        _PREFIXES,
        ("up.decode.engine_args.kv_cache_memory_bytes", 64 * _MIB),
        copies_always=True,
    ),
    _storm("retention", "sessions whose KV is kept between turns", _PREFIXES, sessions=6),
    _storm(
        "lora",
        "three LoRA adapters, two loaded at a time",
        (f"{_ENGINE}.max_loras", 2),
        model=_LORA,
        files=_ADAPTERS,
        adapters=_ADAPTERS,
    ),
)
STORMS: Final = {storm.name: storm for storm in _ALL}
