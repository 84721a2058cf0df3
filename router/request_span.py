"""The span of one request at the router, from its admission to its reader's leaving."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Cancelled, PdserveError
from pdserve.telemetry import UNTRACED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.telemetry import Span, Tracing
    from pdserve.types import GenerateRequest
    from router.answer import AnswerBuffer
    from router.releases import Releases

    Admit = Callable[[GenerateRequest, AnswerBuffer, Releases], Awaitable[None]]


async def admit_traced(
    tracing: Tracing, admit: Admit, request: GenerateRequest, buffer: AnswerBuffer, stack: Releases
) -> None:
    """`admit` the request as its workers are to know it, under a span that `stack` ends."""
    span = tracing.begin(
        "request",
        request.traceparent,
        {
            "gen_ai.request.model": request.model,
            "pdserve.request_id": request.request_id,
            "pdserve.prompt_tokens": len(request.prompt_token_ids),
        },
    )
    if span is None:
        await admit(request.under(UNTRACED), buffer, stack)
        return
    stack.callback(_end, span, buffer)
    try:
        await admit(request.under(span.traceparent), buffer, stack)
    except PdserveError as error:
        span.end(error)
        raise
    span.phase("admission", 0.0, span.elapsed_s())


def _end(span: Span, buffer: AnswerBuffer) -> None:
    error = buffer.error
    if error is None and not buffer.is_complete:
        error = Cancelled("the reader left")
    span.end(error)
