"""A machine's cores, shared out between its workers on purpose rather than fought for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection


def share_cores(workers: int, cores: Collection[int], per_worker: int = 0) -> list[tuple[int, ...]]:
    """Which of `cores` each worker is pinned to: no core twice while there are enough.

    `per_worker` 0 shares out evenly and leaves one core to the router where each worker still gets
    two. With fewer cores than workers, workers share. Raises ConfigError where `per_worker` cannot
    be had.
    """
    available = sorted(cores)
    if per_worker:
        if workers * per_worker > len(available):
            raise ConfigError(
                f"up.cores_per_worker: {workers} workers with {per_worker} cores each do not fit "
                f"the {len(available)} cores that this process may use",
                field="up.cores_per_worker",
            )
        share = per_worker
    elif len(available) < workers:
        return [(available[i % len(available)],) for i in range(workers)]
    else:
        spare = 1 if (len(available) - 1) // workers >= 2 else 0
        share = (len(available) - spare) // workers
    return [tuple(available[i * share : (i + 1) * share]) for i in range(workers)]
