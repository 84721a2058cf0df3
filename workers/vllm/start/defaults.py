"""Engine arguments that workers set where the configuration does not. Nothing here imports vllm."""

from __future__ import annotations

from typing import Any, Final

DEFAULTS: Final[dict[str, Any]] = {
    "seed": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "use_tqdm_on_load": False,
    "limit_mm_per_prompt": {"image": 8, "video": 0, "audio": 0},  # the router accepts no others
}
# vLLM's defaults for GPUs depend on the GPU; its CPU defaults suit a server with many cores.
CPU_DEFAULTS: Final[dict[str, Any]] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "block_size": 32,  # the smallest that vLLM's CPU attention packs well
    "max_model_len": -1,  # the model's context, or as much of it as the KV cache holds
    "enforce_eager": True,
}


def args_of(compilation: str) -> dict[str, Any]:
    """Return the engine arguments that a value of `worker.compilation` sets."""
    return {} if compilation == "auto" else {"enforce_eager": compilation == "eager"}
