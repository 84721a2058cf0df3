"""Load as vLLM reports it, through its stat-logger interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

from pdserve.types import WorkerLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig


class LoadBoard:
    """The load of the last step. Written by the step thread, read by any; replaced whole, so that a
    reader never sees half of it."""

    def __init__(self) -> None:
        self.latest: WorkerLoad | None = None

    def logger_factory(self) -> Callable[[VllmConfig, int], StatLoggerBase]:
        """The factory for LLMEngine's `stat_loggers`."""

        def make(vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
            return _LoadLogger(vllm_config, engine_index, board=self)

        return make


def usable_blocks(vllm_config: VllmConfig) -> int:
    """Blocks that requests can have: vLLM keeps one of its own, the null block."""
    return int(vllm_config.cache_config.num_gpu_blocks) - 1


class _LoadLogger(StatLoggerBase):
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0, *, board: LoadBoard) -> None:
        self._board = board
        self._total = usable_blocks(vllm_config)

    def log_engine_initialized(self) -> None:
        self._board.latest = WorkerLoad(0, 0, 0.0, self._total)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        usage = scheduler_stats.kv_cache_usage
        self._board.latest = WorkerLoad(
            # A request that waits for remote KV or for its grammar is "skipped" in vLLM's words.
            num_waiting_reqs=(
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            ),
            num_running_reqs=scheduler_stats.num_running_reqs,
            kv_cache_usage=usage,
            free_blocks=round((1.0 - usage) * self._total),
        )
