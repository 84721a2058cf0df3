"""What the handlers of HTTP calls read from a request: its credential, ids and body."""

from __future__ import annotations

import asyncio

from aiohttp import web

from pdserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    RequestTooLarge,
    UnsupportedMediaType,
)
from router.api.open_requests import ApiCall, check_request_id, new_request_id
from router.dialects.fields import encode

BODY_TIMEOUT_S = 30.0
_JSON = "application/json"
HEADERS = web.RequestKey("response_headers", dict[str, str])
TENANT = web.RequestKey("tenant", str)
CALL = web.RequestKey("call", ApiCall)
ANTHROPIC_ID = "request-id"


def authorization_of(request: web.BaseRequest) -> str | None:
    """Return the Authorization header, or its equivalent of Anthropic's `x-api-key`."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization", None if key is None else f"Bearer {key}")


def request_id_of(request: web.BaseRequest, named: str | None, prefix: str) -> str:
    """Return the request id, with the endpoint's prefix: from the header, from the body (`named`),
    or new. The response's headers repeat it."""
    given, field = request.headers.get("x-request-id"), "x-request-id"
    if given is None:
        given, field = named, "request_id"
    shown = new_request_id(prefix) if given is None else check_request_id(given, field=field)
    note_request_id(request[HEADERS], shown)
    return shown if given is None else prefix + shown


def note_request_id(headers: dict[str, str], request_id: str) -> None:
    """Put the id into the headers of the response, also under the name that Anthropic's API has if
    they have it."""
    headers["x-request-id"] = request_id
    if ANTHROPIC_ID in headers:
        headers[ANTHROPIC_ID] = request_id


def is_anthropic(request: web.BaseRequest) -> bool:
    """Return whether the response has the form of Anthropic's API: by its path, or by the header
    that its clients send."""
    path = request.path
    return f"{path}/".startswith("/v1/messages/") or "anthropic-version" in request.headers


async def read_body(request: web.BaseRequest) -> bytes:
    """Read a JSON body. Raises RequestTooLarge, DeadlineExceeded for a slow body,
    UnsupportedMediaType, and InvalidRequest."""
    # Browsers send other content types for a page of any origin without a CORS preflight.
    kind = request.headers.get("content-type", "")
    if kind != _JSON and kind.partition(";")[0].strip().lower() != _JSON:
        raise UnsupportedMediaType(
            f"the body must have Content-Type: {_JSON}, not {kind!r}", field="content-type"
        )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("compressed bodies are not supported", field="content-encoding")
    # Answered here, so that a body that is too large is refused before the client sends it.
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
    return web.Response(body=encode(value), status=status, content_type=_JSON)
