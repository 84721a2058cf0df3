"""Traces each request as one span, the parent of its workers' spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.errors import Cancelled, PdserveError
from pdserve.observe.telemetry import trace_id

if TYPE_CHECKING:
    from pdserve.observe.telemetry import Tracing
    from router.walk import Answered, Proceed, Walk


class TraceStep:
    """Without it workers get the client's trace context unchanged."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def __call__(self, walk: Walk, proceed: Proceed) -> Answered:
        request, record = walk.request, walk.record
        attributes: dict[str, str | int] = {
            "gen_ai.request.model": request.model,
            "pdserve.request_id": request.request_id,
            "pdserve.prompt_tokens": len(request.prompt_token_ids),
        }
        span = self._tracing.begin("request", request.traceparent, attributes)
        request = request.under("" if span is None else span.traceparent)
        record.trace_id = trace_id(request.traceparent)
        walk = structs.replace(walk, request=request)
        if span is None:  # not sampled
            return await proceed(walk)
        failure: PdserveError | None = None
        try:
            return await proceed(walk)
        except PdserveError as error:
            failure = error
            raise
        except BaseException:
            failure = Cancelled("the client went away")
            raise
        finally:
            if record.admitted:
                span.phase("admission", 0.0, record.admitted - record.arrived)
            span.end(failure)
            del failure  # its traceback refers to this frame
