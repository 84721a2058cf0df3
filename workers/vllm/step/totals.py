"""Sums of vLLM's step statistics since the start of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class EngineTotals(StatLoggerBase):  # type: ignore[misc] # vLLM has no types
    """Stat logger that vLLM calls with the statistics of each step, beside its own loggers."""

    def __init__(self) -> None:
        self.preemptions = self.draft_tokens = self.accepted_draft_tokens = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        **_: Any,
    ) -> None:
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
        drafts = scheduler_stats and scheduler_stats.spec_decoding_stats
        if drafts is not None:
            self.draft_tokens += drafts.num_draft_tokens
            self.accepted_draft_tokens += drafts.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Do nothing. Required by the interface."""
