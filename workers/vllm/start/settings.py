"""Settings and environment of a vLLM engine. Nothing here imports vllm, which reads its environment
once, at import."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import psutil

from pdserve.config import (
    DataParallelConfig,
    NodesConfig,
    SessionRetentionConfig,
    TiersConfig,
    ranks_of,
)
from pdserve.errors import ConfigError
from pdserve.process.gpus import is_cpu_build

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_transfer.settings import ConnectorConfig

# Engine arguments that follow from other settings or from the engine's design.
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
class VllmSettings:
    """Settings of one engine.

    `engine_args` are vLLM's `EngineArgs` by name, over the defaults of workers/vllm/start/args.py.
    `threads`: size of the OpenMP pool; None keeps the default. Without `kv` the engine serves only
    aggregated requests. With `kv`, peers identify the engine by `instance_id`. `encodes`: it has
    only the model's image encoder, and offers embeddings over the KV plane. `host`: address at
    which other ranks reach it. The ranks of a data-parallel group end together, or after `leave_s`.
    Raises ConfigError naming an engine argument that cannot be set.
    """

    model_path: str
    model_names: tuple[str, ...]
    threads: int | None = None
    kv: ConnectorConfig | None = None
    instance_id: str = ""
    encodes: bool = False
    tiers: TiersConfig = field(default_factory=TiersConfig)
    retention: SessionRetentionConfig = field(default_factory=SessionRetentionConfig)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    host: str = "127.0.0.1"
    leave_s: float = 0.0

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError("threads must be at least 1", field="threads")
        for name in self.engine_args:
            if name in RESERVED:
                raise ConfigError(
                    f"engine_args.{name} cannot be set: the worker sets it itself",
                    field=f"engine_args.{name}",
                )


def memory_left_to_kv(
    kv: ConnectorConfig, args: Mapping[str, Any], total_bytes: int, default: float
) -> dict[str, float]:
    """Return `gpu_memory_utilization` without the memory that our transports may hold on the GPU,
    or nothing if the size of the KV cache is given. `default` is vLLM's. Raises ConfigError if
    nothing is left."""
    if args.get("kv_cache_memory_bytes"):
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
    # This process has threads and gRPC by now, so a fork could inherit a held lock, and its
    # signals. `vllm serve` does the same (entrypoints/serve/utils/api_utils.py).
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The engine core lives in this process (LLMEngine); this also keeps the CPU platform from
    # swapping the single-process executor for the multiprocess one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # The launcher assigns cores. vLLM's own binder would take a core per rank, and one more because
    # a KV connector is configured.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # KV events name blocks as the block pool does: workers/vllm/cache/events.py looks there.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
}
_UNLESS_SET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
    # Models are directories by now (pdserve/model/hub.py). Set it to 0 for a model whose code is in
    # another repository.
    "HF_HUB_OFFLINE": "1",
    # By default streams share 8 queues of the GPU, so a copy would wait behind another link's.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}


def _interface(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise ConfigError(f"host: {address} is no address of this machine", field="host")


def _choose_nccl_interface(settings: VllmSettings) -> None:
    """Make NCCL use the network of `kv.host`. By default it uses the first interface, which may not
    reach any peer."""
    if settings.kv is None or ":" in settings.kv.host:
        return
    address = ip_address(socket.gethostbyname(settings.kv.host))
    if not (address.is_loopback or address.is_unspecified):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _interface(str(address)))


# True in a process that is forked from one that imported vllm (workers/vllm/preload.py).
is_preloaded = False


def prepare_ranks(engine_args: Mapping[str, object]) -> None:
    """Let the ranks of an engine with these arguments be forks of this process, if it has imported
    vLLM and the ranks use no GPU. Call it on the main thread, before any other thread starts."""
    if is_preloaded and is_cpu_build() and ranks_of(engine_args) > 1:
        from workers.vllm.patches.rank_processes import fork_ranks

        fork_ranks()


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
    group, host = settings.data_parallel, settings.host
    if group.size > 1:
        master = socket.gethostbyname(group.address)
        host = group.address if ip_address(master).is_loopback else host
        # vLLM's variables for ranks that are started from outside. Each rank sees only its own
        # GPUs.
        os.environ.update(
            VLLM_DP_SIZE=str(group.size),
            VLLM_DP_RANK=str(group.rank),
            VLLM_DP_RANK_LOCAL="0",
            VLLM_DP_MASTER_IP=master,
            VLLM_DP_MASTER_PORT=str(group.port),
        )
    if settings.nodes.count > 1 or group.size > 1:
        os.environ["VLLM_HOST_IP"] = address = socket.gethostbyname(host)
        # Gloo would use the interface of this machine's name, which may be the loopback.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", _interface(address))
    _choose_nccl_interface(settings)
    if settings.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    # Import torch after setting the thread count, which it reads once.
    import torch

    if settings.threads is not None and is_preloaded:
        torch.set_num_threads(settings.threads)
    is_cpu_build = torch.version.cuda is None and torch.version.hip is None
    if is_cpu_build and settings.engine_args.get("enforce_eager", True):
        # Eager on CPU, because only a few helpers of the sampler would be compiled, and the first
        # request with logprobs would wait 2 s for them, or 14 s with a cold cache.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
