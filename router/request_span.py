"""The span of one request at the router, from its admission to its reader's leaving."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.errors import Cancelled, PdserveError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

    from pdserve.tracing import Span, Tracing
    from pdserve.types import GenerateRequest
    from router.answer import AnswerBuffer


@contextmanager
def open_span(
    tracing: Tracing, request: GenerateRequest, buffer: AnswerBuffer, stack: ExitStack
) -> Iterator[GenerateRequest]:
    """The request as its workers are to know it, under a span that `stack` ends; what is done
    inside is its admission."""
    span = tracing.span(
        "request",
        request.traceparent,
        {
            "gen_ai.request.model": request.model,
            "pdserve.request_id": request.request_id,
            "pdserve.prompt_tokens": len(request.prompt_token_ids),
        },
    )
    stack.callback(_end, span, buffer)
    try:
        yield replace(request, traceparent=span.traceparent)
    except PdserveError as error:
        span.end(error)
        raise
    span.child("admission", 0.0, span.elapsed_s())


def _end(span: Span, buffer: AnswerBuffer) -> None:
    error = buffer.error
    if error is None and not buffer.is_complete:
        error = Cancelled("the reader left")
    span.end(error)
