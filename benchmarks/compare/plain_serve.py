"""Becomes a plain vLLM server with vLLM's own NixlConnector, set as our workers are:

    python -m benchmarks.compare.plain_serve SETTINGS

SETTINGS is JSON: `model` (a directory), `name` (served as), `port`, `side_port` (NIXL's),
`kv_role`, `cores` (a list: it is pinned to them with all that it starts) and `engine_args`.
Tried with vLLM 0.32.0.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG: Final = 1
# As our workers have them (workers/vllm_args.py); a comparison checks that arms are alike.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "seed": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}
_CPU_DEFAULTS: Final[Mapping[str, Any]] = {
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
}
_ENVIRONMENT: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    # While another arm is measured it is paused: a peer that says nothing is not a dead one.
    "UCX_KEEPALIVE_INTERVAL": "inf",
    # For what settings are in effect (`/server_info`).
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU_ENVIRONMENT: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine core runs the model itself: else vLLM gives the model a process more on the same
    # cores, which spins for a second after each step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}


def command(settings: Mapping[str, Any], *, is_cpu: bool) -> list[str]:
    """The command line of the server."""
    arguments = {
        **_DEFAULTS,
        **(_CPU_DEFAULTS if is_cpu else {}),
        **settings["engine_args"],
        "model": settings["model"],
        "served_model_name": settings["name"],
        "host": "127.0.0.1",
        "port": settings["port"],
        "disable_uvicorn_access_log": True,
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_role": settings["kv_role"],
            "kv_load_failure_policy": "fail",
        },
    }
    module = "vllm.entrypoints.openai.api_server"
    return [sys.executable, "-m", module, *options(arguments)]


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command line has them; None is left out."""
    found: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            found += [f"--{option}", text]
    return found


def environment(cores: Sequence[int], side_port: int, *, is_cpu: bool) -> dict[str, str]:
    """What the server's environment has over ours."""
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        **_ENVIRONMENT,
        **(_CPU_ENVIRONMENT if is_cpu else {}),
        **(dict.fromkeys(pools, str(len(cores))) if cores else {}),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    cores = settings["cores"]
    if cores:
        os.sched_setaffinity(0, cores)
    import torch

    is_cpu = torch.version.cuda is None and torch.version.hip is None
    os.environ.update(environment(cores, settings["side_port"], is_cpu=is_cpu))
    # A whole number of GiB that silently overrides kv_cache_memory_bytes.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    words = command(settings, is_cpu=is_cpu)
    if sys.platform == "linux":
        # When the benchmark dies the server is told to end, for killed it leaves its engine behind.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
