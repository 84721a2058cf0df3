"""The processes of one `pdserve up`, and the configuration and credentials of each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from pdserve.config import LIVE_KEYS, RouterConfig, WorkerConfig
from pdserve.deploy.local import specs
from pdserve.deploy.local.compiled_code import CodeRecords, ModelCode, decide, without_code
from pdserve.model.hub import with_directories
from pdserve.net.rpc import Dialer
from pdserve.process.gpus import gpus_for, is_cpu_build
from pdserve.process.memory import free_bytes
from pdserve.security import local
from pdserve.security.tls import dialer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pdserve.config import Config

C = TypeVar("C", RouterConfig, WorkerConfig)


@dataclass(slots=True)
class ServicePlan:
    """`routers` and `workers`: configurations by name of the process. `models`: names, the first
    one is the default. `dialer`: for calls to the routers, as a worker. `admin_key`: that this
    service has made for its operator, or "". `codes`: how each model runs on a CPU."""

    routers: dict[str, RouterConfig]
    workers: dict[str, WorkerConfig]
    pools: list[specs.PoolSpec]
    models: list[str]
    dialer: Dialer
    admin_key: str = ""
    codes: list[ModelCode] = field(default_factory=list)
    records: CodeRecords = field(default_factory=CodeRecords)

    @staticmethod
    def of(config: Config) -> ServicePlan:
        """Download models of the hub. Raises ConfigError if this machine cannot run `config`."""
        workers = specs.worker_configs(config, os.sched_getaffinity(0), gpus_for(config))
        workers = {name: with_directories(x) for name, x in workers.items()}
        pools = specs.worker_pools(config)
        specs.check_memory(workers, pools, free_bytes())
        models = list(dict.fromkeys(x.served_names[0] for x in workers.values()))
        plan = ServicePlan(specs.router_configs(config), workers, pools, models, Dialer())
        for model in models if config.worker.engine == "vllm" and is_cpu_build() else ():
            mine = {name: x for name, x in workers.items() if x.served_names[0] == model}
            plan._run_as(decide(model, mine, plan.records))
        return plan

    def _run_as(self, code: ModelCode) -> None:
        """Give the workers of a model the kind that was decided."""
        self.codes = [x for x in self.codes if x.model != code.model] + [code]
        if code.kind != "auto":
            for name in code.names:
                self.workers[name] = replace(self.workers[name], compilation=code.kind)

    def loads_code(self, name: str) -> bool:
        """Return True if a worker is to run compiled code that an earlier service has made."""
        return any(name in code.names and code.kind == "compiled" for code in self.codes)

    def run_eagerly(self, name: str) -> ModelCode | None:
        """Let all workers of a model run eagerly, because `name` cannot load its code. Return None
        if it does not load any."""
        if not self.loads_code(name):
            return None
        code = next(x for x in self.codes if name in x.names)
        without_code(code, self.records)
        self._run_as(code)
        return code

    @property
    def kv_cache_bytes(self) -> int:
        """Memory that the workers which run from the start may fill with KV, in bytes."""
        first = [name for x in self.pools for name in x.names[: x.least + x.warm]]
        return sum(specs.kv_cache_bytes(self.workers[name]) for name in first)

    def settle(self, config: Config, run_dir: Path) -> None:
        """Keep the routers' store and capsules in `run_dir`, unless they have another place, and
        write credentials that are not configured there."""
        if not config.router.store.database:
            store = replace(config.router.store, database=str(run_dir / "store"))
            self.routers = {name: replace(x, store=store) for name, x in self.routers.items()}
        if not config.router.capsules.directory:
            own = replace(config.router.capsules, directory=str(run_dir / "capsules"))
            self.routers = {name: replace(x, capsules=own) for name, x in self.routers.items()}
        sides = config.router.access, config.worker.access
        secrets = local.new_credentials(*sides)
        files = local.write_credentials(run_dir, secrets) | local.shared_files(*sides)
        self.routers = {name: _given(x, files) for name, x in self.routers.items()}
        self.workers = {name: _given(x, files) for name, x in self.workers.items()}
        self.dialer = dialer(replace(config.worker.access, **files), "worker.access")
        self.admin_key = secrets.get("admin_key_file", "")

    def change_routers(self, new: RouterConfig) -> None:
        """Take over what can change without a restart."""
        live = {key: getattr(new, key) for key in LIVE_KEYS}
        for name, old in self.routers.items():
            access = replace(old.access, admin_keys=new.access.admin_keys)
            self.routers[name] = replace(old, access=access, **live)


def _given(config: C, files: Mapping[str, str]) -> C:
    """Return the configuration of a process with the credentials in `files`."""
    return replace(config, access=replace(config.access, **files))
