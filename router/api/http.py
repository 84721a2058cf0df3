"""OpenAI-compatible HTTP API of the router."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from pdserve import __version__
from pdserve.errors import (
    InternalError,
    InvalidRequest,
    ModelNotFound,
    PdserveError,
    wait_s,
)
from pdserve.types import ServiceClass
from router.answer import served
from router.api import messages, openai, prompts
from router.api.auth import EVERYONE
from router.api.bodies import GenerateBody, read
from router.api.console import PREFIX as CONSOLE
from router.api.idempotency import Recorded, StoredAnswers
from router.api.openapi import DOCS_PAGE, openapi
from router.api.pooling import Bodies, EmbeddingsRequest, RerankRequest, ScoreRequest
from router.api.preprocess import Origin, check_request_id, new_request_id
from router.api.responses import ResponseApi, ResponsesRequest
from router.api.routes import HEADERS, TENANT, Routes, json_response, read_body
from router.api.sinks import EventStream, Sink, WholeBody, Writer
from router.api.tokens import DetokenizeRequest, TokenizeRequest
from router.batch.runner import Answered

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pdserve.types import Adapter, GenerateRequest, ModelInfo
    from router.adapters import Adapters
    from router.answer import Generates, Out
    from router.api.auth import Keys
    from router.api.batches import BatchApi
    from router.api.console import Console
    from router.api.open_requests import OpenRequests
    from router.api.pooling import PoolingApi
    from router.api.preprocess import ParsedRequest, Preprocessor


logger = logging.getLogger(__name__)

S = TypeVar("S", bound=Sink)

_MESSAGES = "/v1/messages"
_TOKENIZER = ("/tokenize", "/detokenize", "/tokenizer_info")
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_EMBEDDINGS, _POOLING_PREFIX = "/v1/embeddings", "embd-"
_BODIES: dict[str, type[GenerateBody]] = {
    "/v1/chat/completions": openai.ChatRequest,
    "/v1/completions": openai.CompletionRequest,
    "/v1/responses": ResponsesRequest,
    _MESSAGES: messages.MessagesRequest,
}
_POOLING: dict[str, type[Bodies]] = {
    _EMBEDDINGS: EmbeddingsRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
}


class Caller(NamedTuple):
    """Who asks for an answer. `key` is the idempotency key, "" without one."""

    tenant: str
    key: str
    traceparent: str


class HttpApi:
    """Routes and handlers. Models are said to be created when the router started."""

    def __init__(
        self,
        generator: Generates,
        preprocessor: Preprocessor,
        open_requests: OpenRequests,
        render_metrics: Callable[[str], tuple[bytes, str]],
        adapters: Adapters,
        keys: Keys = EVERYONE,
        cors_origins: Collection[str] = (),
        batches: BatchApi | None = None,
        console: Console | None = None,
        *,
        responses: ResponseApi,
        pooling: PoolingApi,
    ) -> None:
        self._answers = StoredAnswers()
        self._cors_origins = frozenset(cors_origins)
        self._generator = generator
        self._preprocessor = preprocessor
        self._open_requests = open_requests
        self._render_metrics = render_metrics
        self._adapters = adapters
        self._keys = keys
        self._console = console
        self._responses = responses
        self._pooling = pooling
        self._started = int(time.time())
        self._routes = Routes(
            {
                **{f"POST {path}": partial(self._generate, kind) for path, kind in _BODIES.items()},
                "GET /v1/responses/{response_id}": responses.show,
                "DELETE /v1/responses/{response_id}": responses.delete,
                f"POST {_MESSAGES}/count_tokens": self._count_tokens,
                **{f"POST {path}": partial(self._pool, kind) for path, kind in _POOLING.items()},
                f"POST {_LOAD}": self._load_adapter,
                f"POST {_UNLOAD}": self._unload_adapter,
                "GET /v1/models": self._list_models,
                "GET /v1/models/{model}": self._show_model,
                "GET /health": self._health,
                "GET /ping": self._health,
                "GET /ready": self._ready,
                "GET /version": self._version,
                "GET /metrics": self._metrics,
                "GET /openapi.json": self._openapi,
                "GET /docs": self._docs,
                "POST /tokenize": self._tokenize,
                "POST /detokenize": self._detokenize,
                "GET /tokenizer_info": self._tokenizer_info,
                **({} if batches is None else batches.handlers),
            }
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request; errors are answered in OpenAI's shape."""
        request[HEADERS] = headers = self._cors(request)
        try:
            response = await self._route(request)
        except PdserveError as error:
            if error.http_status >= 500:
                logger.warning("%s %s: %s", request.method, request.path, error)
            response = _error_response(error, request.path)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            response = _error_response(
                InternalError("internal error; see the router's log"), request.path
            )
        if not response.prepared:
            response.headers.update(headers)
        return response

    def _cors(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the headers that let a page of a configured origin read the response. Browsers
        send no cookies with such a request, and none are asked for."""
        origin = request.headers.get("origin")
        if origin is None or not self._cors_origins or request.path.startswith(CONSOLE):
            return {}
        headers = {"vary": "origin"}
        if origin in self._cors_origins or "*" in self._cors_origins:
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "x-request-id, retry-after"
        return headers

    @staticmethod
    def _preflight(request: web.BaseRequest) -> web.Response:
        wanted = request.headers.get("access-control-request-headers", "")
        allowed = {
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-max-age": "600",
        }
        if wanted:
            allowed["access-control-allow-headers"] = wanted
        return web.Response(status=204, headers=allowed)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        if request.method == "OPTIONS" and "access-control-allow-origin" in request[HEADERS]:
            return self._preflight(request)
        if path in (_LOAD, _UNLOAD):
            self._keys.check_admin(_authorization(request))
        elif path.startswith("/v1/") or path in _TOKENIZER:
            request[TENANT] = self._keys.tenant_of(_authorization(request))
        if self._console is not None and (path == CONSOLE or path.startswith(f"{CONSOLE}/")):
            return await self._console.handle(request, _authorization(request))
        handlers, names = self._routes.find(path)
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        return await handler(request, *names) if handler else _wrong_method(request, handlers)

    async def _list_models(self, _: web.BaseRequest) -> web.Response:
        cards = [self._card(name, *x) for name, x in served(self._generator).items()]
        return json_response({"object": "list", "data": cards})

    async def _show_model(self, _: web.BaseRequest, name: str) -> web.Response:
        found = served(self._generator).get(name)
        if found is None:
            raise ModelNotFound(f"model {name!r} is not served", field="model")
        return json_response(self._card(name, *found))

    def _card(self, name: str, model: ModelInfo, adapter: Adapter | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdserve",
            **({} if adapter is None else {"parent": model.name, "root": adapter.path}),
            # Not OpenAI's: clients need these to make prompts of token ids that fit.
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }

    async def _load_adapter(self, request: web.BaseRequest) -> web.Response:
        body = read(openai.LoadAdapterRequest, await read_body(request))
        name = body.lora_name
        await self._adapters.load(name, body.lora_path, model=body.model, replace=body.load_inplace)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.BaseRequest) -> web.Response:
        name = read(openai.UnloadAdapterRequest, await read_body(request)).lora_name
        await self._adapters.unload(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _health(self, _: web.BaseRequest) -> web.Response:
        return json_response({"status": "ok"})

    async def _version(self, _: web.BaseRequest) -> web.Response:
        return json_response({"version": __version__})

    async def _ready(self, _: web.BaseRequest) -> web.Response:
        self._open_requests.check_open()
        self._generator.check_ready()
        return json_response({"status": "ready"})

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        body, content_type = self._render_metrics(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def _openapi(self, _: web.BaseRequest) -> web.Response:
        return json_response(openapi())

    async def _docs(self, _: web.BaseRequest) -> web.Response:
        return web.Response(body=DOCS_PAGE.read_bytes(), content_type="text/html")

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        body = read(TokenizeRequest, await read_body(request))
        content = body.content()
        model, _ = self._preprocessor.find(body.model or "")
        tokens = await self._preprocessor.tokenise(
            content,
            model,
            body.add_special_tokens,
            field="messages" if body.prompt is None else "prompt",
        )
        found = {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens}
        return json_response({**found, "token_strs": None})

    async def _tokenizer_info(self, request: web.BaseRequest) -> web.Response:
        model, _ = self._preprocessor.find(request.query.get("model", ""))
        return json_response((await self._preprocessor.tokenizer(model)).info)

    async def _count_tokens(self, request: web.BaseRequest) -> web.Response:
        body = read(messages.CountTokensRequest, await read_body(request))
        model, _ = self._preprocessor.find(body.model or "")
        tokens = await self._preprocessor.tokenise(
            body.conversation(), model, None, field="messages"
        )
        return json_response({"input_tokens": len(tokens)})

    async def _pool(self, kind: type[Bodies], request: web.BaseRequest) -> web.Response:
        body = read(kind, await read_body(request))
        origin = Origin(_request_id(request, None, _POOLING_PREFIX), request[TENANT])
        with self._open_requests.enter():
            return json_response(await self._pooling.answer(body, origin))

    async def _detokenize(self, request: web.BaseRequest) -> web.Response:
        body = read(DetokenizeRequest, await read_body(request))
        model, _ = self._preprocessor.find(body.model or "")
        return json_response(
            {"prompt": await self._preprocessor.text(body.tokens, model, field="tokens")}
        )

    async def _generate(
        self, kind: type[GenerateBody], request: web.BaseRequest
    ) -> web.StreamResponse:
        self._open_requests.check_open()
        data = await read_body(request)
        body, headers = read(kind, data), request[HEADERS]
        request_id = _request_id(request, body.named_id(), kind.id_prefix)
        caller = Caller(
            request[TENANT],
            _idempotency_key(request),
            request.headers.get("traceparent", ""),
        )
        parsed = await self._parse(body, request_id, caller.tenant)
        answer = partial(self._answer, body, request_id, parsed, caller)
        if caller.key and not parsed[0].resume:
            digest = self._answers.digest(request.path, data)
            recorded = self._answers.find(caller.tenant, caller.key, digest)
            if recorded is None:
                recorded = Recorded(digest, headers["x-request-id"])
                self._answers.record(caller.tenant, caller.key, recorded, answer(recorded.open))
            else:
                headers["x-request-id"] = recorded.request_id
                headers["idempotent-replayed"] = "true"
            return await recorded.send(request, headers, is_stream=bool(body.stream))
        if body.stream:
            stream = await answer(partial(EventStream, request, headers))
            return stream.response
        whole = await answer(WholeBody)
        return web.Response(body=whole.body, content_type="application/json")

    async def _parse(self, body: GenerateBody, request_id: str, tenant: str) -> list[ParsedRequest]:
        if isinstance(body, ResponsesRequest):
            await self._responses.continue_previous(body, tenant)
        return body.parse(request_id)

    async def _answer(
        self,
        body: GenerateBody,
        request_id: str,
        parsed: Sequence[ParsedRequest],
        caller: Caller,
        open_sink: Callable[[Writer], S],
    ) -> S:
        """Generate an answer into what `open_sink` returns. Raises PdserveError before it begins;
        later the client learns of an error by an event."""
        sink: S | None = None
        try:
            with self._open_requests.enter() as open_request:
                made = [
                    await self._preprocessor.prepare(
                        one, tenant=caller.tenant, traceparent=caller.traceparent
                    )
                    for one in parsed
                ]
                resumes = bool(made[0].resume)
                self._open_requests.claim(open_request, caller.tenant, caller.key, resumes)
                writer = body.writer(request_id, made)
                sink = open_sink(writer)
                await self._serve(parsed, made, sink)
                sink.end()
                await self._responses.keep(writer, caller.tenant)
        except PdserveError as error:
            # Engines refuse a constraint under our own name for it.
            if error.field == "structured_output":
                error.field = body.constraint_field
            if sink is None or not sink.has_begun:
                raise
            sink.fail(error)
        return sink

    async def answer(self, path: str, data: bytes, tenant: str, timeout_s: float) -> Answered:
        """Answer a body that did not come over HTTP, behind all interactive requests. Raises
        PdserveError."""
        if path == _EMBEDDINGS:
            request_id = new_request_id(_POOLING_PREFIX)
            origin = Origin(request_id, tenant, ServiceClass.BATCH, timeout_s)
            found = await self._pooling.answer(read(EmbeddingsRequest, data), origin)
            return Answered(request_id, msgspec.json.encode(found))
        body = read(_BODIES[path], data)
        if body.stream:
            raise InvalidRequest("'stream' must be false in a batch", field="stream")
        request_id = new_request_id(body.id_prefix)
        parsed = await self._parse(body, request_id, tenant)
        for one in parsed:
            one.service_class = ServiceClass.BATCH
            one.timeout_s = timeout_s
        whole = await self._answer(body, request_id, parsed, Caller(tenant, "", ""), WholeBody)
        return Answered(request_id, whole.body)

    async def _serve(
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


def _request_id(request: web.BaseRequest, named: str | None, prefix: str) -> str:
    """Return the client's id, of the header or `named` in the body, with the endpoint's prefix, or
    a new one. The response repeats it."""
    given, field = request.headers.get("x-request-id"), "x-request-id"
    if given is None:
        given, field = named, "request_id"
    if given is None:
        request_id = request[HEADERS]["x-request-id"] = new_request_id(prefix)
        return request_id
    request[HEADERS]["x-request-id"] = check_request_id(given, field=field)
    return prefix + given


def _idempotency_key(request: web.BaseRequest) -> str:
    given = request.headers.get("idempotency-key")
    return "" if given is None else check_request_id(given, field="idempotency-key")


def _authorization(request: web.BaseRequest) -> str | None:
    """Return the Authorization header, or Anthropic's header with the key alone as such a one."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization", None if key is None else f"Bearer {key}")


def _wrong_method(request: web.BaseRequest, supported: Iterable[str]) -> web.Response:
    request[HEADERS]["allow"] = ", ".join(supported)
    text = f"{request.path} supports {' and '.join(supported)} only"
    details = openai.ErrorDetails(text, "invalid_request_error", None, "method_not_allowed")
    return json_response(openai.ErrorBody(details), 405)


def _error_response(error: PdserveError, path: str) -> web.Response:
    api = messages if path.startswith(_MESSAGES) else openai
    response = json_response(api.error_body(error), error.http_status)
    if error.http_status == 401:
        response.headers["www-authenticate"] = "Bearer"
    elif retry_after_s := wait_s(error):
        response.headers["retry-after"] = str(math.ceil(retry_after_s))
    return response
