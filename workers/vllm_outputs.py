"""What vLLM says of a request, in our words. Tried on vLLM 0.32.0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve.types import FinishReason, PhaseReport, StreamDelta
from workers.engine import DecodePhase

if TYPE_CHECKING:
    from pdserve.types import TransferReport
    from workers.engine import Work


@dataclass(slots=True)
class OpenStream:
    """One open request: `state` is vLLM's output side of it, `submitted` a monotonic time."""

    work: Work
    vllm_id: str
    state: Any
    submitted: float
    transfer: TransferReport | None = None


def finish_reason_of(reason: str) -> FinishReason:
    # vLLM also ends what repeats itself, where asked to; a client sees that as a stop.
    return FinishReason.STOP if reason == "repetition" else FinishReason(reason)


def exported(stream: OpenStream, tokens: int) -> StreamDelta:
    """The last delta of a stream that another worker goes on with, after so many output tokens."""
    return StreamDelta(
        stream.work.stream_id,
        finish_reason=FinishReason.ABORT,
        report=report_of(stream),
        exported_tokens=tokens,
    )


def report_of(stream: OpenStream) -> PhaseReport:
    """Times from vLLM's own marks, all on the monotonic clock; a mark never reached is 0."""
    marks = stream.state.stats
    if not marks.scheduled_ts:
        return PhaseReport(transfer=stream.transfer)
    queue_s = max(0.0, marks.scheduled_ts - stream.submitted)
    if isinstance(stream.work.phase, DecodePhase):
        return PhaseReport(
            queue_s=queue_s,
            decode_s=max(0.0, marks.last_token_ts - marks.scheduled_ts),
            transfer=stream.transfer,
        )
    return PhaseReport(
        queue_s=queue_s,
        prefill_s=max(0.0, marks.first_token_ts - marks.scheduled_ts),
        decode_s=max(0.0, marks.last_token_ts - marks.first_token_ts),
        cached_tokens=stream.state.num_cached_tokens or 0,
    )
