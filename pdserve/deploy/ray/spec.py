"""What is to run on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest

from pdserve.config import (
    MOVE_S,
    UNPIN_S,
    Config,
    RouterConfig,
    ScaledRoleConfig,
    ScalingConfig,
    WorkerConfig,
    refuse,
    served_names,
    to_mapping,
)
from pdserve.local.specs import router_configs

if TYPE_CHECKING:
    from collections.abc import Mapping

PACK, SPREAD = "pack", "spread"
_MARGIN_S = 5.0  # beyond the deadlines that processes have themselves
_DIGITS = 6
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
    gpus: float = 0.0  # never an int: it has another digest

    @property
    def bundle(self) -> dict[str, float]:
        """What it takes of a node."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


class ServiceSpec(Struct, frozen=True):
    """Routers and workers, and how many workers each role has. Of roles in `bounds` that follows
    the load of `model`, between fewest and most. A process that is not ready `start_s` after it has
    started ends an upgrade."""

    routers: dict[str, ProcessSpec]
    workers: dict[str, ProcessSpec]
    counts: dict[str, int]
    bounds: dict[str, tuple[int, int]]
    scaling: ScalingConfig
    model: str
    strategy: str
    cpus: float
    gpus: int
    start_s: float

    def processes(self) -> dict[str, ProcessSpec]:
        """Return everything that should run, by name. A name ends with a digest of what it is the
        name of: a changed process has another one."""
        found = dict(self.routers)
        for role, count in self.counts.items():
            found |= {f"{role}-{i}": self.workers[role] for i in range(count)}
        return {f"{place}-{_digest(spec)}": spec for place, spec in found.items()}

    @property
    def revision(self) -> str:
        """A digest of this without the counts."""
        return _digest(replace(self, counts={}))

    def scaled(self, counts: Mapping[str, int]) -> ServiceSpec:
        """Return this with other counts. Raises ConfigError."""
        for role in counts:
            if role not in self.workers:
                refuse("scale", f"{role!r} is not one of {', '.join(self.workers)}")
            if role in self.bounds:
                refuse("scale", f"{role} follows the load: its configuration has max_workers")
        changed = replace(self, counts={**self.counts, **counts})
        if not any(changed.counts.values()):
            refuse("scale", "would leave no worker; `pdserve down --on ray` ends a service")
        return changed

    def upgraded(self, to: ServiceSpec) -> ServiceSpec:
        """Return `to` with the counts of this, except for roles that are new in it, or gone. Raises
        ConfigError."""
        if len(self.routers) == 1 and self.routers["router-0"] != to.routers["router-0"]:
            refuse(
                "router",
                "cannot change with a single router, which would be away meanwhile: first upgrade "
                "with nothing changed but `up.routers: 2`, and give clients both addresses",
            )
        counts = {}
        for role, count in to.counts.items():
            now = self.counts.get(role, 0)
            fewest, most = to.bounds.get(role, (now, now))
            counts[role] = min(max(now, fewest), most) if now and count else count
        return replace(to, counts=counts)


def place_of(name: str) -> str:
    """Return what a process is one of several revisions of, such as decode-0."""
    return name.rpartition("-")[0]


def role_of(name: str) -> str:
    return name.partition("-")[0]


def _digest(spec: Struct) -> str:
    return xxh3_64_hexdigest(msgspec.json.encode(spec, order="deterministic"))[:_DIGITS]


def service_spec(config: Config, *, cpus: float, gpus: int, strategy: str) -> ServiceSpec:
    """Return the service of a configuration, with `cpus` and `gpus` of one node for each worker.
    Raises ConfigError for what cannot be had on Ray."""
    if config.up.models:
        refuse("up.models", "is not possible with --on ray: serve one model, with worker.model")
    _refuse_set("router", config.router, RouterConfig())
    _refuse_set("worker", config.worker, WorkerConfig())
    routers = {
        f"router-{i}": ProcessSpec("router", to_mapping(x), x.stop_grace_s + _MARGIN_S, cpus=1.0)
        for i, x in enumerate(router_configs(config).values())
    }
    drain_s = config.worker.drain_timeout_s + MOVE_S + UNPIN_S + _MARGIN_S
    workers, counts, bounds = {}, {}, {}
    if config.up.scaling.to_zero_after_s:
        refuse("up.scaling.to_zero_after_s", "is not possible with --on ray")
    for role, pool in config.models[0].by_role().items():
        if pool.gpus:
            refuse(f"up.{role}.gpus", "is not possible with --on ray, which chooses GPUs")
        if isinstance(pool, ScaledRoleConfig) and pool.warm_workers:
            refuse(f"up.{role}.warm_workers", "is not possible with --on ray")
        args = config.worker.engine_args | pool.engine_args
        ranks = args.get("tensor_parallel_size", 1)
        if gpus and ranks != gpus:
            refuse(
                "--gpus-per-worker",
                f"is {gpus:g}, but a {role} worker has tensor_parallel_size {ranks}. An engine runs"
                " on one node: tensor parallelism over several nodes is not possible with --on ray",
            )
        section = to_mapping(replace(config.worker, role=role, engine_args=args))
        workers[role.value] = ProcessSpec("worker", section, drain_s, cpus, float(gpus))
        counts[role.value] = pool.workers
        if pool.most > pool.workers:
            bounds[role.value] = (pool.workers, pool.most)
    model = served_names(config.worker.model, config.worker.model_names)[0]
    scaling, start_s = config.up.scaling, config.up.start_timeout_s
    return ServiceSpec(
        *(routers, workers, counts, bounds, scaling, model, strategy, cpus, gpus, start_s)
    )


def _refuse_set(name: str, section: Any, default: Any) -> None:
    for key in _SET_PER_NODE[name]:
        if getattr(section, key) != getattr(default, key):
            refuse(f"{name}.{key}", "is set by `pdserve up --on ray`; remove it")
