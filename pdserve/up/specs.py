"""From one configuration to the processes of a `pdserve up`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.config import MOVE_S, UNPIN_S, WorkerConfig, refuse, to_mapping
from pdserve.types import Role
from pdserve.up.cores import share_cores
from pdserve.up.gpus import memory_share, share_gpus
from pdserve.up.supervision import Policy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pdserve.config import Config, RouterConfig

# What a process may take on top of its own deadline before it is killed.
_MARGIN_S = 5.0
_CHOSEN_HERE = ("worker_id", "role", "port", "debug_port", "routers", "cores", "gpus")
# Engine arguments that say how much of a GPU's memory is taken.
_OF_MEMORY = ("gpu_memory_utilization", "kv_cache_memory_bytes")
_PORTS_APART = 10
_LAST_PORT = 65535
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: `pdserve COMMAND --config` with `config` as the file's content."""

    name: str
    command: str
    config: dict[str, object]


def reachable(address: str) -> str:
    """Where a server that listens on `address` (host:port) is reached from this machine."""
    host, _, port = address.rpartition(":")
    return f"{_EVERYWHERE.get(host, host)}:{port}"


def policy_of(config: Config) -> Policy:
    """How patient to be with processes of this configuration."""
    return Policy(
        start_timeout_s=config.up.start_timeout_s,
        router_grace_s=config.router.stop_grace_s + _MARGIN_S,
        worker_grace_s=config.worker.drain_timeout_s + MOVE_S + UNPIN_S + _MARGIN_S,
        max_restarts=config.up.max_restarts,
    )


def router_configs(config: Config) -> dict[str, RouterConfig]:
    """Each router's configuration by name. The first has the ports of the file, each other one
    those `_PORTS_APART` above the one before it; 0 stays 0. Raises ConfigError."""
    count, router = config.up.routers, config.router
    if count == 1:
        return {"router": router}
    found: dict[str, RouterConfig] = {}
    taken = {router.shared_http_port} - {0}
    for i in range(count):
        above = _PORTS_APART * i
        http_port = router.http_port and router.http_port + above
        grpc_port = router.grpc_port and router.grpc_port + above
        for name, port in (("http_port", http_port), ("grpc_port", grpc_port)):
            if port > _LAST_PORT:
                refuse(f"router.{name}", f"leaves no ports for {count} routers")
            if port in taken:
                refuse(f"router.{name}", f"{port} would be the port of two routers")
            taken |= {port} - {0}
        found[f"router-{i}"] = replace(router, http_port=http_port, grpc_port=grpc_port)
    return found


def router_spec(name: str, router: RouterConfig, facts: Mapping[str, str] | None) -> ProcessSpec:
    """A router's process. One that is started again takes the ports that it had, from the
    `facts` that it told."""
    if facts is not None:
        http_port, grpc_port = (int(facts[x].rpartition(":")[2]) for x in ("http", "grpc"))
        router = replace(router, http_port=http_port, grpc_port=grpc_port)
    return ProcessSpec(name, "router", {"router": to_mapping(router)})


def worker_configs(
    config: Config, cores: Collection[int], gpus: Sequence[int] = ()
) -> dict[str, WorkerConfig]:
    """Each worker's configuration by name, its routers' addresses still those of the file.

    Raises ConfigError where the file sets what is chosen here, or cores or GPUs do not suffice.
    """
    for name in _CHOSEN_HERE:
        if getattr(config.worker, name) != getattr(WorkerConfig(), name):
            refuse(f"worker.{name}", "is chosen by `pdserve up`; remove it from the configuration")
    strict = config.worker.access.require_auth or config.router.access.require_auth
    access = replace(config.worker.access, require_auth=strict)
    worker = replace(config.worker, access=access)
    counts = {
        Role.PREFILL: config.up.prefill,
        Role.DECODE: config.up.decode,
        Role.AGGREGATED: config.up.aggregated,
    }
    named = [(f"{role}-{i}", role) for role, count in counts.items() for i in range(count)]
    shares = share_cores(len(named), cores, config.up.cores_per_worker)
    cards = _gpu_shares(config, len(named), gpus)
    return {
        name: replace(
            worker,
            worker_id=name,
            role=role,
            cores=share,
            gpus=mine,
            engine_args=_with_memory_share(worker.engine_args, memory_share(mine, cards)),
        )
        for (name, role), share, mine in zip(named, shares, cards, strict=True)
    }


def _gpu_shares(config: Config, workers: int, gpus: Sequence[int]) -> list[tuple[int, ...]]:
    asked = config.worker.engine_args.get("tensor_parallel_size", 1)
    # Of another type it is the engine's to refuse.
    tensor_parallel = asked if isinstance(asked, int) and asked > 0 else 1
    return share_gpus(
        workers, gpus, per_worker=config.up.gpus_per_worker, tensor_parallel=tensor_parallel
    )


def _with_memory_share(args: dict[str, object], share: float | None) -> dict[str, object]:
    if share is None or any(name in args for name in _OF_MEMORY):
        return args
    return {**args, "gpu_memory_utilization": share}


def worker_spec(config: WorkerConfig, routers: Sequence[str]) -> ProcessSpec:
    """A worker's process, told the addresses of all routers."""
    told = replace(config, routers=tuple(routers))
    return ProcessSpec(config.worker_id, "worker", {"worker": to_mapping(told)})
