"""The environment of a vLLM process. Many of vLLM's settings are read from it once, at import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.vllm_settings import VllmSettings

_ALWAYS = {
    # The engine core lives in this process (LLMEngine); this also keeps the CPU platform from
    # swapping the single-process executor for the multiprocess one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Threads are shared out by whoever starts the worker. vLLM's own binder would take a core per
    # rank for itself, and one more because a KV connector is configured.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # KV events name blocks as the block pool does; workers/vllm_cache.py looks them up there.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
}
_UNLESS_SET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
}


# True in a process that is forked from one that imported vllm (workers/preload.py).
is_preloaded = False


def apply_environment(settings: VllmSettings) -> None:
    """Set the environment for `settings`. Imports torch, which takes a second. Raises RuntimeError
    if vllm was imported before."""
    if "vllm" in sys.modules and not is_preloaded:
        raise RuntimeError("the environment must be set before vllm is imported")
    os.environ.update(_ALWAYS)
    for name, value in _UNLESS_SET.items():
        os.environ.setdefault(name, value)
    # A whole number of GiB that silently overrides kv_cache_memory_bytes.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if settings.kv is not None and settings.kv.connector == "nixl":
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.kv.host
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        if is_preloaded:
            _set_threads(settings.threads)
    if Path(settings.model_path).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
    if _is_cpu_build() and settings.engine_args.get("enforce_eager", True):
        # Eager on CPU: all that is left to compile are a few helpers of the sampler, for which the
        # first request with logprobs would wait 2 s, or 14 s with a cold cache.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _is_cpu_build() -> bool:
    # torch is imported after the thread count is set: it reads that once.
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def _set_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)
