"""The configuration of each process of `pdserve up`: its cores, GPUs and ports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.config import ScaledRoleConfig, WorkerConfig, ranks_of, refuse, served_names
from pdserve.process.gpus import memory_share, share_gpus
from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pdserve.config import Config, RouterConfig
    from pdserve.process.gpus import Wanted

# Routers report the load of these roles only.
SCALED = (Role.PREFILL, Role.DECODE)
_CHOSEN_HERE = (
    *("worker_id", "role", "port", "debug_port", "routers", "cores", "gpus", "warm"),
    *("data_parallel_size", "data_parallel_rank", "data_parallel_group", "data_parallel_address"),
)
# Engine arguments that set the use of GPU memory.
_OF_MEMORY = ("gpu_memory_utilization", "kv_cache_memory_bytes")
# An engine with a GPU runs better on this many cores of its socket than on all cores of both.
_ENOUGH_CORES = 4
_PORTS_APART = 10
_LAST_PORT = 65535


def router_configs(config: Config) -> dict[str, RouterConfig]:
    """Return each router's configuration by name. The ports of each are `_PORTS_APART` above those
    of the one before; 0 stays 0. Raises ConfigError."""
    count, router = config.up.routers, config.router
    if config.up.scaling.to_zero_after_s:
        scaled = {pool.model for pool in worker_pools(config) if pool.role in SCALED and pool.names}
        router = replace(
            router, on_demand_models=tuple(sorted({*router.on_demand_models, *scaled}))
        )
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
                refuse(f"router.{name}", f"{count} routers do not fit below port {_LAST_PORT}")
            if port in taken:
                refuse(f"router.{name}", f"two routers would use port {port}")
            taken |= {port} - {0}
        found[f"router-{i}"] = replace(router, http_port=http_port, grpc_port=grpc_port)
    return found


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The workers of one role of a model: their names, the least number that runs, and the number
    of loaded workers in reserve."""

    model: str
    role: Role
    names: tuple[str, ...]
    least: int
    warm: int = 0


def worker_pools(config: Config) -> list[PoolSpec]:
    """Return the pools of all models. `worker_configs` has their workers by name."""
    found: list[PoolSpec] = []
    counts: Counter[Role] = Counter()
    for model in config.models:
        name = served_names(model.model, model.model_names)[0]
        for role, pool in model.by_role().items():
            ranks = pool.data_parallel_size
            numbers = range(counts[role], counts[role] + pool.most * ranks)
            counts[role] += pool.most * ranks
            names = tuple(f"{role}-{i}" for i in numbers)
            warm = pool.warm_workers if isinstance(pool, ScaledRoleConfig) else 0
            found.append(PoolSpec(name, role, names, pool.workers * ranks, warm))
    return found


def worker_configs(
    config: Config, cores: Collection[int], gpus: Mapping[int, Collection[int]] | None = None
) -> dict[str, WorkerConfig]:
    """Return the configuration of each worker that may run, by name. `gpus` has the cores nearest
    to each GPU. Raises ConfigError if the file sets a key of `_CHOSEN_HERE`, or if there are too
    few cores or GPUs."""
    gpus = gpus or {}
    for name in _CHOSEN_HERE:
        if getattr(config.worker, name) != getattr(WorkerConfig(), name):
            refuse(f"worker.{name}", "is set by `pdserve up`; remove it from the configuration")
    if config.worker.nnodes > 1:
        refuse("worker.nnodes", "must be 1 with `pdserve up`: run `pdserve worker` on each node")
    strict = config.worker.access.require_auth or config.router.access.require_auth
    access = replace(config.worker.access, require_auth=strict)
    workers: list[WorkerConfig] = []
    names: Counter[Role] = Counter()
    wanted: list[Wanted] = []
    for i, model in enumerate(config.models):
        at = f"up.models[{i}]" if config.up.models else "up"
        for role, pool in model.by_role().items():
            if missing := sorted(set(pool.gpus) - set(gpus)):
                refuse(
                    f"{at}.{role}.gpus", f"{missing} are not among {sorted(gpus)}, the GPUs here"
                )
            if pool.nnodes > 1:
                refuse(f"{at}.{role}.nnodes", "must be 1 without --on ray")
            args = config.worker.engine_args | model.engine_args | pool.engine_args
            worker = replace(
                config.worker,
                model=model.model,
                model_names=model.model_names,
                adapters=model.adapters,
                role=role,
                engine_args=args,
                access=access,
            )
            size = pool.data_parallel_size
            for rank in (x for _ in range(pool.most) for x in range(size)):
                name, first = f"{role}-{names[role]}", f"{role}-{names[role] - rank}"
                workers.append(
                    replace(
                        worker,
                        worker_id=name,
                        data_parallel_size=size,
                        data_parallel_rank=rank,
                        data_parallel_group=first if size > 1 else "",
                    )
                )
                wanted.append((pool.gpus, ranks_of(args)))
                names[role] += 1
    cards = share_gpus(wanted, tuple(gpus))
    _check_apart(workers, cards)
    pools = core_pools(cards, cores, gpus, config.up.cores_per_worker)
    shares = {
        usable: iter(share_cores(pools.count(usable), usable, config.up.cores_per_worker))
        for usable in pools
    }
    found = {}
    for worker, usable, mine in zip(workers, pools, cards, strict=True):
        args, memory = worker.engine_args, memory_share(mine, cards)
        if memory is not None and not any(key in args for key in _OF_MEMORY):
            args = {**args, "gpu_memory_utilization": memory}
        found[worker.worker_id] = replace(
            worker, cores=next(shares[usable]), gpus=mine, engine_args=args
        )
    return found


def _check_apart(workers: Sequence[WorkerConfig], cards: Sequence[tuple[int, ...]]) -> None:
    """Raise ConfigError if two ranks of a data-parallel group would share a GPU."""
    taken: Counter[tuple[str, int]] = Counter()
    for worker, mine in zip(workers, cards, strict=True):
        taken.update((worker.data_parallel_group, gpu) for gpu in mine)
    shared = sorted(group for (group, _), count in taken.items() if group and count > 1)
    if shared:
        role = next(x.role for x in workers if x.data_parallel_group == shared[0])
        refuse(f"up.{role}.data_parallel_size", "each rank needs GPUs of its own")


def groups_of(workers: Mapping[str, WorkerConfig]) -> list[tuple[str, ...]]:
    """Return the names of the ranks of each data-parallel group."""
    found: dict[str, tuple[str, ...]] = {}
    for name, worker in workers.items():
        if group := worker.data_parallel_group:
            found[group] = (*found.get(group, ()), name)
    return list(found.values())


def before_on_gpu(workers: Mapping[str, WorkerConfig], name: str) -> list[str]:
    """Return the workers that must be ready before `name` starts: those before it on its GPUs. vLLM
    measures the free memory as it starts (v1/worker/gpu_worker.py), and would count what another
    engine takes meanwhile as its own."""
    found: list[str] = []
    for other in workers:
        if other == name:
            return found
        if name in workers and set(workers[other].gpus) & set(workers[name].gpus):
            found.append(other)
    return []


def core_pools(
    workers: Sequence[tuple[int, ...]],
    cores: Collection[int],
    nearest: Mapping[int, Collection[int]],
    per_worker: int = 0,
) -> list[frozenset[int]]:
    """Return for each worker, given by its GPUs, the cores that it shares with the workers of the
    same pool: those nearest to its GPUs, which on a machine of several sockets are those of one
    socket. All cores for every worker if pools overlap, or if one has too few: `per_worker` for
    each of its workers, or else four."""
    everything = frozenset(cores)
    pools = [
        frozenset(core for gpu in gpus for core in nearest[gpu]) & everything or everything
        for gpus in workers
    ]
    apart = all(a.isdisjoint(b) for a, b in combinations(set(pools), 2))
    fit = all(pools.count(pool) * (per_worker or _ENOUGH_CORES) <= len(pool) for pool in pools)
    return pools if apart and fit else [everything] * len(pools)


def share_cores(workers: int, cores: Collection[int], per_worker: int = 0) -> list[tuple[int, ...]]:
    """Return the cores that each worker is pinned to. With `per_worker` 0 they are shared evenly,
    and one is left to the router if each worker still has two. With fewer cores than workers,
    workers share. Raises ConfigError."""
    available = sorted(cores)
    if per_worker:
        if workers * per_worker > len(available):
            needs = f"{workers} workers with {per_worker} cores each need {workers * per_worker}"
            refuse("up.cores_per_worker", f"{needs}; this process may use {len(available)}")
        share = per_worker
    elif len(available) < workers:
        return [(available[i % len(available)],) for i in range(workers)]
    else:
        spare = 1 if (len(available) - 1) // workers >= 2 else 0
        share = (len(available) - spare) // workers
    return [tuple(available[i * share : (i + 1) * share]) for i in range(workers)]
