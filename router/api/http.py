"""HTTP API of the router: finds the route of a request, checks its credential, and answers it."""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from aiohttp import ClientConnectionResetError, web

from pdserve.errors import InternalError, NotFound, PdserveError, UnsupportedField, wait_s
from pdserve.security.browsers import BrowserGuard
from router.api.auth import EVERYONE
from router.api.http_request import (
    ANTHROPIC_ID,
    CALL,
    HEADERS,
    TENANT,
    authorization_of,
    is_anthropic,
    json_response,
    note_request_id,
)
from router.api.open_requests import ApiCall, new_request_id
from router.api.route_table import ROUTES, Credential
from router.dialects.anthropic import MessageError, MessageErrorDetails
from router.dialects.fields import ErrorBody, ErrorDetails

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.api.auth import Keys
    from router.api.open_requests import CallLog
    from router.api.route_table import Handler, Handlers, Route

logger = logging.getLogger(__name__)

# Model names may contain slashes, and so does the rest of a path.
_NAMES = {"model": "(.+)", "path": "(.*)"}

T = TypeVar("T")


class Paths(Generic[T]):
    """The handler of each method and path, such as ("GET", "/v1/files/{file_id}")."""

    def __init__(self, routes: Mapping[tuple[str, str], T]) -> None:
        self._paths: dict[str, dict[str, T]] = {}
        for (method, path), route in routes.items():
            self._paths.setdefault(path, {})[method] = route
        name = re.compile(r"\{(\w+)\}")
        self._patterns = [
            (re.compile(name.sub(lambda x: _NAMES.get(x[1], "([^/]+)"), path)), methods)
            for path, methods in self._paths.items()
            if "{" in path
        ]

    def find(self, path: str) -> tuple[Mapping[str, T], tuple[str, ...]]:
        """Return what answers a path, by method, and the names in the path."""
        if path in self._paths:
            return self._paths[path], ()
        for pattern, methods in self._patterns:
            if found := pattern.fullmatch(path):
                return methods, found.groups()
        return {}, ()


class _Served(NamedTuple):
    route: Route
    handler: Handler


class HttpApi:
    """Answers every HTTP request of the router."""

    def __init__(
        self,
        handlers: Handlers,
        calls: CallLog,
        keys: Keys = EVERYONE,
        browsers: BrowserGuard | None = None,
    ) -> None:
        self._keys = keys
        self._calls = calls
        self._browsers = browsers or BrowserGuard(checks_host=keys.is_open)
        self._paths = Paths({(x.method, x.path): _Served(x, x.handler(handlers)) for x in ROUTES})

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request. An error becomes a response in the shape of the path's API."""
        methods, names = self._paths.find(request.path)
        # What a path's routes have in common.
        route = next((x.route for x in methods.values()), None)
        request[HEADERS] = headers = self._cors(request, route)
        if is_anthropic(request):
            headers[ANTHROPIC_ID] = ""  # until it is known
        request[CALL] = call = _call(request, route)
        with self._calls.logged(call):
            try:
                response = await self._answer(request, methods, names)
            except PdserveError as error:
                if error.http_status >= 500:
                    logger.warning("%s %s: %s", request.method, request.path, error)
                response = _error_response(error, headers)
                call.fail(error)
            except ClientConnectionResetError:
                raise  # the client has left: aiohttp ends the connection without a word
            except Exception:
                logger.exception("%s %s", request.method, request.path)
                failure = InternalError("internal error; see the router's log")
                response = _error_response(failure, headers)
                call.fail(failure)
            call.status = str(response.status)
        if not response.prepared:
            _name_request(headers)
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
        if ANTHROPIC_ID in request[HEADERS] and request.path.startswith("/v1/files"):
            text = "Anthropic's files are not supported: put images and texts into the messages"
            raise UnsupportedField(text, field="anthropic-version")
        found = methods.get("GET" if request.method == "HEAD" else request.method)
        if found is None:
            return _wrong_method(request, methods)
        route, handler = found
        if route.credential is Credential.TENANT:
            tenant = self._keys.tenant_of(authorization_of(request))
            request[TENANT] = request[CALL].tenant = tenant
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
            headers["access-control-expose-headers"] = "x-request-id, request-id, retry-after"
        return headers


def _call(request: web.BaseRequest, route: Route | None) -> ApiCall:
    headers = request.headers
    return ApiCall(
        # Paths that clients make up must not become labels.
        route="" if route is None else route.path,
        client=request.remote or "",
        user_agent=headers.get("user-agent", ""),
        request_id=headers.get("x-request-id", ""),
        generates=route is not None and route.streams,
        # Health checks, scrapes and the console.
        is_quiet=route is not None and route.credential is Credential.NONE,
    )


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
    request[CALL].code = "method_not_allowed"
    text = f"{request.path} supports {' and '.join(supported)} only"
    if ANTHROPIC_ID in request[HEADERS]:
        return json_response(MessageError(MessageErrorDetails("invalid_request_error", text)), 405)
    details = ErrorDetails(text, "invalid_request_error", None, "method_not_allowed")
    return json_response(ErrorBody(details), 405)


def _name_request(headers: dict[str, str]) -> None:
    """Give a response of Anthropic's API an id if it has none yet."""
    if headers.get(ANTHROPIC_ID) == "":
        note_request_id(headers, new_request_id("req_"))


def _error_response(error: PdserveError, headers: dict[str, str]) -> web.Response:
    body: ErrorBody | MessageError = ErrorBody.of(error)
    if ANTHROPIC_ID in headers:
        _name_request(headers)
        body = MessageError.of(error)
        body.request_id = headers[ANTHROPIC_ID]
    response = json_response(body, error.http_status)
    if error.http_status == 401:
        response.headers["www-authenticate"] = "Bearer"
    elif retry_after_s := wait_s(error):
        response.headers["retry-after"] = str(math.ceil(retry_after_s))
    return response
