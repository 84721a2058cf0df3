"""HTTP API of the router: finds the route of a request, checks its credential, and answers it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import web

from pdserve.errors import InternalError, NotFound, PdserveError, wait_s
from pdserve.security.browsers import BrowserGuard
from router.api.auth import EVERYONE
from router.api.dialects.openai_writer import ErrorBody, ErrorDetails
from router.api.handling import HEADERS, TENANT, Paths, authorization_of, json_response
from router.api.route_table import ROUTES, Credential

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.api.auth import Keys
    from router.api.handling import Handler
    from router.api.route_table import Handlers, Route

logger = logging.getLogger(__name__)


class _Served(NamedTuple):
    route: Route
    handler: Handler


class HttpApi:
    """Answers every HTTP request of the router."""

    def __init__(
        self, handlers: Handlers, keys: Keys = EVERYONE, browsers: BrowserGuard | None = None
    ) -> None:
        self._keys = keys
        self._browsers = browsers or BrowserGuard(checks_host=keys.is_open)
        self._paths = Paths({(x.method, x.path): _Served(x, x.handler(handlers)) for x in ROUTES})

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request. An error becomes a response in the shape of the path's API."""
        methods, names = self._paths.find(request.path)
        # What a path's routes have in common.
        route = next((x.route for x in methods.values()), None)
        request[HEADERS] = headers = self._cors(request, route)
        try:
            response = await self._answer(request, methods, names)
        except PdserveError as error:
            if error.http_status >= 500:
                logger.warning("%s %s: %s", request.method, request.path, error)
            response = _error_response(error, route)
        except Exception:
            logger.exception("%s %s", request.method, request.path)
            response = _error_response(InternalError("internal error; see the router's log"), route)
        if not response.prepared:
            response.headers.update(headers)
        return response

    async def _answer(
        self, request: web.BaseRequest, methods: Mapping[str, _Served], names: tuple[str, ...]
    ) -> web.StreamResponse:
        self._browsers.check(request.headers.get("host"), request.headers.get("origin"))
        if request.method == "OPTIONS" and "access-control-allow-origin" in request[HEADERS]:
            return _preflight(request)
        if not methods:
            raise NotFound(f"no such path: {request.path}")
        found = methods.get("GET" if request.method == "HEAD" else request.method)
        if found is None:
            return _wrong_method(request, methods)
        route, handler = found
        if route.credential is Credential.TENANT:
            request[TENANT] = self._keys.tenant_of(authorization_of(request))
        elif route.credential is Credential.ADMIN:
            self._keys.check_admin(authorization_of(request))
        return await handler(request, *names)

    def _cors(self, request: web.BaseRequest, route: Route | None) -> dict[str, str]:
        """Return the CORS headers that let a page of a configured origin read the response.
        Credentials are not allowed: the API has no cookies."""
        origin = request.headers.get("origin")
        if origin is None or (route is not None and not route.allows_origins):
            return {}
        headers = {"vary": "origin"}
        if self._browsers.allows_origin(origin):
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "x-request-id, retry-after"
        return headers


def _preflight(request: web.BaseRequest) -> web.Response:
    wanted = request.headers.get("access-control-request-headers", "")
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-max-age": "600",
    }
    if wanted:
        allowed["access-control-allow-headers"] = wanted
    return web.Response(status=204, headers=allowed)


def _wrong_method(request: web.BaseRequest, supported: Mapping[str, object]) -> web.Response:
    request[HEADERS]["allow"] = ", ".join(supported)
    text = f"{request.path} supports {' and '.join(supported)} only"
    details = ErrorDetails(text, "invalid_request_error", None, "method_not_allowed")
    return json_response(ErrorBody(details), 405)


def _error_response(error: PdserveError, route: Route | None) -> web.Response:
    body = (ErrorBody if route is None else route.errors).of(error)
    response = json_response(body, error.http_status)
    if error.http_status == 401:
        response.headers["www-authenticate"] = "Bearer"
    elif retry_after_s := wait_s(error):
        response.headers["retry-after"] = str(math.ceil(retry_after_s))
    return response
