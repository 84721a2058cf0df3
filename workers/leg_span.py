"""The span of one stream at a worker, from its submission to its end, with a child for each phase
that its report tells of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Cancelled

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.tracing import Span, Tracing
    from pdserve.types import PhaseReport, StreamDelta
    from workers.engine import Work


def begin(tracing: Tracing, work: Work, traceparent: str) -> Span:
    """Named by the phase: prefill_leg, decode_leg, aggregated_leg."""
    phase = type(work.phase).__name__.removesuffix("Phase").lower()
    return tracing.span(
        f"{phase}_leg",
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
            span.child(name, at_s, seconds)
            at_s += seconds
    if report.decode_s:
        span.child("decode", max(at_s, span.elapsed_s() - report.decode_s), report.decode_s)
