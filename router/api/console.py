"""The console over HTTP: its page, who may see it, its events, and its actions.

    GET  /console                  the page; /console/NAME its scripts and its style
    GET  /console/events           server-sent events: a `hello`, then what has changed
    GET  /console/requests/ID      why a request was placed on its workers
    POST /console/{drain,undrain,role}   events with the progress, then one with the result

Where keys are set, all but the page needs an administrator's key. Where none are set, the console
is read-only, and only for this machine.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohttp import web
from google.protobuf.json_format import MessageToDict

from pdserve.config import is_exposed
from pdserve.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PdserveError,
    PermissionDenied,
)
from pdserve.types import Role  # noqa: TC001 - msgspec reads the annotations
from router.api.bodies import Body, encode, read
from router.api.routes import json_response, read_body
from router.api.sinks import EVENT_STREAM
from router.console import Viewer
from router.operations import drain, undrain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from google.protobuf.message import Message

    from router.api.auth import Keys
    from router.api.open_requests import OpenRequests
    from router.console import Sources

PREFIX = "/console"
PERIOD_S = 0.25
MAX_VIEWERS = 16
# For a page to take an event.
WRITE_TIMEOUT_S = 15.0
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_STATIC = {
    path.name: (path.read_bytes(), _TYPES[path.suffix])
    for path in sorted(Path(__file__).with_name("console_page").iterdir())
}
# The page shows what clients sent, such as names of models: nothing of it may become a script.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class DrainBody(Body, kw_only=True):
    worker_id: str
    timeout_s: float = 30.0


class UndrainBody(Body, kw_only=True):
    worker_id: str


class RoleBody(Body, kw_only=True):
    worker_id: str
    role: Role
    drain_timeout_s: float = 30.0


class Console:
    """State: how many pages are open. `host` is the address of the HTTP listener."""

    def __init__(
        self, sources: Sources, keys: Keys, open_requests: OpenRequests, host: str
    ) -> None:
        self._sources = sources
        self._keys = keys
        self._open_requests = open_requests
        self._is_exposed = is_exposed(host)
        self._viewers = 0

    async def handle(
        self, request: web.BaseRequest, authorization: str | None
    ) -> web.StreamResponse:
        """Answer a request under PREFIX. Raises PdserveError."""
        name = request.path.removeprefix(PREFIX).removeprefix("/")
        acts = name in ("drain", "undrain", "role")
        if self._keys.admin_is_open:
            self._check_local(request, acts=acts)
        if request.method != ("POST" if acts else "GET"):
            raise InvalidRequest(f"{request.method} is not for {request.path}", field="method")
        if page := _STATIC.get(name or "index.html"):
            body, content_type = page
            return web.Response(
                body=body, content_type=content_type, charset="utf-8", headers=_HEADERS
            )
        self._keys.check_admin(authorization)
        if acts:
            return await self._stream(request, self._act(name, await read_body(request)))
        if name == "events":
            return await self._stream(request, self._events())
        head, _, request_id = name.partition("/")
        if head == "requests" and (found := self._sources.explain(request_id)):
            return json_response(found)
        raise NotFound(f"nothing is kept at {request.path}")

    def _check_local(self, request: web.BaseRequest, *, acts: bool) -> None:
        """Raises PermissionDenied unless the caller may look although no keys are set."""
        keys = "set router.access.admin_keys"
        if acts:
            raise PermissionDenied(f"the console is read-only without keys: {keys}")
        if self._is_exposed:
            text = "the console needs keys where other machines can reach router.http_host"
            raise PermissionDenied(f"{text}: {keys}")
        # A page elsewhere may have let its own name point to this machine (DNS rebinding).
        if is_exposed(urlsplit(f"//{request.host}").hostname or ""):
            text = f"without keys, the console is not served to other names than localhost: {keys}"
            raise PermissionDenied(text)

    async def _stream(
        self, request: web.BaseRequest, events: AsyncGenerator[dict[str, Any], None]
    ) -> web.StreamResponse:
        """Send events. Raises PdserveError before the first one; later the last event tells it."""
        response = web.StreamResponse(headers={**EVENT_STREAM, **_HEADERS})
        async with aclosing(events):
            try:
                async for event in events:
                    await _send(request, response, event)
            except PdserveError as error:
                if not response.prepared:
                    raise
                await _send(request, response, {"done": True, "failure": error.message})
        return response

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield what one viewer sees, until the router stops."""
        if self._viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} consoles are open", retry_after_s=5.0)
        self._viewers += 1
        try:
            viewer = Viewer(self._sources)
            hello = {**viewer.hello(time.time()), "read_only": self._keys.admin_is_open}
            yield {"hello": {**hello, "needs_key": not self._keys.is_open}}
            while not self._open_requests.is_stopping:
                yield viewer.changes()
                await asyncio.sleep(PERIOD_S)
        finally:
            self._viewers -= 1

    async def _act(self, name: str, data: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """Do what is asked and yield its progress; the last event is `done`."""
        sources = self._sources
        if name == "drain":
            body = read(DrainBody, data)
            worker_id, timeout_s = body.worker_id, body.timeout_s
            steps = drain(sources.fleet, worker_id, timeout_s=timeout_s, force=False, stop=False)
            async with aclosing(steps):
                async for step in steps:
                    yield _plain(step)
        elif name == "undrain":
            await undrain(sources.fleet, read(UndrainBody, data).worker_id)
            yield {"done": True}
        else:
            asked = read(RoleBody, data)
            changed = await sources.changer.change(
                asked.worker_id, asked.role, drain_timeout_s=asked.drain_timeout_s
            )
            yield {**_plain(changed), "done": True}


async def _send(
    request: web.BaseRequest, response: web.StreamResponse, event: dict[str, Any]
) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        if not response.prepared:
            await response.prepare(request)
        await response.write(b"data: %b\n\n" % encode(event))


def _plain(message: Message) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
