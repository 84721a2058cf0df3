"""Lockstep of the ranks of a data-parallel group (vLLM 0.32.0, `DPEngineCoreProc` in
vllm/v1/engine/core.py).

The ranks share expert layers, so a forward pass needs all of them. Each rank is an engine of its
own. A wave begins when a rank computes while all others sleep. Until it ends, each rank makes one
forward pass a round: a dummy one if it has nothing to compute. In some rounds all ranks agree
whether one has more to compute. vLLM's own form needs a process that coordinates, and an engine
core in a process of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import ParallelConfig
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from workers.vllm.ranks.group_links import GroupLinks
from workers.vllm.step.scheduler_view import view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.usage.usage_lib import UsageContext

    from workers.vllm.start.settings import VllmSettings


@dataclass(slots=True)
class Wave:
    """The current or next wave: its number, and its rounds so far. All ranks count alike. Every
    `interval` rounds, and in the first, ranks agree whether to go on."""

    interval: int
    number: int = 0
    rounds: int = 0
    is_running: bool = False

    def end_round(self) -> bool:
        """Count a round. Return whether the ranks agree in it."""
        self.rounds += 1
        return self.rounds == 1 or self.rounds % self.interval == 0

    def end(self) -> None:
        self.number, self.rounds, self.is_running = self.number + 1, 0, False


class LockstepEngine(LLMEngine):  # type: ignore[misc] # vLLM has no types
    """One rank. `links` and `wave` are its state."""

    def __init__(
        self,
        config: VllmConfig,
        settings: VllmSettings,
        context: UsageContext,
        wake: Callable[[], None],
        stat_loggers: list[Callable[..., Any]],
    ) -> None:
        """Load the model, together with the other ranks. `wake` is called on any thread when
        another rank needs a step of this one."""
        super().__init__(
            config,
            Executor.get_class(config),
            log_stats=True,
            usage_context=context,
            stat_loggers=stat_loggers,
        )
        parallel: ParallelConfig = config.parallel_config
        self._computes = False
        self.wave = Wave(parallel.dp_sync_interval)
        self.links = GroupLinks(
            self.dp_group,
            parallel.data_parallel_master_ip,
            rank=parallel.data_parallel_rank,
            size=parallel.data_parallel_size,
            wake=wake,
        )
        scheduler = self.engine_core.engine_core.scheduler
        self._view = view_of(scheduler, settings)
        schedule = scheduler.schedule

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                self._start_wave()
            return output

        scheduler.schedule = watched_schedule

    @property
    def is_called(self) -> bool:
        """Whether this rank has to step even if it has no request."""
        return self.wave.is_running or self.links.wave >= self.wave.number

    def has_unfinished_requests(self) -> bool:
        """Return whether this rank has any. vLLM's own method waits for all ranks."""
        return bool(self.output_processor.has_unfinished_requests())

    def step(self) -> list[Any]:
        self._computes = False
        self.wave.is_running = self.is_called
        outputs: list[Any] = super().step()
        if self.wave.is_running:
            if not self._computes:
                self.engine_core.execute_dummy_batch()
            if self.wave.end_round() and not ParallelConfig.has_unfinished_dp(
                self.dp_group, self._view.has_runnable()
            ):
                self.wave.end()
        return outputs

    def leave(self, limit_s: float) -> None:
        """Take part in the other ranks' rounds until all want to end, at most for `limit_s`."""
        links, deadline = self.links, time.monotonic() + limit_s
        links.leave()
        while links.lost is None and (self.is_called or not links.has_ended):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            if self.is_called:
                self.step()
            else:
                links.wait(left_s)

    def _start_wave(self) -> None:
        """Call the other ranks before this one computes, because it will wait for them."""
        self._computes = True
        if not self.wave.is_running:
            self.wave.is_running = True
            self.links.start_wave(self.wave.number)
