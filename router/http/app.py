"""The router's HTTP face: an ASGI application with a table of routes and no framework."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import InternalError, ModelNotFound, PdserveError
from pdserve.kv_metrics import CONTENT_TYPE
from router.auth import EVERYONE
from router.http.errors import error_json, to_json
from router.http.exchange import Exchange
from router.http.generating import CHAT, COMPLETIONS, Generating
from router.http.openapi import document

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.types import ModelInfo
    from router.answer import Generates
    from router.auth import Keys
    from router.http.exchange import Receive, Scope, Send
    from router.intake import Intake
    from router.open_requests import OpenRequests

    Handler = Callable[[Exchange], Awaitable[None]]

logger = logging.getLogger(__name__)

# A client that does not read its answer does not read its error either.
FAIL_TIMEOUT_S = 15.0
_MODELS = "/v1/models"
_GUARDED = "/v1/"


@dataclass(frozen=True, slots=True)
class Services:
    """What the application is a face of. `render_metrics` gives Prometheus' text; `keys` are asked
    for at what is under /v1."""

    generator: Generates
    intake: Intake
    open_requests: OpenRequests
    render_metrics: Callable[[], bytes]
    keys: Keys = EVERYONE


class HttpApp:
    """`started` is when the models are said to have been created, in Unix seconds."""

    def __init__(self, services: Services, *, max_body_bytes: int, started: int) -> None:
        self._services = services
        self._started = started
        self._generating = Generating(
            services.generator,
            services.intake,
            services.open_requests,
            max_body_bytes=max_body_bytes,
        )
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            _MODELS: ("GET", self._list_models),
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._describe),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise InternalError(f"{scope['type']} is not served")
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except PdserveError as error:
            if error.http_status >= 500:
                logger.warning("%s %s: %s", exchange.method, exchange.path, error)
            await _fail(exchange, error)
        except Exception:
            logger.exception("%s %s", exchange.method, exchange.path)
            await _fail(exchange, InternalError("internal error; the router's log has it"))

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.path
        if path.startswith(_GUARDED):
            exchange.tenant = self._services.keys.tenant_of(exchange.header(b"authorization"))
        method, handler = self._routes.get(path, ("", None))
        if handler is None and path.startswith(f"{_MODELS}/"):
            method, handler = "GET", self._show_model
        if handler is None:
            body = error_json(
                f"there is nothing at {path}",
                kind="invalid_request_error",
                param=None,
                code="not_found",
            )
            await exchange.respond(404, body)
        elif exchange.method != method:
            exchange.add_header(b"allow", method)
            body = error_json(
                f"{path} takes {method} only",
                kind="invalid_request_error",
                param=None,
                code="method_not_allowed",
            )
            await exchange.respond(405, body)
        else:
            await handler(exchange)

    async def _chat(self, exchange: Exchange) -> None:
        await self._generating.answer(exchange, CHAT)

    async def _completions(self, exchange: Exchange) -> None:
        await self._generating.answer(exchange, COMPLETIONS)

    async def _list_models(self, exchange: Exchange) -> None:
        models = self._services.generator.models()
        cards = [self._card(models[name]) for name in sorted(models)]
        await exchange.respond(200, to_json({"object": "list", "data": cards}))

    async def _show_model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix(f"{_MODELS}/")
        model = self._services.generator.models().get(name)
        if model is None:
            raise ModelNotFound(f"model {name!r} is not served here", field="model")
        await exchange.respond(200, to_json(self._card(model)))

    def _card(self, model: ModelInfo) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdserve",
            # Not OpenAI's: what a client needs to make prompts of token ids that fit.
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }

    async def _health(self, exchange: Exchange) -> None:
        await exchange.respond(200, to_json({"status": "ok"}))

    async def _ready(self, exchange: Exchange) -> None:
        self._services.open_requests.check_open()
        self._services.generator.check_ready()
        await exchange.respond(200, to_json({"status": "ready"}))

    async def _describe(self, exchange: Exchange) -> None:
        await exchange.respond(200, to_json(document()))

    async def _metrics(self, exchange: Exchange) -> None:
        body = self._services.render_metrics()
        await exchange.respond(200, body, content_type=CONTENT_TYPE.encode())


async def _fail(exchange: Exchange, error: PdserveError) -> None:
    try:
        async with asyncio.timeout(FAIL_TIMEOUT_S):
            await exchange.fail(error)
    except TimeoutError:
        logger.warning("%s %s: the client does not read", exchange.method, exchange.path)
