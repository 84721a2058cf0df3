"""What the handlers of the HTTP API share: routes, a request's tenant and body, JSON responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from pdserve.errors import DeadlineExceeded, InvalidRequest, NotFound, RequestTooLarge
from router.api.bodies import encode

Handler = Callable[..., Awaitable[web.StreamResponse]]
"""Gets the request and the names in its path."""

BODY_TIMEOUT_S = 30.0
HEADERS = web.RequestKey("response_headers", dict[str, str])
TENANT = web.RequestKey("tenant", str)
# Names of models have slashes.
_NAMES = {"model": "(.+)"}


class Routes:
    """Handlers by method and path, such as "GET /v1/files/{file_id}"."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._paths: dict[str, dict[str, Handler]] = {}
        for route, handler in handlers.items():
            method, path = route.split()
            self._paths.setdefault(path, {})[method] = handler
        name = re.compile(r"\{(\w+)\}")
        self._patterns = [
            (re.compile(name.sub(lambda x: _NAMES.get(x[1], "([^/]+)"), path)), handlers)
            for path, handlers in self._paths.items()
            if "{" in path
        ]

    def find(self, path: str) -> tuple[Mapping[str, Handler], tuple[str, ...]]:
        """Return the handlers of a path by method, and the names in it. Raises NotFound."""
        if path in self._paths:
            return self._paths[path], ()
        for pattern, handlers in self._patterns:
            if found := pattern.fullmatch(path):
                return handlers, found.groups()
        raise NotFound(f"no such path: {path}")


async def read_body(request: web.BaseRequest) -> bytes:
    """Raises RequestTooLarge, DeadlineExceeded for a slow body, and InvalidRequest."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("compressed bodies are not supported", field="content-encoding")
    if request.headers.get("expect", "").lower() == "100-continue" and request.transport:
        if (request.content_length or 0) > request.client_max_size:
            raise _too_large(request)
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():
            body = request.content.read_nowait()
            if len(body) > request.client_max_size:
                raise _too_large(request)
            return body
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(request) from None


def _too_large(request: web.BaseRequest) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {request.client_max_size} bytes")


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type="application/json")
