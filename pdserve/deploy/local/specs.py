"""The configuration of each process of `pdserve up`: its cores, GPUs and ports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from pdserve.config import ScaledRoleConfig, WorkerConfig, ranks_of, refuse, served_names
from pdserve.process.gpus import memory_share, share_gpus
from pdserve.process.memory import ENGINE_BYTES, cpu_cache_bytes, weights_bytes
from pdserve.types import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pdserve.config import Config, RoleConfig, RouterConfig

# Routers report the load of these roles only.
SCALED = (Role.PREFILL, Role.DECODE)
_CHOSEN_HERE = (
    *("worker_id", "role", "port", "debug.port", "routers", "cores", "gpus", "warm"),
    *(f"data_parallel.{key}" for key in ("size", "rank", "group", "address")),
)
# Engine arguments that set the use of GPU memory.
_OF_MEMORY = ("gpu_memory_utilization", "kv_cache_memory_bytes")
# An engine with a GPU runs better on this many cores of its socket than on all cores of both.
_ENOUGH_CORES = 4
_PORTS_APART = 10
_LAST_PORT = 65535


def router_configs(config: Config) -> dict[str, RouterConfig]:
    """Return each router's configuration by name. Each router's ports are `_PORTS_APART` above the
    previous router's; 0 stays 0. Raises ConfigError."""
    count, router = config.up.routers, config.router
    if config.up.scaling.to_zero_after_s:
        scaled = {pool.model for pool in worker_pools(config) if pool.role in SCALED and pool.names}
        router = replace(
            router, on_demand_models=tuple(sorted({*router.on_demand_models, *scaled}))
        )
    if count == 1:
        return {"router": router}
    found: dict[str, RouterConfig] = {}
    taken = {router.http.shared_port} - {0}
    for i in range(count):
        above = _PORTS_APART * i
        http = router.http.port and router.http.port + above
        grpc = router.grpc.port and router.grpc.port + above
        for name, port in (("http.port", http), ("grpc.port", grpc)):
            if port > _LAST_PORT:
                refuse(f"router.{name}", f"{count} routers do not fit below port {_LAST_PORT}")
            if port in taken:
                refuse(f"router.{name}", f"two routers would use port {port}")
            taken |= {port} - {0}
        found[f"router-{i}"] = with_ports(router, http, grpc)
    return found


def with_ports(router: RouterConfig, http: int, grpc: int) -> RouterConfig:
    """Return `router` with other ports."""
    listeners = {"http": replace(router.http, port=http), "grpc": replace(router.grpc, port=grpc)}
    return replace(router, **listeners)


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
    for _, model, role, pool, _ in configured_pools(config):
        ranks = pool.data_parallel_size
        numbers = range(counts[role], counts[role] + pool.most * ranks)
        counts[role] += pool.most * ranks
        names = tuple(f"{role}-{i}" for i in numbers)
        warm = pool.warm_workers if isinstance(pool, ScaledRoleConfig) else 0
        found.append(PoolSpec(model, role, names, pool.workers * ranks, warm))
    return found


class ConfiguredPool(NamedTuple):
    """The workers of one role of a model, as configured. `at`: the key of the model in the file.
    `worker`: the configuration that they share."""

    at: str
    model: str
    role: Role
    settings: RoleConfig
    worker: WorkerConfig


def configured_pools(config: Config) -> Iterator[ConfiguredPool]:
    """Yield the pools of all models, in the order of the file."""
    for i, model in enumerate(config.models):
        name = served_names(model.model, model.model_names)[0]
        for role, pool in model.by_role().items():
            worker = replace(
                config.worker,
                model=model.model,
                model_names=model.model_names,
                adapters=model.adapters,
                role=role,
                engine_args=config.worker.engine_args | model.engine_args | pool.engine_args,
            )
            at = f"up.models[{i}]" if config.up.models else "up"
            yield ConfiguredPool(at, name, role, pool, worker)


def worker_configs(
    config: Config, cores: Collection[int], gpus: Mapping[int, Collection[int]] | None = None
) -> dict[str, WorkerConfig]:
    """Return the configuration of each worker that may run, by name. `gpus` has the cores nearest
    to each GPU. Raises ConfigError if the file sets a key of `_CHOSEN_HERE`, or if there are too
    few cores or GPUs."""
    gpus = gpus or {}
    workers = _workers_of(config, gpus)
    wanted = [(pool.settings.gpus, ranks_of(worker.engine_args)) for pool, worker in workers]
    cards = share_gpus(wanted, tuple(gpus))
    _check_apart([worker for _, worker in workers], cards)
    pools = core_pools(cards, cores, gpus, config.up.cores_per_worker)
    shares = {
        usable: iter(share_cores(pools.count(usable), usable, config.up.cores_per_worker))
        for usable in pools
    }
    found = {}
    for (_, worker), usable, mine in zip(workers, pools, cards, strict=True):
        args, memory = worker.engine_args, memory_share(mine, cards)
        if memory is not None and not any(key in args for key in _OF_MEMORY):
            # The context that fits, as on a CPU, because vLLM would refuse a longer one.
            args = {"max_model_len": -1, **args, "gpu_memory_utilization": memory}
        found[worker.worker_id] = replace(
            worker, cores=next(shares[usable]), gpus=mine, engine_args=args
        )
    return found


def _workers_of(
    config: Config, gpus: Mapping[int, Collection[int]]
) -> list[tuple[ConfiguredPool, WorkerConfig]]:
    """Return each worker that may run, without its cores and GPUs, and its pool."""
    for name in _CHOSEN_HERE:
        if attrgetter(name)(config.worker) != attrgetter(name)(WorkerConfig()):
            refuse(f"worker.{name}", "is set by `pdserve up`; remove it from the configuration")
    if config.worker.nodes.count > 1:
        refuse("worker.nodes.count", "must be 1 with `pdserve up`; run `pdserve worker` on each")
    strict = config.worker.access.require_auth or config.router.access.require_auth
    access = replace(config.worker.access, require_auth=strict)
    found: list[tuple[ConfiguredPool, WorkerConfig]] = []
    names: Counter[Role] = Counter()
    for pool in configured_pools(config):
        key, settings, role = f"{pool.at}.{pool.role}", pool.settings, pool.role
        if missing := sorted(set(settings.gpus) - set(gpus)):
            refuse(f"{key}.gpus", f"{missing} are not among {sorted(gpus)}, the GPUs here")
        if settings.nnodes > 1:
            refuse(f"{key}.nnodes", "must be 1 without --on ray")
        size = settings.data_parallel_size
        for rank in (x for _ in range(settings.most) for x in range(size)):
            first = f"{role}-{names[role] - rank}" if size > 1 else ""
            ranks = replace(pool.worker.data_parallel, size=size, rank=rank, group=first)
            name = f"{role}-{names[role]}"
            worker = replace(pool.worker, worker_id=name, data_parallel=ranks, access=access)
            found.append((pool, worker))
            names[role] += 1
    return found


def check_memory(workers: Mapping[str, WorkerConfig], pools: Sequence[PoolSpec], free: int) -> None:
    """Raise ConfigError if the workers that run from the start can fill more than the `free` bytes
    of host memory, because the kernel would then kill one of them later."""
    total, parts = 0.0, []
    for name in (x for pool in pools for x in pool.names[: pool.least + pool.warm]):
        needs = {what: size / 2**30 for what, size in _host_bytes(workers[name]).items() if size}
        total += sum(needs.values())
        parts.append(f"{name}: {', '.join(f'{what} {gib:.1f}' for what, gib in needs.items())}")
    if total > free / 2**30:
        refuse(
            "up",
            f"the workers need {total:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free "
            f"({'; '.join(parts)}): set fewer workers, or a smaller KV cache "
            "(worker.engine_args.kv_cache_memory_bytes)",
        )


def _host_bytes(worker: WorkerConfig) -> dict[str, int]:
    """Return the host memory that a worker can fill, by its use."""
    needs = {"KV tier": int(worker.kv.tiers.host_gib * 2**30)}
    if worker.gpus or worker.engine != "vllm":
        return needs
    return needs | {
        "weights": weights_bytes(worker.model),
        "KV cache": kv_cache_bytes(worker),
        "engine": ENGINE_BYTES * ranks_of(worker.engine_args),
    }


def kv_cache_bytes(worker: WorkerConfig) -> int:
    """Return the size of a worker's KV cache on a CPU, in bytes."""
    given = worker.engine_args.get("kv_cache_memory_bytes")
    if isinstance(given, int):
        return given * ranks_of(worker.engine_args)
    return cpu_cache_bytes(worker.model, len(worker.cores) or None)


def _check_apart(workers: Sequence[WorkerConfig], cards: Sequence[tuple[int, ...]]) -> None:
    """Raise ConfigError if two ranks of a data-parallel group would share a GPU."""
    taken: Counter[tuple[str, int]] = Counter()
    for worker, mine in zip(workers, cards, strict=True):
        taken.update((worker.data_parallel.group, gpu) for gpu in mine)
    shared = sorted(group for (group, _), count in taken.items() if group and count > 1)
    if shared:
        role = next(x.role for x in workers if x.data_parallel.group == shared[0])
        refuse(f"up.{role}.data_parallel_size", "each rank needs GPUs of its own")


def groups_of(workers: Mapping[str, WorkerConfig]) -> list[tuple[str, ...]]:
    """Return the names of the ranks of each data-parallel group."""
    found: dict[str, tuple[str, ...]] = {}
    for name, worker in workers.items():
        if group := worker.data_parallel.group:
            found[group] = (*found.get(group, ()), name)
    return list(found.values())


def before_on_gpu(workers: Mapping[str, WorkerConfig], name: str) -> list[str]:
    """Return the workers that must be ready before `name` starts: the earlier ones on its GPUs.
    vLLM measures the free memory as it starts (v1/worker/gpu_worker.py), and would count
    allocations of another starting engine as its own."""
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
    """Return for each worker, given by its GPUs, the cores that it shares with the workers of its
    pool: the cores nearest to its GPUs, on a machine of several sockets the cores of one socket.
    Every worker gets all cores if pools overlap, or if a pool has fewer than `per_worker` (or else
    four) for each of its workers."""
    everything = frozenset(cores)
    pools = [
        frozenset(core for gpu in gpus for core in nearest[gpu]) & everything or everything
        for gpus in workers
    ]
    apart = all(a.isdisjoint(b) for a, b in combinations(set(pools), 2))
    fit = all(pools.count(pool) * (per_worker or _ENOUGH_CORES) <= len(pool) for pool in pools)
    return pools if apart and fit else [everything] * len(pools)


def share_cores(workers: int, cores: Collection[int], per_worker: int = 0) -> list[tuple[int, ...]]:
    """Return the cores that each worker is pinned to. With `per_worker` 0 they are divided evenly,
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
