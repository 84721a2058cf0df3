"""What is to run on a Ray cluster."""

from __future__ import annotations

import re
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
    parse,
    refuse,
    served_names,
    to_mapping,
)
from pdserve.errors import ConfigError
from pdserve.local.specs import SCALED, router_configs
from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

PACK, SPREAD = "pack", "spread"
_MARGIN_S = 5.0  # beyond the deadlines that processes have themselves
_DIGITS = 6
_NOT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)
_SET_PER_NODE = {
    "router": ("http_host", "grpc_host"),
    "worker": (
        *("worker_id", "role", "host", "port", "debug_port", "routers", "cores", "gpus", "warm"),
        *("nnodes", "node_rank", "master_addr", "master_port"),
    ),
}


class ProcessSpec(Struct, frozen=True):
    """One router or worker. `section` is its configuration, less what depends on its node.
    `grace_s` is the longest that it may take to stop. It takes `cpus` and `gpus` of each of its
    `nnodes` nodes."""

    command: str
    section: dict[str, Any]
    grace_s: float
    cpus: float
    gpus: float = 0.0  # never an int: it has another digest
    nnodes: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """What it takes of each node."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


class ServiceSpec(Struct, frozen=True):
    """Routers, and pools of workers. A pool has the workers of one role of one of the `models`: its
    name is the role, and with `up.models` also the model's. It has so many workers as `counts` say,
    and in addition `warm` ones, which are loaded. Of pools in `bounds` the number follows the load,
    between fewest and most, or it is 0. A process that is not ready `start_s` after it has started
    ends an upgrade."""

    routers: dict[str, ProcessSpec]
    workers: dict[str, ProcessSpec]
    models: dict[str, str]
    counts: dict[str, int]
    bounds: dict[str, tuple[int, int]]
    warm: dict[str, int]
    scaling: ScalingConfig
    strategy: str
    cpus: float
    gpus: int
    start_s: float

    def processes(self) -> dict[str, ProcessSpec]:
        """Return everything that should run, by name. A name ends with a digest of what it is the
        name of: a changed process has another one."""
        found = dict(self.routers)
        for pool, count in self.counts.items():
            found |= {f"{pool}-{i}": self.workers[pool] for i in range(count)}
        found |= {place: self.workers[pool_of(place)] for place in self.warm_places()}
        return {f"{place}-{_digest(spec)}": spec for place, spec in found.items()}

    def warm_places(self) -> set[str]:
        """Return the places of workers that are loaded and take no requests."""
        return {
            f"{pool}-{i}"
            for pool, warm in self.warm.items()
            for i in range(self.counts[pool], self.bounds[pool][1])[:warm]
        }

    def pools_by_load(self) -> dict[str, dict[Role, str]]:
        """Return the pools that follow the load of each model."""
        found: dict[str, dict[Role, str]] = {}
        for pool in self.bounds:
            found.setdefault(self.models[pool], {})[Role(role_of(pool))] = pool
        return found

    def at_zero(self) -> list[str]:
        """Return the models whose workers stopped for want of requests."""
        pools = self.pools_by_load().items()
        return [model for model, x in pools if not any(self.counts[y] for y in x.values())]

    @property
    def revision(self) -> str:
        """A digest of this without the counts."""
        return _digest(replace(self, counts={}))

    def scaled(self, counts: Mapping[str, int]) -> ServiceSpec:
        """Return this with other counts. Raises ConfigError."""
        for pool in counts:
            if pool not in self.workers:
                refuse("scale", f"{pool!r} is not one of {', '.join(self.workers)}")
            if pool in self.bounds:
                keys = "max_workers or up.scaling.to_zero_after_s"
                refuse("scale", f"{pool} follows the load: its configuration has {keys}")
        changed = replace(self, counts={**self.counts, **counts})
        if not any(changed.counts.values()):
            refuse("scale", "would leave no worker; `pdserve down --on ray` ends a service")
        return changed

    def upgraded(self, to: ServiceSpec) -> ServiceSpec:
        """Return `to` with the counts of this, except for pools that are new in it, or gone. A
        model at zero workers starts, so that it is known to. Raises ConfigError."""
        if not self.workers.keys() & to.workers.keys():
            refuse("up", "has no model of the service: all workers would go before others serve")
        if len(self.routers) == 1 and self.routers["router-0"] != to.routers["router-0"]:
            refuse(
                "router",
                "cannot change with a single router, which would be away meanwhile: first upgrade "
                "with nothing changed but `up.routers: 2`, and give clients both addresses",
            )
        counts = {}
        for pool, count in to.counts.items():
            now = self.counts.get(pool, 0)
            fewest, most = to.bounds.get(pool, (now, now))
            counts[pool] = min(max(now, fewest), most) if now and count else count
        return replace(to, counts=counts)


def place_of(name: str) -> str:
    """Return what a process is one of several revisions of, such as decode-0."""
    return name.rpartition("-")[0]


def pool_of(place: str) -> str:
    return place.rpartition("-")[0]


def role_of(name: str) -> str:
    return name.partition("-")[0]


def _digest(spec: Struct) -> str:
    return xxh3_64_hexdigest(msgspec.json.encode(spec, order="deterministic"))[:_DIGITS]


def service_spec(config: Config, *, cpus: float, gpus: int, strategy: str) -> ServiceSpec:
    """Return the service of a configuration, with `cpus` and `gpus` for each worker, which its
    nodes share. Raises ConfigError for what cannot be had on Ray."""
    _refuse_set("router", config.router, RouterConfig())
    _refuse_set("worker", config.worker, WorkerConfig())
    routers = {
        f"router-{i}": ProcessSpec("router", to_mapping(x), x.stop_grace_s + _MARGIN_S, cpus=1.0)
        for i, x in enumerate(router_configs(config).values())
    }
    drain_s = config.worker.drain_timeout_s + MOVE_S + UNPIN_S + _MARGIN_S
    scaling, start_s = config.up.scaling, config.up.start_timeout_s
    workers, models = dict[str, ProcessSpec](), dict[str, str]()
    counts, bounds, warm = dict[str, int](), dict[str, tuple[int, int]](), dict[str, int]()
    for i, model in enumerate(config.models):
        at = f"up.models[{i}]" if config.up.models else "up"
        name = served_names(model.model, model.model_names)[0]
        for role, pool in model.by_role().items():
            if pool.gpus:
                refuse(f"{at}.{role}.gpus", "is not possible with --on ray, which chooses GPUs")
            args = config.worker.engine_args | model.engine_args | pool.engine_args
            ranks = args.get("tensor_parallel_size", 1)
            if gpus and ranks != gpus:
                text = f"is {gpus:g}, but a {role} worker has tensor_parallel_size {ranks}"
                refuse("--gpus-per-worker", text)
            worker = replace(
                config.worker,
                model=model.model,
                model_names=model.model_names,
                adapters=model.adapters,
                role=role,
                engine_args=args,
            )
            # It names files and actors.
            key = f"{role}-{_NOT_IN_NAMES.sub('_', name)}" if config.up.models else role.value
            if key in workers:
                refuse(at, f"{name} and {models[key]} are too much alike; set their model_names")
            section, nnodes = to_mapping(worker), pool.nnodes
            if nnodes > 1:
                try:  # the first node's address is known later
                    parse(WorkerConfig, {**section, "nnodes": nnodes, "master_addr": "node-0"})
                except ConfigError as error:
                    refuse(f"{at}.{role}.nnodes", error.message)
            workers[key] = ProcessSpec(
                *("worker", section, drain_s, cpus / nnodes, gpus / nnodes, nnodes)
            )
            models[key], counts[key] = name, pool.workers
            if pool.most > pool.workers or (
                scaling.to_zero_after_s and role in SCALED and pool.workers
            ):
                bounds[key] = (pool.workers, pool.most)
            if isinstance(pool, ScaledRoleConfig) and pool.warm_workers:
                warm[key] = pool.warm_workers
    return ServiceSpec(
        *(routers, workers, models, counts, bounds, warm, scaling, strategy, cpus, gpus, start_s)
    )


def _refuse_set(name: str, section: Any, default: Any) -> None:
    for key in _SET_PER_NODE[name]:
        if getattr(section, key) != getattr(default, key):
            refuse(f"{name}.{key}", "is set by `pdserve up --on ray`; remove it")
