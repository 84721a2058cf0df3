"""Keeps a worker on its own cores. Engines of one machine that each start a thread for every core
spend their time waiting for one another."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from workers.vllm import settings as vllm_settings

if TYPE_CHECKING:
    from collections.abc import Collection

# Read once, when the libraries behind torch and numpy are loaded.
_THREAD_POOLS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def thread_environment(cores: Collection[int]) -> dict[str, str]:
    """The environment of a process that has `cores`: one thread for each in every pool."""
    return dict.fromkeys(_THREAD_POOLS, str(len(cores))) if cores else {}


def pin(cores: Collection[int]) -> None:
    """Pins this process, and what it starts, to `cores`; nothing where there are none.

    Raises ConfigError for cores that this process may not have, and RuntimeError once torch is
    imported, which is too late.
    """
    if not cores:
        return
    # A forked worker has its parent's one-thread pools; its engine sets torch's threads.
    if "torch" in sys.modules and not vllm_settings.is_preloaded:
        raise RuntimeError("cores must be pinned before torch is imported")
    os.environ.update(thread_environment(cores))
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    missing = sorted(set(cores) - allowed)
    if missing:
        raise ConfigError(
            f"cores: {missing} are not among those that this process may use", field="cores"
        )
    os.sched_setaffinity(0, cores)
