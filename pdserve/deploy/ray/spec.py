"""Specification of a service on a Ray cluster."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import yaml
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
    ranks_of,
    refuse,
    to_mapping,
)
from pdserve.deploy.local.specs import SCALED, ConfiguredPool, configured_pools, router_configs
from pdserve.errors import ConfigError
from pdserve.security.local import new_credentials, write_credentials, write_private
from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PACK, SPREAD = "pack", "spread"
_MARGIN_S = 5.0  # added to the processes' own stop deadlines
_DIGITS = 6
_NOT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)
_SET_PER_NODE = {
    "router": ("http.host", "grpc.host"),
    "worker": (
        *("worker_id", "role", "host", "port", "debug.port", "routers", "cores", "gpus", "warm"),
        *("nodes.count", "nodes.rank", "nodes.address", "nodes.port", "data_parallel.size"),
    ),
}


class ProcessSpec(Struct, frozen=True):
    """One router or worker. `section`: its configuration without the keys that depend on the node.
    `grace_s`: maximum time to stop. It has parts on `nnodes` nodes, or is a data-parallel group of
    `ranks` workers. `cpus` and `gpus`: resources of each part or worker."""

    command: str
    section: dict[str, Any]
    grace_s: float
    cpus: float
    gpus: float = 0.0  # always a float, because 1 and 1.0 have different digests
    nnodes: int = 1
    ranks: int = 1

    @property
    def parts(self) -> int:
        """The number of its processes; one of the two factors is 1."""
        return self.nnodes * self.ranks

    @property
    def bundle(self) -> dict[str, float]:
        """The Ray resources that each process uses."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


class ServiceSpec(Struct, frozen=True):
    """Routers and pools of workers. A pool has the workers of one role of one model. Its name is
    the role, and with `up.models` also the model. `counts`: serving workers per pool. `warm`:
    loaded spare workers per pool. `bounds`: minimum and maximum of pools that scale with the load,
    which may also be at 0. `start_s`: a process that is not ready after this time fails an
    upgrade."""

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
    max_restart_pause_s: float

    def processes(self) -> dict[str, ProcessSpec]:
        """Return all wanted processes by name. A name ends with the digest of its spec, so a
        changed process has another name."""
        found = dict(self.routers)
        for pool, count in self.counts.items():
            found |= {f"{pool}-{i}": self.workers[pool] for i in range(count)}
        found |= {place: self.workers[pool_of(place)] for place in self.warm_places()}
        return {f"{place}-{_digest(spec)}": spec for place, spec in found.items()}

    def warm_places(self) -> set[str]:
        """Return the places of warm workers, which are loaded but accept no requests."""
        return {
            f"{pool}-{i}"
            for pool, warm in self.warm.items()
            for i in range(self.counts[pool], self.bounds[pool][1])[:warm]
        }

    def pools_by_load(self) -> dict[str, dict[Role, str]]:
        """Return the pools that scale with the load, by role for each model."""
        found: dict[str, dict[Role, str]] = {}
        for pool in self.bounds:
            found.setdefault(self.models[pool], {})[Role(role_of(pool))] = pool
        return found

    def at_zero(self) -> list[str]:
        """Return the models that are scaled to zero workers."""
        pools = self.pools_by_load().items()
        return [model for model, x in pools if not any(self.counts[y] for y in x.values())]

    @property
    def revision(self) -> str:
        """The digest of this spec without the counts."""
        return _digest(replace(self, counts={}))

    def scaled(self, counts: Mapping[str, int]) -> ServiceSpec:
        """Return this spec with other counts. Raises ConfigError."""
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
        """Return `to` with the counts of this spec for pools that both have. A model at zero
        workers is started, to verify that the upgraded one starts. Raises ConfigError."""
        if not self.workers.keys() & to.workers.keys():
            refuse("up", "has no pool of the service: all workers would go before new ones serve")
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


def new_secrets(spec: ServiceSpec) -> dict[str, str]:
    """Return new credentials for the service; none if its configuration has some."""
    router, worker = (next(iter(x.values())).section for x in (spec.routers, spec.workers))
    return new_credentials(parse(RouterConfig, router).access, parse(WorkerConfig, worker).access)


def write_process(
    directory: Path, command: str, section: Mapping[str, Any], secrets: Mapping[str, str]
) -> list[str]:
    """Write the configuration of a process, and the secrets that it does not configure itself.
    Return the command that starts it."""
    own = {key: value for key, value in section["access"].items() if value}
    access = write_credentials(directory, secrets) | own
    path = directory / "config.yaml"
    write_private(path, yaml.safe_dump({command: {**section, "access": access}}))
    return ["pdserve", command, "--config", str(path)]


def place_of(name: str) -> str:
    """Return the place of a process, such as decode-0: its name without the digest."""
    return name.rpartition("-")[0]


def pool_of(place: str) -> str:
    return place.rpartition("-")[0]


def role_of(name: str) -> str:
    return name.partition("-")[0]


def _digest(spec: Struct) -> str:
    return xxh3_64_hexdigest(msgspec.json.encode(spec, order="deterministic"))[:_DIGITS]


def service_spec(config: Config, *, cpus: float, gpus: int, strategy: str) -> ServiceSpec:
    """Return the service of a configuration. `cpus` and `gpus` are for each worker, and divided
    among its nodes. Raises ConfigError for keys that are not supported on Ray."""
    _refuse_set("router", config.router, RouterConfig())
    _refuse_set("worker", config.worker, WorkerConfig())
    routers = {
        f"router-{i}": ProcessSpec("router", to_mapping(x), x.stop_grace_s + _MARGIN_S, cpus=1.0)
        for i, x in enumerate(router_configs(config).values())
    }
    pools: dict[str, ConfiguredPool] = {}
    for pool in configured_pools(config):
        # The key is part of the names of files and actors.
        name = f"{pool.role}-{_NOT_IN_NAMES.sub('_', pool.model)}"
        key = name if config.up.models else pool.role.value
        if (other := pools.get(key)) is not None:
            text = f"{pool.model} and {other.model} are too much alike; set their model_names"
            refuse(pool.at, text)
        pools[key] = pool
    scaling = config.up.scaling
    return ServiceSpec(
        routers=routers,
        workers={key: _worker_spec(pool, cpus, gpus) for key, pool in pools.items()},
        models={key: pool.model for key, pool in pools.items()},
        counts={key: pool.settings.workers for key, pool in pools.items()},
        bounds={
            key: (pool.settings.workers, pool.settings.most)
            for key, pool in pools.items()
            if _follows_load(pool, scaling)
        },
        warm={
            key: pool.settings.warm_workers
            for key, pool in pools.items()
            if isinstance(pool.settings, ScaledRoleConfig) and pool.settings.warm_workers
        },
        scaling=scaling,
        strategy=strategy,
        cpus=cpus,
        gpus=gpus,
        start_s=config.up.start_timeout_s,
        max_restart_pause_s=config.up.max_restart_pause_s,
    )


def _worker_spec(pool: ConfiguredPool, cpus: float, gpus: int) -> ProcessSpec:
    """Return the spec of the workers of a pool. Raises ConfigError."""
    at, settings, worker = f"{pool.at}.{pool.role}", pool.settings, pool.worker
    if settings.gpus:
        refuse(f"{at}.gpus", "is not possible with --on ray, which chooses GPUs")
    ranks = ranks_of(worker.engine_args)
    if gpus and ranks != gpus:
        text = f"is {gpus:g}, but a {pool.role} worker has {ranks} ranks"
        refuse("--gpus-per-worker", text)
    section, nnodes, size = to_mapping(worker), settings.nnodes, settings.data_parallel_size
    # Check with placeholders: addresses are not known yet.
    group = {"size": size, "group": "group"} | ({"address": "node-0"} if size > 1 else {})
    split = {"nodes": {"count": nnodes, "address": "node-0"}, "data_parallel": group}
    if nnodes > 1 or size > 1:
        try:
            parse(WorkerConfig, {**section, **split})
        except ConfigError as error:
            refuse(f"{at}.{'data_parallel_size' if size > 1 else 'nnodes'}", error.message)
    return ProcessSpec(
        command="worker",
        section=section,
        grace_s=worker.drain_timeout_s + MOVE_S + UNPIN_S + _MARGIN_S,
        cpus=cpus / nnodes,
        gpus=gpus / nnodes,
        nnodes=nnodes,
        ranks=size,
    )


def _follows_load(pool: ConfiguredPool, scaling: ScalingConfig) -> bool:
    """Return True if the number of workers of a pool changes with the load."""
    workers, to_zero = pool.settings.workers, scaling.to_zero_after_s
    return pool.settings.most > workers or bool(to_zero and pool.role in SCALED and workers)


def _refuse_set(name: str, section: Any, default: Any) -> None:
    for key in _SET_PER_NODE[name]:
        if attrgetter(key)(section) != attrgetter(key)(default):
            refuse(f"{name}.{key}", "is set by `pdserve up --on ray`; remove it")
