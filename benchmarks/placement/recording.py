"""What it costs beside a decision to keep it for `pdserve explain`, in a full log."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.placement.policies import DEMAND
from benchmarks.placement.pool import MODEL, busy_pool
from benchmarks.placement.timing import Case
from pdserve.config import RouterConfig
from router.decisions.log import DecisionLog
from router.placement.context import NO_CONTEXT
from router.placement.policies.least_loaded import least_loaded

if TYPE_CHECKING:
    from router.placement.values import Decision


def cases(workers: int) -> list[Case]:
    """One: a decision over so many workers is kept, and the oldest given up."""
    candidates = busy_pool(workers).candidates(MODEL.name)
    size = RouterConfig().decision_log_size
    log = DecisionLog(size)
    asked = [replace(DEMAND, request_id=f"r{i}", token_ids=(0,)) for i in range(2 * size)]
    decisions = [least_loaded(candidates, demand, 0, NO_CONTEXT) for demand in asked[:1]]
    decisions += [replace(decisions[0], demand=demand) for demand in asked[1:]]
    for decision in decisions:
        log.record(decision, 0.0)
    return [Case("record a decision", workers, partial(_record, log, decisions))]


def _record(log: DecisionLog, decisions: list[Decision], call: int) -> None:
    log.record(decisions[call % len(decisions)], float(call))
