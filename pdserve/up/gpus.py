"""A machine's GPUs, shared out between its workers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.gpus import visible_gpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.config import Config

# What vLLM takes of a GPU's memory unless it is told.
_UTILIZATION: Final = 0.9


def gpus_for(config: Config) -> tuple[int, ...]:
    """Those that the workers of a `pdserve up` may use: none for an engine that uses none, which
    vLLM's is where the torch that is installed is one for processors alone."""
    if config.worker.engine != "vllm":
        return ()
    try:
        # Not imported: that takes a second.
        is_of_processors = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        is_of_processors = True
    return () if is_of_processors else visible_gpus()


def share_gpus(
    workers: int, gpus: Sequence[int], *, per_worker: int = 0, tensor_parallel: int = 1
) -> list[tuple[int, ...]]:
    """Which of `gpus` each worker has; nothing for each where there are none.

    No GPU twice while there are enough for `per_worker` (0: `tensor_parallel`) each. With fewer,
    and where the number is not asked for, workers share groups of them. Raises ConfigError where
    they cannot be had.
    """
    if not gpus:
        return [()] * workers
    share = per_worker or tensor_parallel
    if share > len(gpus):
        key = "up.gpus_per_worker" if per_worker else "worker.engine_args.tensor_parallel_size"
        raise ConfigError(
            f"{key}: {share} GPUs for a worker are more than the {len(gpus)} that this process "
            "may use",
            field=key,
        )
    groups = len(gpus) // share
    if per_worker and groups < workers:
        raise ConfigError(
            f"up.gpus_per_worker: {workers} workers with {per_worker} each do not fit the "
            f"{len(gpus)} GPUs that this process may use",
            field="up.gpus_per_worker",
        )
    at = [i % groups * share for i in range(workers)]
    return [tuple(gpus[first : first + share]) for first in at]


def memory_share(mine: tuple[int, ...], shares: Sequence[tuple[int, ...]]) -> float | None:
    """vLLM's `gpu_memory_utilization` for a worker that has `mine`, where others have the same
    GPUs; None where it has them alone."""
    sharers = shares.count(mine)
    # Rounded down: together never more than one would take.
    return int(100 * _UTILIZATION / sharers) / 100 if mine and sharers > 1 else None
