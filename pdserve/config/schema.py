"""The whole configuration: one YAML file, of which each command reads its own sections."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated

from pdserve.config.fields import Section, about, refuse
from pdserve.config.models import served_names
from pdserve.config.router import RouterConfig
from pdserve.config.up import ModelConfig, PoolsConfig, UpConfig
from pdserve.config.virtual_models import check_virtual_models
from pdserve.config.worker import WorkerConfig


class Config(Section, frozen=True):
    """The whole file."""

    up: UpConfig = UpConfig()
    router: RouterConfig = RouterConfig()
    worker: Annotated[
        WorkerConfig,
        about("""One worker. `pdserve up` copies this section for each worker and sets `worker_id`,
        `role`, `port`, `debug.port`, `routers`, `cores` and `gpus`."""),
    ] = WorkerConfig()

    def __post_init__(self) -> None:
        pools, to_zero = [x.by_role() for x in self.models], self.up.scaling.to_zero_after_s > 0
        scaled = any(pool.most > pool.workers for each in pools for pool in each.values())
        if (scaled or to_zero) and self.router.roles.auto:
            reason = "cannot be true while the number of workers follows the load (max_workers)"
            refuse("router.roles.auto", reason)
        if to_zero and any(x.prefill.warm_workers + x.decode.warm_workers for x in self.models):
            refuse("up.scaling.to_zero_after_s", "cannot be used with warm_workers, which stay")
        if to_zero and not any(x.prefill.workers for x in self.models):
            refuse("up.scaling.to_zero_after_s", "needs a model with prefill and decode workers")
        if any(pool.data_parallel_size > 1 for each in pools for pool in each.values()):
            reason = "cannot be used with data_parallel_size above 1: the ranks of a group"
            if to_zero:
                refuse("up.scaling.to_zero_after_s", f"{reason} start and end as one")
            if self.router.roles.auto:
                refuse("router.roles.auto", f"{reason} keep their role")
        if not self.up.models:
            return
        elsewhere = [f"up.{name}" for name in PoolsConfig.__struct_fields__]
        elsewhere += [f"worker.{name}" for name in ("model", "model_names", "adapters")]
        for dotted in elsewhere:
            value = attrgetter(dotted)
            if value(self) != value(Config()):
                refuse(dotted, "is not used with up.models; set it there")
        names = [x for each in self.models for x in served_names(each.model, each.model_names)]
        if len(set(names)) != len(names):
            refuse("up.models", "two models have the same name; set their model_names")
        check_virtual_models(
            self.router.virtual_models, {*names, *(x for y in self.models for x in y.adapters)}
        )

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """What `up` serves: `up.models`, or the one model of `worker`."""
        up, worker = self.up, self.worker
        pools = {name: getattr(up, name) for name in PoolsConfig.__struct_fields__}
        one = ModelConfig(
            model=worker.model, model_names=worker.model_names, adapters=worker.adapters, **pools
        )
        return up.models or (one,)
