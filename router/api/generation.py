"""Answers to requests that generate: over HTTP, and as lines of a batch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pdserve.errors import InvalidRequest, PdserveError
from pdserve.types import ServiceClass
from router.api.body_process import put_prompts
from router.api.dialects import prompts
from router.api.dialects.fields import Names, read
from router.api.dialects.responses import ResponsesRequest
from router.api.handling import (
    HEADERS,
    TENANT,
    AnsweredLine,
    Encoder,
    EventStream,
    WholeBody,
    read_body,
    request_id_of,
)
from router.api.images import image_bytes
from router.api.preprocess import check_request_id, new_request_id
from router.api.session_ids import check_session_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from aiohttp import web

    from pdserve.types import GenerateRequest
    from router.admission import Door
    from router.api.body_process import Done, LargeBodies
    from router.api.dialects.fields import GenerateBody
    from router.api.handling import Sink
    from router.api.idempotency import StoredAnswers
    from router.api.open_requests import OpenRequests
    from router.api.preprocess import ParsedRequest, Preprocessor
    from router.api.stored_responses import ResponseApi
    from router.request.answer import Generates, Out

# Bytes of a body. The images in a smaller one are charged as text, which is little.
_MAY_HAVE_IMAGES = 4096

# `session-id` and `session_id`: Codex. `x-session-affinity`: OpenCode and gateways.
_SESSION_HEADERS = (
    *("x-session-id", "session-id", "session_id"),
    *("x-claude-code-session-id", "x-session-affinity", "x-dynamo-session-id"),
)


class ReadBody(NamedTuple):
    """A body that was read. `charge`: gives back what reading it cost, once it is prepared. If the
    process for large bodies read it, the body has placeholders for its prompts, which `done`
    has."""

    body: GenerateBody
    charge: AbstractContextManager[object]
    done: Done | None = None

    @property
    def size(self) -> int:
        """The bytes of a body with placeholders, else 0."""
        return 0 if self.done is None else len(self.done.body)

    def parse(self, request_id: str) -> list[ParsedRequest]:
        parsed, done = self.body.parse(request_id), self.done
        if done is not None:
            put_prompts(parsed, done)
            if isinstance(self.body, ResponsesRequest) and done.items:
                self.body.stored_items = done.items
        return parsed


class Call(NamedTuple):
    """A request of a client. `key`: its idempotency key, "" if it has none."""

    read: ReadBody
    parsed: list[ParsedRequest]
    request_id: str
    tenant: str
    key: str = ""
    traceparent: str = ""


class GenerationApi:
    """Handlers of the endpoints that generate."""

    def __init__(
        self,
        generator: Generates,
        preprocessor: Preprocessor,
        open_requests: OpenRequests,
        *,
        large: LargeBodies,
        door: Door,
        responses: ResponseApi,
        answers: StoredAnswers,
    ) -> None:
        self._generator = generator
        self._preprocessor = preprocessor
        self._open_requests = open_requests
        self._large = large
        self._door = door
        self._responses = responses
        self._answers = answers

    async def generate(
        self, kind: type[GenerateBody], request: web.BaseRequest
    ) -> web.StreamResponse:
        """Answer a request. A request with an idempotency key is answered into a recording, which
        outlives the connection."""
        self._open_requests.check_new()
        data = await read_body(request)
        headers, tenant = request[HEADERS], request[TENANT]
        found = await self._read(kind, data, tenant)
        is_stream = bool(found.body.stream)
        request_id = request_id_of(request, found.body.named_id(), kind.id_prefix)
        parsed = await self._preprocessor.run(found.size, partial(found.parse, request_id))
        if session := _session_of(request.headers):
            for one in parsed:
                one.session = session
        call = Call(
            found,
            parsed,
            request_id,
            tenant,
            _idempotency_key(request),
            request.headers.get("traceparent", ""),
        )
        claimed: AbstractAsyncContextManager[None] = nullcontext()
        if call.key:
            name, shown_id = (tenant, call.key), headers["x-request-id"]
            digest = self._answers.digest(request.path, data)
            # A request that resumes is not replayed: it continues an answer that another router
            # may still generate, so it takes over the key.
            if not call.parsed[0].resume:
                generate = partial(self._serve, call)
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
        found = await self._read(kind, data, tenant)
        if found.body.stream:
            raise InvalidRequest("'stream' must be false in a batch", field="stream")
        request_id = new_request_id(kind.id_prefix)
        parsed = await self._preprocessor.run(found.size, partial(found.parse, request_id))
        for one in parsed:
            one.service_class = ServiceClass.BATCH
            one.timeout_s = timeout_s
        sink = WholeBody()
        await self._serve(Call(found, parsed, request_id, tenant), sink)
        return AnsweredLine(request_id, sink.body)

    async def _read(self, kind: type[GenerateBody], data: bytes, tenant: str) -> ReadBody:
        """Charge the tenant for a body and read it; a large one in the process for large bodies.
        Raises Overloaded, and InvalidRequest naming the field."""
        images = image_bytes(data) if len(data) > _MAY_HAVE_IMAGES else 0
        charge = self._door.charge(tenant, len(data), images=images)
        most = self._large.larger_than
        if len(data) <= most:
            body = read(kind, data)
            if not isinstance(body, ResponsesRequest) or body.previous_response_id is None:
                return ReadBody(body, charge)
            names = Names(model=body.model, previous_response_id=body.previous_response_id)
        else:
            names = await self._large.names(data)
        previous, conversation = b"", ""
        if issubclass(kind, ResponsesRequest):
            previous, conversation = await self._responses.previous(
                names.previous_response_id, tenant
            )
            if len(data) + len(previous) <= most:
                body = read(kind, data)
                body.put_before(previous)
                body.conversation = conversation
                return ReadBody(body, charge)
        done = await self._large.read(kind.__name__, data, names.model, tenant, previous)
        body = await self._preprocessor.run(len(done.body), partial(read, kind, done.body))
        if isinstance(body, ResponsesRequest):
            body.conversation = conversation
        return ReadBody(body, charge, done)

    async def _serve(self, call: Call, sink: Sink) -> None:
        """Generate the answer to a call into `sink`. Raises PdserveError if nothing was sent yet; a
        later error is sent as an event."""
        body, parsed, out = call.read.body, call.parsed, None
        try:
            with self._open_requests.enter() as open_request:
                with call.read.charge:
                    made = [
                        await self._preprocessor.prepare(
                            one, tenant=call.tenant, traceparent=call.traceparent
                        )
                        for one in parsed
                    ]
                resumes = bool(made[0].resume)
                self._open_requests.claim(open_request, call.tenant, call.key, resumes)
                writer = body.writer(call.request_id, made)
                out = Encoder(writer, sink)
                await self._generate(parsed, made, out)
                if isinstance(body, ResponsesRequest):
                    await self._responses.keep(writer, call.tenant)
                out.end()
        except PdserveError as error:
            # Engines refuse a constraint by its internal name; report the client's field.
            if error.field == "structured_output":
                error.field = parsed[0].grammar_field
            if out is None or not sink.has_begun:
                raise
            out.fail(error)

    async def _generate(
        self, parsed: Sequence[ParsedRequest], made: Sequence[GenerateRequest], out: Out
    ) -> None:
        if len(made) == 1 and not parsed[0].echo:
            await self._generator.serve(made[0], out)
            return
        if parsed[0].echo:
            model, _ = self._preprocessor.find(made[0].model)
            texts = [
                x.prompt
                if isinstance(x.prompt, str)
                else await self._preprocessor.text(request.prompt_token_ids, model)
                for x, request in zip(parsed, made, strict=True)
            ]
            n, only_prompt = made[0].sampling.n, parsed[0].only_prompt
            out = prompts.Echo(out, texts, n, only_prompt=only_prompt)
        await prompts.serve(self._generator, made, out)


def _idempotency_key(request: web.BaseRequest) -> str:
    given = request.headers.get("idempotency-key")
    return "" if given is None else check_request_id(given, field="idempotency-key")


def _session_of(headers: Mapping[str, str]) -> str:
    """Return the session that the headers name, or ""."""
    for name in _SESSION_HEADERS:
        if given := headers.get(name):
            return check_session_id(given, field=name)
    return ""
