"""The section `up`: the workers of each role and model that `pdserve up` starts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from pdserve.config.fields import DAY_S, Amount, Count, Section, Text, about, refuse
from pdserve.config.models import DEMO_MODEL
from pdserve.types import Role


class RoleConfig(Section, frozen=True):
    """The workers of one role."""

    workers: Annotated[
        int, Meta(ge=0, le=1024), about("Number of workers, or of data-parallel groups.")
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(ge=1, le=1024),
        about("""Number of ranks in a data-parallel group. Each rank is a worker, with its own
        GPUs, KV cache and requests; the ranks of a group share the expert layers of the model,
        compute in step, and start and end as one. For models with experts."""),
    ] = 1
    gpus: Annotated[
        tuple[Count, ...],
        about("""GPUs that these workers share, by NVML index. Empty: the GPUs that no other role
        has."""),
    ] = ()
    nnodes: Annotated[
        int,
        Meta(ge=1),
        about("""Number of nodes that each worker is spread over, with `--on ray`: each runs a part
        of its ranks."""),
    ] = 1
    engine_args: Annotated[
        dict[str, object],
        about("""Engine arguments of this role. They override the engine arguments of all
        workers."""),
    ] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Largest number of workers, or groups, of this role that ever run."""
        return self.workers


class ScaledRoleConfig(RoleConfig, frozen=True):
    """The workers of a role whose number may follow the load."""

    max_workers: Annotated[
        int,
        Meta(ge=0, le=1024),
        about("""Largest number of workers. The number follows the load between `workers` and
        `max_workers`. 0: always `workers`."""),
    ] = 0
    warm_workers: Annotated[
        Count,
        about("""Number of additional workers that are started and loaded in advance. They take
        requests at once when the load needs them."""),
    ] = 0

    def __post_init__(self) -> None:
        if 0 < self.max_workers < max(1, self.workers):
            refuse("max_workers", f"must not be below workers, which is {self.workers}")
        if self.max_workers and not self.workers:
            refuse("workers", "must be at least 1 if max_workers is given")
        if self.warm_workers > self.most - self.workers:
            refuse("warm_workers", "must not be above max_workers less workers")
        if self.max_workers and self.data_parallel_size > 1:
            refuse("max_workers", "must be 0 with data_parallel_size above 1")

    @property
    def most(self) -> int:
        return max(self.workers, self.max_workers)


class UnusedRoleConfig(RoleConfig, frozen=True):
    """The workers of a role that has none by default."""

    workers: Annotated[
        int, Meta(ge=0, le=1024), about("Number of workers, or of data-parallel groups.")
    ] = 0


class PoolsConfig(Section, frozen=True):
    """The workers of one model."""

    prefill: Annotated[ScaledRoleConfig, about("Prefill workers.")] = ScaledRoleConfig()
    decode: Annotated[ScaledRoleConfig, about("Decode workers.")] = ScaledRoleConfig()
    aggregated: Annotated[UnusedRoleConfig, about("Workers that run both phases.")] = (
        UnusedRoleConfig()
    )
    pooling: Annotated[UnusedRoleConfig, about("Workers that compute embeddings.")] = (
        UnusedRoleConfig()
    )
    encode: Annotated[
        UnusedRoleConfig,
        about("Workers that compute image features for prefill workers. Each has one rank."),
    ] = UnusedRoleConfig()

    def __post_init__(self) -> None:
        prefill, decode = self.prefill.workers, self.decode.workers
        if bool(prefill) != bool(decode):
            missing = "decode" if prefill else "prefill"
            reason = "must be at least 1: prefill and decode workers need each other"
            refuse(f"{missing}.workers", f"{reason}; aggregated.workers need neither")
        if not prefill + decode + self.aggregated.workers + self.pooling.workers:
            refuse("prefill.workers", "at least one worker is required")
        for role in ("pooling", "encode"):
            if getattr(self, role).data_parallel_size > 1:
                refuse(f"{role}.data_parallel_size", "must be 1")
        if self.encode.workers and not prefill:
            refuse("encode.workers", "must be 0 without prefill workers, for which they compute")

    def by_role(self) -> dict[Role, RoleConfig]:
        return {role: getattr(self, role.value) for role in Role}


class ModelConfig(PoolsConfig, frozen=True):
    """One of several models."""

    model: Annotated[Text, about("As `worker.model`.")] = DEMO_MODEL
    model_names: Annotated[tuple[Text, ...], about("As `worker.model_names`.")] = ()
    engine_args: Annotated[
        dict[str, object],
        about("Engine arguments of this model. They override `worker.engine_args`."),
    ] = field(default_factory=dict)
    adapters: Annotated[
        dict[Text, Text], about("LoRA adapters of this model, as in `worker.adapters`.")
    ] = field(default_factory=dict)


class ScalingConfig(Section, frozen=True):
    """When the number of workers changes, between `workers` and `max_workers` of a role."""

    target_load: Annotated[
        float,
        Meta(gt=0, le=1),
        about("Load of a role that has enough workers. 1 keeps all of them busy."),
    ] = 0.7
    up_after_s: Annotated[Amount, about("Seconds of a higher load before workers are added.")] = (
        10.0
    )
    down_after_s: Annotated[
        Amount, about("Seconds of a lower load before a worker is removed.")
    ] = 120.0
    to_zero_after_s: Annotated[
        Amount,
        about("""Seconds without a request after which all prefill and decode workers of a model
        stop. The next request starts them. 0: never."""),
    ] = 0.0


class UpConfig(PoolsConfig, frozen=True):
    """What `pdserve up` starts."""

    models: Annotated[
        tuple[ModelConfig, ...],
        about("""Models, if there are several. Each has its own workers; `worker.model` and the
        workers of `up` are then not used. Empty: `worker.model`."""),
    ] = ()
    routers: Annotated[
        int,
        Meta(ge=1, le=16),
        about("""Number of routers. The first has the ports of `router`, each further one ports 10
        higher."""),
    ] = 1
    scaling: ScalingConfig = ScalingConfig()
    cores_per_worker: Annotated[Count, about("CPU cores of each worker. 0: an equal share.")] = 0
    start_timeout_s: Annotated[
        float,
        Meta(ge=1, le=DAY_S),
        about("Seconds without progress after which a start is given up."),
    ] = 300.0
    max_restart_pause_s: Annotated[
        float,
        Meta(ge=0, le=DAY_S),
        about("""Longest pause in seconds before a process that died is started again. The pause is
        1 s after its first death, and doubles with each further one in close succession."""),
    ] = 60.0
    ready_file: Annotated[
        str,
        about("JSON file that is written once all are ready: addresses, process ids and roles."),
    ] = ""
    run_dir: Annotated[
        str,
        about("""Directory for logs. Empty: a temporary one, removed after a stop without
        failures."""),
    ] = ""
