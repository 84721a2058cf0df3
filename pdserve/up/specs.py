"""From one configuration to the processes of a `pdserve up`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdserve.config import WorkerConfig
from pdserve.config_schema import refuse, to_mapping
from pdserve.types import Role
from pdserve.up.cores import share_cores
from pdserve.up.supervision import ROUTER, Policy

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pdserve.config import Config

# What a process may take on top of its own deadline before it is killed.
_MARGIN_S = 5.0
_CHOSEN_HERE = ("worker_id", "role", "port", "debug_port", "routers", "cores")
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
        worker_grace_s=config.worker.drain_timeout_s + _MARGIN_S,
        max_restarts=config.up.max_restarts,
    )


def router_spec(config: Config, facts: Mapping[str, str] | None) -> ProcessSpec:
    """The router's process. One that is started again takes the ports that it had, from the
    `facts` that it told."""
    router = config.router
    if facts is not None:
        http_port, grpc_port = (int(facts[x].rpartition(":")[2]) for x in ("http", "grpc"))
        router = replace(router, http_port=http_port, grpc_port=grpc_port)
    return ProcessSpec(ROUTER, "router", {"router": to_mapping(router)})


def worker_configs(config: Config, cores: Collection[int]) -> dict[str, WorkerConfig]:
    """Each worker's configuration by name, its router's address still that of the file.

    Raises ConfigError where the file sets what is chosen here, or the cores do not suffice.
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
    return {
        name: replace(worker, worker_id=name, role=role, cores=share)
        for (name, role), share in zip(named, shares, strict=True)
    }


def worker_spec(config: WorkerConfig, router_address: str) -> ProcessSpec:
    """A worker's process, told where the router is."""
    told = replace(config, routers=(router_address,))
    return ProcessSpec(config.worker_id, "worker", {"worker": to_mapping(told)})
