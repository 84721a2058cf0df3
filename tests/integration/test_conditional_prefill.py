"""`slo_aware` over the real router and fake engines in virtual time. It predicts from the steps
that workers report, and prefills on the decode worker if that gives the first token sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.progress import Progress
from benchmarks.simulate import Costs, Setup, simulate
from benchmarks.traces import Trace, TraceMeta, TraceRequest
from benchmarks.workload import Shape
from pdserve.config import load_config

if TYPE_CHECKING:
    from benchmarks.metrics import RequestTimeline

COSTS = Costs(step_s=0.01, prefill_s=0.0001, decode_s=0.0, transfer_s=0.005)
# The router learns what steps cost; then a prompt holds up the prefill worker for 0.3 s.
LEARN = [TraceRequest(float(i), 400, 8) for i in range(30)]
AHEAD, SHORT = TraceRequest(50.0, 3000, 1), TraceRequest(50.05, 300, 9)


def served(*rows: TraceRequest) -> list[RequestTimeline]:
    """Serve requests, given in order, with one prefill and one decode worker."""
    config = load_config(None, {"router.policy": "slo_aware"})
    setup = Setup(
        prefill=1,
        decode=1,
        costs=COSTS,
        requests=len(rows),
        rate_per_s=(len(rows) - 1) / rows[-1].arrival_s,
        slo_s={},
    )
    trace = Trace(TraceMeta(name="made", format="drawn"), rows)
    return list(simulate(setup, config.router, trace, Shape(), Progress()).records)


def where(record: RequestTimeline) -> tuple[str, float]:
    """Return the worker that computed the prompt, and the predicted TTFT."""
    assert record.receipt is not None
    return record.receipt["prefill_worker"], record.receipt["predicted_ttft_s"]


def test_prefill_goes_where_everybody_waits_least() -> None:
    first, *learnt, ahead, short = served(*LEARN, AHEAD, SHORT)
    assert where(first) == ("prefill-0", 0.0), "what is not known yet is not guessed at"
    assert where(learnt[-1]) == ("prefill-0", pytest.approx(0.05, rel=0.01))
    assert where(ahead)[0] == "prefill-0"
    assert where(short) == ("decode-0", pytest.approx(0.04, rel=0.2))
    assert short.receipt is not None
    assert short.receipt["transport"] == ""
