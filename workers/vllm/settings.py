"""Settings and environment of a vLLM engine. Nothing here imports vllm, which reads its environment
once, at import."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pdserve.config import SessionLeaseConfig, TiersConfig
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_transfer.settings import ConnectorConfig

# Engine arguments that follow from other settings, or that the engine's design rests on.
RESERVED = frozenset(
    {
        "model",
        "served_model_name",
        "kv_transfer_config",
        "ec_transfer_config",
        "kv_events_config",
        "kv_offloading_size",
        "kv_offloading_backend",
        "distributed_executor_backend",
        "disable_log_stats",
        "data_parallel_size",
        "data_parallel_rank",
        "data_parallel_start_rank",
        "data_parallel_size_local",
        "data_parallel_address",
        "data_parallel_rpc_port",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "data_parallel_multi_port_external_lb",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "stream_interval",
        "mm_processor_cache_gb",
        "skip_tokenizer_init",
    }
)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes that the ranks of this engine are spread over; `host` is the address of this one,
    `master_addr` that of the first."""

    count: int = 1
    rank: int = 0
    master_addr: str = ""
    master_port: int = 29501
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The place of this engine in a data-parallel group. The ranks meet at `address`, `port` and
    the port after it; `host` is the address of this one, if they run on several machines. They end
    together, or after `leave_s`."""

    size: int = 1
    rank: int = 0
    port: int = 0
    leave_s: float = 0.0
    address: str = "127.0.0.1"
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of one engine.

    `engine_args` are vLLM's `EngineArgs` by name, over the defaults of workers/vllm/args.py.
    `threads` is the size of the OpenMP pool; None leaves it alone. Without `kv` the engine serves
    aggregated requests only. With `kv`, peers know the engine by `instance_id`. If it `encodes`, it
    has the model's encoder of images alone, and offers embeddings over the KV plane. Raises
    ConfigError naming an engine argument that cannot be set.
    """

    model_path: str
    model_names: tuple[str, ...]
    threads: int | None = None
    kv: ConnectorConfig | None = None
    instance_id: str = ""
    encodes: bool = False
    tiers: TiersConfig = field(default_factory=TiersConfig)
    session_lease: SessionLeaseConfig = field(default_factory=SessionLeaseConfig)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=Nodes)
    group: DataParallel = field(default_factory=DataParallel)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError("threads must be at least 1", field="threads")
        for name in self.engine_args:
            if name in RESERVED:
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
    kv: ConnectorConfig, args: Mapping[str, Any], total_bytes: int, default: float
) -> dict[str, float]:
    """Return `gpu_memory_utilization` without the memory that our transports may hold on the GPU,
    or nothing if the size of the KV cache is given. `default` is vLLM's. Raises ConfigError if
    nothing is left."""
    if kv.connector != "pdserve" or args.get("kv_cache_memory_bytes"):
        return {}
    wanted = float(args.get("gpu_memory_utilization", default))
    held_bytes = kv.device_bytes
    left = wanted - held_bytes / total_bytes
    if left <= 0:
        raise ConfigError(
            f"kv.transports: they hold {held_bytes} bytes, which are more than "
            f"{wanted:.2f} of a GPU of {total_bytes}",
            field="kv.transports",
        )
    return {"gpu_memory_utilization": left}


_ALWAYS = {
    # This process has threads and gRPC by now: a fork of it could inherit a lock that is held, and
    # its signals. `vllm serve` does the same (entrypoints/serve/utils/api_utils.py).
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The engine core lives in this process (LLMEngine); this also keeps the CPU platform from
    # swapping the single-process executor for the multiprocess one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # The launcher assigns cores. vLLM's own binder would take a core per rank, and one more because
    # a KV connector is configured.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # KV events name blocks as the block pool does; workers/vllm/cache.py looks them up there.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
}
_UNLESS_SET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
    # Models are directories by now (pdserve/model/hub.py). Set it to 0 for a model whose code is
    # that of another repository.
    "HF_HUB_OFFLINE": "1",
}


def _interface(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise ConfigError(f"host: {address} is no address of this machine", field="host")


# True in a process that is forked from one that imported vllm (workers/vllm/preload.py).
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
    group, host = settings.group, settings.nodes.host
    if group.size > 1:
        master = socket.gethostbyname(group.address)
        host = group.address if ip_address(master).is_loopback else group.host
        # vLLM's form for ranks that somebody else starts. Each sees only its own GPUs.
        os.environ.update(
            VLLM_DP_SIZE=str(group.size),
            VLLM_DP_RANK=str(group.rank),
            VLLM_DP_RANK_LOCAL="0",
            VLLM_DP_MASTER_IP=master,
            VLLM_DP_MASTER_PORT=str(group.port),
        )
    if settings.nodes.count > 1 or group.size > 1:
        os.environ["VLLM_HOST_IP"] = address = socket.gethostbyname(host)
        # Gloo would take the interface of this machine's name, which may be the loopback.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", _interface(address))
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # torch is imported after the thread count is set: it reads that once.
    import torch

    if settings.threads is not None and is_preloaded:
        torch.set_num_threads(settings.threads)
    is_cpu_build = torch.version.cuda is None and torch.version.hip is None
    if is_cpu_build and settings.engine_args.get("enforce_eager", True):
        # Eager on CPU: all that is left to compile are a few helpers of the sampler, for which the
        # first request with logprobs would wait 2 s, or 14 s with a cold cache.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
