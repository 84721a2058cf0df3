"""HTTP endpoints of the console: page, events and actions, with access control.

    GET  /console                  the page; /console/NAME its scripts and its style
    GET  /console/events           server-sent events: a `hello`, then what has changed
    GET  /console/requests/ID      why a request was placed on its workers
    POST /console/{drain,undrain,role}   events with the progress, then one with the result

If keys are configured, everything except the page needs an administrator's key. Without keys, the
console is read-only and open only to this machine.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from msgspec import structs

from pdserve import wire
from pdserve.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PdserveError,
    PermissionDenied,
)
from pdserve.types import Role  # noqa: TC001 - msgspec reads the annotations
from router.api.answer_sinks import EVENT_STREAM
from router.api.audit import http_caller
from router.api.console.views import Viewer, explain
from router.api.http_request import authorization_of, json_response, read_body
from router.dialects.fields import Body, encode, read

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pdserve.observe.audit import Caller
    from router.api.shared import SharedParts
    from router.control.open import WorkerControl
    from router.request_path import RequestPath

PERIOD_S = 0.25
MAX_VIEWERS = 16
# Deadline of one write to a page.
WRITE_TIMEOUT_S = 15.0
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_STATIC = {
    path.name: (path.read_bytes(), _TYPES[path.suffix])
    for path in sorted(Path(__file__).with_name("page").iterdir())
}
# The page shows text from clients, such as model names: none of it may run as a script.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_DRAIN_S = 30.0  # timeout of a drain without one


class DrainBody(Body, kw_only=True):
    worker_id: str
    timeout_s: float | None = None


class UndrainBody(Body, kw_only=True):
    worker_id: str


class RoleBody(Body, kw_only=True):
    worker_id: str
    role: Role
    drain_timeout_s: float | None = None


_ACTIONS: dict[str, type[DrainBody | UndrainBody | RoleBody]] = {
    "drain": DrainBody,
    "undrain": UndrainBody,
    "role": RoleBody,
}


class Console:
    """State: the number of open pages."""

    def __init__(self, path: RequestPath, control: WorkerControl, shared: SharedParts) -> None:
        self._path, self._control = path, control
        self._keys, self._audit = shared.keys, shared.audit
        self._open_requests = shared.open_requests
        self._viewers = 0

    async def handle(self, request: web.BaseRequest, name: str = "") -> web.StreamResponse:
        """Answer a request for /console/NAME. Raises PdserveError."""
        acts = name in _ACTIONS
        if self._keys.admin_is_open:
            if acts:
                keys = "set router.access.admin_keys"
                raise PermissionDenied(f"the console is read-only without keys: {keys}")
            self._keys.check_admin(None)
        if request.method != ("POST" if acts else "GET"):
            raise InvalidRequest(f"{request.method} is not for {request.path}", field="method")
        if page := _STATIC.get(name or "index.html"):
            body, content_type = page
            return web.Response(
                body=body, content_type=content_type, charset="utf-8", headers=_HEADERS
            )
        self._keys.check_admin(authorization_of(request))
        if acts:
            events = self._act(name, await read_body(request), http_caller(request))
            return await self._stream(request, events)
        if name == "events":
            return await self._stream(request, self._events())
        head, _, request_id = name.partition("/")
        if head == "requests" and (found := explain(self._path.decisions, request_id)):
            return json_response(found)
        raise NotFound(f"nothing is kept at {request.path}")

    async def _stream(
        self, request: web.BaseRequest, events: AsyncGenerator[dict[str, Any], None]
    ) -> web.StreamResponse:
        """Send events. Raises PdserveError before the first event; a later error is sent as the
        last event."""
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
        """Yield the events of one viewer until the router stops."""
        if self._viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} consoles are open", retry_after_s=5.0)
        self._viewers += 1
        try:
            viewer = Viewer(self._path, self._control)
            hello = {**viewer.hello(time.time()), "read_only": self._keys.admin_is_open}
            yield {"hello": {**hello, "needs_key": not self._keys.is_open}}
            while not self._open_requests.is_stopping:
                yield viewer.changes()
                await asyncio.sleep(PERIOD_S)
        finally:
            self._viewers -= 1

    async def _act(
        self, name: str, data: bytes, caller: Caller
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Perform an action and yield its progress; the last event has `done`."""
        control = self._control
        body = read(_ACTIONS[name], data)
        with self._audit.action(caller, name, **structs.asdict(body)) as line:
            match body:
                case DrainBody():
                    steps = control.drainer.drain(
                        body.worker_id,
                        timeout_s=body.timeout_s or _DRAIN_S,
                        force=False,
                        stop=False,
                    )
                    async with aclosing(steps):
                        async for step in steps:
                            yield wire.json_object(step)
                case RoleBody():
                    changed = await control.changer.change(
                        body.worker_id, body.role, drain_timeout_s=body.drain_timeout_s or _DRAIN_S
                    )
                    line["result"] = changed.failure or "ok"
                    yield {**wire.json_object(changed), "done": True}
                case _:
                    await control.drainer.undrain(body.worker_id)
                    yield {"done": True}


async def _send(
    request: web.BaseRequest, response: web.StreamResponse, event: dict[str, Any]
) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        if not response.prepared:
            await response.prepare(request)
        await response.write(b"data: %b\n\n" % encode(event))
