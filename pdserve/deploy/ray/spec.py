"""What is to run on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from pdserve.config import MOVE_S, UNPIN_S, Config, RouterConfig, WorkerConfig, refuse, to_mapping
from pdserve.local.specs import router_configs

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARGIN_S = 5.0  # beyond the deadlines that processes have themselves
_SET_PER_NODE = {
    "router": ("http_host", "grpc_host"),
    "worker": ("worker_id", "role", "host", "port", "debug_port", "routers", "cores", "gpus"),
}


class ProcessSpec(Struct, frozen=True):
    """One router or worker. `section` is its configuration, less what depends on its node.
    `grace_s` is the longest that it may take to stop."""

    command: str
    section: dict[str, Any]
    grace_s: float
    cpus: float
    gpus: float = 0.0


class ServiceSpec(Struct, frozen=True):
    """Routers by name, workers by role, and how many workers each role has."""

    routers: dict[str, ProcessSpec]
    workers: dict[str, ProcessSpec]
    counts: dict[str, int]

    def processes(self) -> dict[str, ProcessSpec]:
        """Return everything that should run, by name."""
        found = dict(self.routers)
        for role, count in self.counts.items():
            found |= {f"{role}-{i}": self.workers[role] for i in range(count)}
        return found

    def scaled(self, counts: Mapping[str, int]) -> ServiceSpec:
        """Return this with other counts. Raises ConfigError."""
        for role in counts:
            if role not in self.workers:
                refuse("scale", f"{role!r} is not one of {', '.join(self.workers)}")
        changed = replace(self, counts={**self.counts, **counts})
        if not any(changed.counts.values()):
            refuse("scale", "would leave no worker; `pdserve down --on ray` ends a service")
        return changed


def service_spec(config: Config, *, cpus: float, gpus: float) -> ServiceSpec:
    """Return the service of a configuration, with `cpus` and `gpus` of one node for each worker.
    Raises ConfigError for what cannot be had on Ray."""
    if config.up.models:
        refuse("up.models", "is not possible with --on ray: serve one model, with worker.model")
    _refuse_set("router", config.router, RouterConfig())
    _refuse_set("worker", config.worker, WorkerConfig())
    routers = {
        name: ProcessSpec("router", to_mapping(x), x.stop_grace_s + _MARGIN_S, cpus=1.0)
        for name, x in router_configs(config).items()
    }
    drain_s = config.worker.drain_timeout_s + MOVE_S + UNPIN_S + _MARGIN_S
    workers, counts = {}, {}
    for role, pool in config.models[0].by_role().items():
        if pool.gpus:
            refuse(f"up.{role}.gpus", "is not possible with --on ray, which chooses GPUs")
        if pool.most > pool.workers:
            refuse(f"up.{role}.max_workers", "is not possible with --on ray; use `pdserve scale`")
        args = config.worker.engine_args | pool.engine_args
        ranks = args.get("tensor_parallel_size", 1)
        if gpus and ranks != gpus:
            refuse(
                "--gpus-per-worker",
                f"is {gpus:g}, but a {role} worker has tensor_parallel_size {ranks}. An engine runs"
                " on one node: tensor parallelism over several nodes is not possible with --on ray",
            )
        section = to_mapping(replace(config.worker, role=role, engine_args=args))
        workers[role.value] = ProcessSpec("worker", section, drain_s, cpus, gpus)
        counts[role.value] = pool.workers
    return ServiceSpec(routers, workers, counts)


def _refuse_set(name: str, section: Any, default: Any) -> None:
    for key in _SET_PER_NODE[name]:
        if getattr(section, key) != getattr(default, key):
            refuse(f"{name}.{key}", "is set by `pdserve up --on ray`; remove it")
