"""Totals of what vLLM counts in each step."""

from __future__ import annotations

from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from workers.vllm.step.totals import EngineTotals


def test_steps_add_up_and_need_not_have_statistics() -> None:
    totals = EngineTotals()
    manager = StatLoggerManager.__new__(StatLoggerManager)
    manager.stat_loggers = [totals]  # as vLLM calls them
    drafts = SpecDecodingStats.new(3)
    drafts.observe_draft(num_draft_tokens=3, num_accepted_tokens=2)
    step = IterationStats()
    step.num_preempted_reqs = 2
    for scheduler, iteration in (
        (SchedulerStats(spec_decoding_stats=drafts), None),
        (SchedulerStats(), step),
        (SchedulerStats(spec_decoding_stats=drafts), step),
        (None, None),
    ):
        manager.record(scheduler, iteration)
    counted = (totals.preemptions, totals.draft_tokens, totals.accepted_draft_tokens)
    assert counted == (4, 6, 4)
