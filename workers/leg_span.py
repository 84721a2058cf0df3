"""The span of one stream at a worker, from its submission to its end, with a child for each phase
that its report tells of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Cancelled
from workers.engine import AggregatedPhase, DecodePhase, PrefillPhase

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.tracing import Span, Tracing
    from pdserve.types import PhaseReport, StreamDelta
    from workers.engine import Work


_NAMES = {
    PrefillPhase: "prefill_leg",
    DecodePhase: "decode_leg",
    AggregatedPhase: "aggregated_leg",
}


def begin(tracing: Tracing, work: Work, traceparent: str) -> Span | None:
    """Named by the phase; None where the request is not traced."""
    return tracing.begin(
        _NAMES[type(work.phase)],
        traceparent,
        {
            "pdserve.request_id": work.request_id,
            "pdserve.prompt_tokens": len(work.prompt_token_ids),
            "pdserve.resumed_tokens": len(work.resume_token_ids),
        },
    )


def end(span: Span, last: StreamDelta | None, error: PdserveError | None) -> None:
    """`last` is the engine's last delta; without one, `error` ended the stream, or a cancel did."""
    if last is None:
        span.end(error or Cancelled("the router needs no more of it"))
        return
    if last.report is not None:
        _add_phases(span, last.report)
    span.end(last.error)


def _add_phases(span: Span, report: PhaseReport) -> None:
    """Reports have durations only. They follow each other, from the queue on; decoding is what came
    last."""
    at_s = 0.0
    transfer_s = 0.0 if report.transfer is None else report.transfer.transfer_s
    for name, seconds in (
        *(("queue", report.queue_s), ("prefill", report.prefill_s)),
        ("kv_transfer", transfer_s),
    ):
        if seconds:
            span.phase(name, at_s, seconds)
            at_s += seconds
    if report.decode_s:
        span.phase("decode", max(at_s, span.elapsed_s() - report.decode_s), report.decode_s)
