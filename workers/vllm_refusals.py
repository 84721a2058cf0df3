"""What vLLM says of a request that it does not take, in our words. Tried on vLLM 0.32.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.types import ErrorInfo, FinishReason, PhaseReport, StreamDelta

if TYPE_CHECKING:
    from workers.engine import Work

# vLLM's names for request fields that are ours under another name.
_FIELDS = {"prompt": "prompt_token_ids", "structured_outputs": "structured_output"}


def refusal(work: Work, error: Exception) -> StreamDelta:
    """The delta that refuses `work`. vLLM does not name the field of every error; what is left
    unnamed once prompt and numbers are checked is the grammar."""
    if isinstance(error, PdserveError):
        code, message, field = error.code, error.message, error.field
    else:
        # vLLM's own text of an error ends in the parameter and the whole of its value.
        code, message = InvalidRequest.code, str(next(iter(error.args), error))
        parameter = getattr(error, "parameter", None) or ""
        field = _FIELDS.get(parameter, parameter)
        if not field and work.sampling.structured_output is not None:
            field = "structured_output"
    return StreamDelta(
        work.stream_id,
        finish_reason=FinishReason.ERROR,
        error=ErrorInfo(code, message, field),
        report=PhaseReport(),
    )


def not_exported(stream_id: int) -> StreamDelta:
    """The last delta of a stream whose KV no other worker can go on with."""
    error = ErrorInfo(Unavailable.code, "the KV of the stream is not whole here")
    return StreamDelta(stream_id, finish_reason=FinishReason.ERROR, error=error)
