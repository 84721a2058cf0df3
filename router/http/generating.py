"""The two generating endpoints, from body to last byte; they differ in how a body is read and in
the answer's shape."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve import tracing
from pdserve.errors import Cancelled, InternalError, InvalidRequest
from router.http import shapes
from router.http.chat import read_chat
from router.http.completions import read_completion
from router.http.errors import to_json
from router.http.reading import parse_object
from router.http.shapes import Head, WholeAnswer
from router.http.sse import EventWriter
from router.intake import check_request_id, new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.types import GenerateRequest
    from router.answer import AnswerDelta, AnswerStream, Generates
    from router.http.asked import Asked, Streaming
    from router.http.exchange import Exchange
    from router.http.shapes import Shape
    from router.intake import Intake
    from router.open_requests import Interruption, OpenRequests


TRACEPARENT = tracing.TRACEPARENT.encode("ascii")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one endpoint reads and writes."""

    prefix: str
    read: Callable[[dict[str, object], str], Asked]
    shape: Shape


CHAT = Endpoint("chatcmpl-", read_chat, shapes.CHAT)
COMPLETIONS = Endpoint("cmpl-", read_completion, shapes.COMPLETION)


class Generating:
    """Answers requests; no state of its own."""

    def __init__(
        self,
        generator: Generates,
        intake: Intake,
        open_requests: OpenRequests,
        *,
        max_body_bytes: int,
    ) -> None:
        self._generator = generator
        self._intake = intake
        self._open_requests = open_requests
        self._max_body_bytes = max_body_bytes

    async def answer(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Raises PdserveError; `exchange` knows whether as a status or as an event."""
        async with self._open_requests.enter() as interruption:
            await self._answer(exchange, endpoint, interruption)

    async def _answer(
        self, exchange: Exchange, endpoint: Endpoint, interruption: Interruption
    ) -> None:
        request_id = _request_id(exchange, endpoint)
        body = parse_object(await exchange.read_body(self._max_body_bytes))
        asked = endpoint.read(body, request_id)
        exchange.when_gone(lambda: interruption.interrupt(Cancelled("the client went away")))
        request = await self._intake.make(
            asked.ask, tenant=exchange.tenant, traceparent=exchange.header(TRACEPARENT) or ""
        )
        streaming, constraint = asked.streaming, _constraint_in(body)
        # What the client sent is not kept for as long as it is answered.
        del body, asked
        named = self._open_requests.named(
            exchange.tenant, _key(exchange), interruption, resumes=bool(request.resume)
        )
        timer = interruption.at(request.deadline)
        try:
            with named:
                await self._generate(exchange, endpoint, streaming, request, interruption)
        except InvalidRequest as error:
            if error.field == "structured_output":
                error.field = constraint
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _generate(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        streaming: Streaming,
        request: GenerateRequest,
        interruption: Interruption,
    ) -> None:
        head = Head(request.request_id, request.model, int(time.time()))
        async with self._generator.generate(request) as answer:
            answer.cut_with(interruption.interrupt)
            # Until there is something to say, an error can still be a clean status.
            first = await anext(answer, None)
            if first is None:
                raise InternalError("the answer is empty")
            if streaming.enabled:
                writer = EventWriter(endpoint.shape, head, streaming)
                await _stream(exchange, writer, first, answer)
                return
            whole = WholeAnswer(endpoint.shape, head, with_token_ids=streaming.token_ids)
            whole.add(first)
            async for delta in answer:
                whole.add(delta)
        await exchange.respond(200, to_json(whole.payload()))


def _constraint_in(body: dict[str, object]) -> str:
    """The engine knows a constraint by our own name; the client gave it under one of OpenAI's."""
    given = ("structured_outputs", "response_format")
    return next((name for name in given if body.get(name)), "structured_output")


async def _stream(
    exchange: Exchange, writer: EventWriter, first: AnswerDelta, answer: AnswerStream
) -> None:
    await exchange.start_events()
    events = writer.write(first)
    if not answer.is_over:
        await exchange.send_events(events)
        # No task is woken for a token that the connection takes at once.
        if exchange.between and exchange.lane and not writer.with_token_ids:
            send, lane = writer.token_sender(exchange.between), writer.token_lane(exchange.lane)
            answer.write_with(send, lane)
        events = await _send_all_but_last(exchange, writer, answer)
    await exchange.end_events(events + writer.end())


async def _send_all_but_last(
    exchange: Exchange, writer: EventWriter, answer: AnswerStream
) -> bytes:
    """Returns the last events: they go in one piece with the end, for a write costs more than what
    is in it."""
    async for delta in answer:
        events = writer.write(delta)
        if answer.is_over:
            return events
        if events:
            await exchange.send_events(events)
    return b""


def _key(exchange: Exchange) -> str:
    """The client's name for this request, of which one is answered at a time; empty for none."""
    given = exchange.header(b"idempotency-key")
    return "" if given is None else check_request_id(given, field="idempotency-key")


def _request_id(exchange: Exchange, endpoint: Endpoint) -> str:
    """The client's id behind the endpoint's prefix, or a new one; said again in the response."""
    given = exchange.header(b"x-request-id")
    if given is None:
        request_id = new_request_id(endpoint.prefix)
        exchange.add_header(b"x-request-id", request_id)
        return request_id
    check_request_id(given, field="x-request-id")
    exchange.add_header(b"x-request-id", given)
    return endpoint.prefix + given
