"""Passes trainers' calls at a worker's own address on to a router. One update there changes all
workers: calls of the same update, which other workers pass on, join it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from pdserve.errors import (
    DeadlineExceeded,
    Overloaded,
    PdserveError,
    RequestTooLarge,
    Unavailable,
)
from pdserve.security.tls import tls_dialer
from pdserve.trainer_calls import READY_CALLS, UPDATE_CALLS

if TYPE_CHECKING:
    from pdserve.config import WorkerConfig

_CALLS = frozenset((*UPDATE_CALLS, *READY_CALLS))
# The router decides on the credential. Browsers cannot be callers, so no origin and no cookies.
_ASKED = ("authorization", "x-api-key", "content-type")
_ANSWERED = ("content-type", "retry-after", "allow")
_MAX_BODY_BYTES, _MAX_ANSWER_BYTES = 1 << 20, 4 << 20
_MAX_OPEN = 64
_BODY_S, _CONNECT_S = 30.0, 10.0
# An update waits for open answers and loads weights; the router has its own, shorter limits.
_CALL_S = 3600.0


class TrainerCalls:
    """An asynchronous context manager. State: connections to the router, and open calls."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises ConfigError if the file with the router's CA cannot be used."""
        self._url = config.trainer_calls.rstrip("/")
        self._context = tls_dialer(ca_file=config.access.tls.ca_file, at="access.tls").context
        self._open = 0
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> TrainerCalls:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_MAX_OPEN, ssl=self._context or True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=_CALL_S, sock_connect=_CONNECT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def takes(self, request: web.BaseRequest) -> bool:
        return (request.method, request.path) in _CALLS

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Return the router's answer, or an error of this worker."""
        try:
            if self._open == _MAX_OPEN:
                raise Overloaded(f"{_MAX_OPEN} calls are open on this worker")
            self._open += 1
            try:
                return await self._answer(request)
            finally:
                self._open -= 1
        except PdserveError as error:
            shown = {"error": {"message": error.message, "code": error.code}}
            return web.json_response(shown, status=error.http_status)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        body = await _read(request.content, _MAX_BODY_BYTES, _BODY_S)
        headers = {x: request.headers[x] for x in _ASKED if x in request.headers}
        try:
            async with self._session.request(
                request.method,
                self._url + request.path_qs,
                data=body or None,
                headers=headers,
                allow_redirects=False,
            ) as reply:
                data = await _read(reply.content, _MAX_ANSWER_BYTES, _CALL_S)
                kept = {x: reply.headers[x] for x in _ANSWERED if x in reply.headers}
                return web.Response(body=data, status=reply.status, headers=kept)
        except (aiohttp.ClientError, TimeoutError) as error:
            text = f"the router {self._url} (worker.trainer_calls) did not answer: {error}"
            raise Unavailable(text, retry_after_s=1.0) from error


async def _read(content: aiohttp.StreamReader, most: int, within_s: float) -> bytes:
    """Read a body. Raises RequestTooLarge and DeadlineExceeded."""
    data = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in content.iter_any():
                data += chunk
                if len(data) > most:
                    raise RequestTooLarge(f"the body has more than {most} bytes", field="body")
    except TimeoutError as error:
        raise DeadlineExceeded(f"the body did not end within {within_s:g} s") from error
    return bytes(data)
