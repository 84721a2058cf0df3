"""Answers to requests that generate: over HTTP, and as lines of a batch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pdserve.errors import ContentFiltered, InvalidRequest, PdserveError
from pdserve.types import FinishReason, ServiceClass, Usage
from router.api.answer_sinks import AnsweredLine, DeltaEncoder, EventStream, WholeBody
from router.api.http_request import CALL, HEADERS, TENANT, read_body, request_id_of
from router.api.open_requests import check_request_id, new_request_id
from router.attempt.answer import AnswerDelta
from router.dialects import prompts
from router.dialects.fields import GenerateBody  # noqa: TC001 - NamedTuple reads it
from router.dialects.responses import ResponsesRequest
from router.dialects.session_ids import check_session_id
from router.intake.intake import Origin, ReadRequest
from router.placement.residency import narrowest
from router.virtual.chooser import OVERRIDE_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from aiohttp import web

    from pdserve.types import GenerateRequest
    from router.api.answer_sinks import Sink
    from router.api.idempotency import Recorded, StoredAnswers
    from router.api.shared import SharedParts
    from router.api.stored_responses import ResponseApi
    from router.attempt.answer import Out
    from router.dialects.fields import Writer
    from router.dialects.parsed_request import ParsedRequest

# `session-id` and `session_id`: Codex. `x-session-affinity`: OpenCode and gateways.
_SESSION_HEADERS = (
    *("x-session-id", "session-id", "session_id"),
    *("x-claude-code-session-id", "x-session-affinity", "x-dynamo-session-id"),
)


class Call(NamedTuple):
    """A request of a client. `key`: its idempotency key, "" if it has none."""

    read: ReadRequest[GenerateBody]
    origin: Origin
    key: str = ""


class GenerationApi:
    """Handlers of the endpoints that generate."""

    def __init__(
        self,
        shared: SharedParts,
        responses: ResponseApi,
        answers: StoredAnswers,
    ) -> None:
        """`responses` keeps what Responses requests store, `answers` those with an idempotency
        key."""
        self._chooser, self._intake = shared.chooser, shared.intake
        self._open_requests, self._residency = shared.open_requests, shared.intake.residency
        self._responses, self._answers, self._ledger = responses, answers, shared.ledger

    async def generate(
        self, kind: type[GenerateBody], request: web.BaseRequest
    ) -> web.StreamResponse:
        """Answer a request. A request with an idempotency key is answered into a recording, which
        outlives the connection."""
        self._open_requests.check_new()
        data = await read_body(request)
        headers, tenant = request[HEADERS], request[TENANT]
        read = await self._intake.read(kind, data, tenant)
        request[CALL].model = read.body.model or ""
        is_stream = bool(read.body.stream)
        origin = Origin(
            request_id_of(request, read.body.named_id(), kind.id_prefix),
            tenant,
            _session_of(request.headers),
            request.headers.get("traceparent", ""),
            narrowest(read.body.inference_geo, request.headers),
            request.headers.get(OVERRIDE_HEADER, ""),
        )
        request[CALL].request_id = origin.request_id
        call = Call(read, origin, _idempotency_key(request))
        claimed: AbstractAsyncContextManager[None] = nullcontext()
        if call.key:
            name, shown_id = (tenant, call.key), headers["x-request-id"]
            self._residency.check_store(tenant, "idempotency-key")
            # Where the answer may be, and by which model, is part of what was asked.
            asked = data + f"{origin.inference_geo}{origin.model_override}".encode()
            digest = self._answers.digest(request.path, asked)
            # A request that resumes is not replayed: it continues an answer that another router
            # may still generate, so it takes over the key.
            if not read.parsed[0].resume:
                generate = partial(self._record, call)
                recorded = self._answers.answer(name, digest, shown_id, generate)
                with self._answers.reading(recorded):
                    return await recorded.replay_to(request, headers, is_stream=is_stream)
            claimed = self._answers.taken_over(name, digest, shown_id)
        sink = EventStream(request, headers) if is_stream else WholeBody()
        async with claimed:
            await self._serve(call, sink)
        return sink.response

    async def answer_line(
        self, kind: type[GenerateBody], data: bytes, tenant: str, timeout_s: float
    ) -> AnsweredLine:
        """Answer the body of a batch line, behind all interactive requests. Raises
        PdserveError."""
        read = await self._intake.read(kind, data, tenant, timeout_s)
        if read.body.stream:
            raise InvalidRequest("'stream' must be false in a batch", field="stream")
        origin = Origin(
            new_request_id(kind.id_prefix),
            tenant,
            inference_geo=read.body.inference_geo or "",
            service_class=ServiceClass.BATCH,
            timeout_s=timeout_s,
        )
        sink = WholeBody()
        await self._serve(Call(read, origin), sink)
        self._ledger.stored(tenant, origin.request_id, "batch_result", len(sink.body))
        return AnsweredLine(origin.request_id, sink.body)

    async def _record(self, call: Call, recorded: Recorded) -> None:
        """Generate the answer to a call with an idempotency key."""
        await self._serve(call, recorded)
        origin, size = call.origin, len(recorded.body)
        self._ledger.stored(origin.tenant, origin.request_id, "idempotent_answer", size)

    async def _serve(self, call: Call, sink: Sink) -> None:
        """Generate the answer to a call into `sink`. Raises PdserveError if nothing was sent yet; a
        later error is sent as an event."""
        body, parsed, out = call.read.body, call.read.parsed, None
        tenant, texts = call.origin.tenant, list[str]()
        writer: Writer

        def opened(made: Sequence[GenerateRequest]) -> Out:
            nonlocal out, writer
            writer = body.writer(call.origin.request_id, made)
            out = DeltaEncoder(writer, sink)
            if not parsed[0].echo:
                return out
            n, only_prompt = made[0].sampling.n, parsed[0].only_prompt
            return prompts.Echo(out, texts, n, only_prompt=only_prompt)

        try:
            with self._open_requests.enter() as open_request:
                if isinstance(body, ResponsesRequest) and body.store is not False:
                    self._residency.check_store(tenant, "store")
                read = await self._intake.checked(call.read, call.origin)
                body, parsed = read.body, read.parsed
                prepared = await self._chooser.prepare(read, call.origin)
                resumes = bool(parsed[0].resume)
                self._open_requests.claim(open_request, tenant, call.key, resumes)
                if parsed[0].echo:
                    texts = await self._texts(parsed, prepared.made)
                await self._chooser.serve(prepared, opened)
                assert out is not None, "the answer has a last delta"
                if isinstance(body, ResponsesRequest):
                    size = await self._responses.keep(writer, tenant)
                    self._ledger.stored(tenant, call.origin.request_id, "response", size)
                out.end()
        except ContentFiltered:
            if (refusal := body.refusal(call.origin.request_id)) is None:
                raise
            out = DeltaEncoder(refusal, sink)
            out.write(AnswerDelta(finish_reason=FinishReason.CONTENT_FILTER, usage=Usage(0, 0)))
            out.end()
        except PdserveError as error:
            # Engines refuse a constraint by its internal name; report the client's field.
            if error.field == "structured_output":
                error.field = parsed[0].grammar_field
            if out is None or not sink.has_begun:
                raise
            out.fail(error)

    async def _texts(
        self, parsed: Sequence[ParsedRequest], made: Sequence[GenerateRequest]
    ) -> list[str]:
        """Return the texts of the prompts, to echo them."""
        model, _ = self._intake.models.find(made[0].model)
        return [
            x.prompt
            if isinstance(x.prompt, str)
            else await self._intake.text(request.prompt_token_ids, model)
            for x, request in zip(parsed, made, strict=True)
        ]


def _idempotency_key(request: web.BaseRequest) -> str:
    given = request.headers.get("idempotency-key")
    return "" if given is None else check_request_id(given, field="idempotency-key")


def _session_of(headers: Mapping[str, str]) -> str:
    """Return the session that the headers name, or ""."""
    for name in _SESSION_HEADERS:
        if given := headers.get(name):
            return check_session_id(given, field=name)
    return ""
