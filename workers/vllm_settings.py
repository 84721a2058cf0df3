"""What a vLLM engine is started with. No vllm here: settings are made before it may be imported."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from kv_transfer.settings import from_extra_config
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Engine arguments that follow from other settings, or that the engine's design rests on.
_RESERVED = frozenset(
    {
        "model",
        "served_model_name",
        "kv_transfer_config",
        "kv_events_config",
        "distributed_executor_backend",
        "disable_log_stats",
        "data_parallel_size",
        "pipeline_parallel_size",
        "stream_interval",
        "skip_tokenizer_init",
    }
)


@dataclass(frozen=True, slots=True)
class KvSettings:
    """How this engine takes part in KV transfers. `instance_id` names one life of the process;
    `extra` is handed to the connector as it is. `connector` is `pdserve` or `nixl`; `host` is where
    NIXL's peers ask how to reach its memory."""

    instance_id: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    connector: str = "pdserve"
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of one engine.

    `engine_args` are vLLM's `EngineArgs` by name; what they leave open has our defaults, see
    `workers/vllm_args.py`. `threads` is the size of the OpenMP pool; None leaves it alone. Without
    `kv` the engine serves aggregated work alone. Raises ConfigError naming the key for an engine
    argument that cannot be given.
    """

    model_path: str
    model_name: str
    threads: int | None = None
    kv: KvSettings | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError("threads must be at least 1", field="threads")
        for name in self.engine_args:
            if name in _RESERVED:
                raise ConfigError(
                    f"engine_args.{name} cannot be set: the worker sets it itself",
                    field=f"engine_args.{name}",
                )


# A worker on a CPU gives this share of its part of the machine's memory to the KV cache, but no
# more than so many full contexts need, and never less than the smallest cache.
_CACHE_SHARE = 0.4
_CONTEXTS = 16
_SMALLEST_CACHE = 64 << 20
_USUAL_CACHE = 256 << 20


def cpu_cache_bytes(model_path: str, threads: int | None) -> int:
    """Return the default size of a KV cache in host memory. A worker's part of the machine's memory
    is that of its cores among all cores, or all of it if it is not pinned."""
    cores = os.cpu_count() or 1
    share = int(_memory_bytes() * _CACHE_SHARE * min(1.0, (threads or cores) / cores))
    wanted = max(_USUAL_CACHE, _CONTEXTS * _context_bytes(Path(model_path)))
    return max(_SMALLEST_CACHE, min(share, wanted))


def _memory_bytes() -> int:
    """Return the memory of the machine, or of the control group if that has less."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or "max"
        return total


def _context_bytes(model: Path) -> int:
    """Estimate the KV of one full context with full attention in 16 bits; 0 if not known."""
    try:
        values = json.loads((model / "config.json").read_text())
        heads = values["num_attention_heads"]
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
        kv_heads = values.get("num_key_value_heads") or heads
        token = 2 * 2 * values["num_hidden_layers"] * kv_heads * head_dim
        return int(token * values["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def memory_left_to_kv(
    kv: KvSettings, args: Mapping[str, Any], total_bytes: int, default: float
) -> dict[str, float]:
    """`gpu_memory_utilization` less what our transports may hold on the same GPU, which vLLM knows
    nothing of; nothing where the KV cache's size is given. `default` is vLLM's own. Raises
    ConfigError where nothing is left.
    """
    if kv.connector != "pdserve" or args.get("kv_cache_memory_bytes"):
        return {}
    wanted = float(args.get("gpu_memory_utilization", default))
    held_bytes = from_extra_config(kv.extra).device_bytes
    left = wanted - held_bytes / total_bytes
    if left <= 0:
        raise ConfigError(
            f"kv.staging_slot_bytes, kv.nccl_budget_bytes: {held_bytes} bytes are more than "
            f"{wanted:.2f} of a GPU of {total_bytes}",
            field="kv.staging_slot_bytes",
        )
    return {"gpu_memory_utilization": left}
