"""Endpoints about the router itself: health, version, metrics, and the documents of its API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve import __version__
from router.api.handling import json_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.api.open_requests import OpenRequests
    from router.request.answer import Generates

DOCS_PAGE = Path(__file__).with_name("docs.html")


class StatusApi:
    """Handlers. `document` returns the OpenAPI document."""

    def __init__(
        self,
        generator: Generates,
        open_requests: OpenRequests,
        render_metrics: Callable[[str], tuple[bytes, str]],
        document: Callable[[], dict[str, object]],
    ) -> None:
        self._generator = generator
        self._open_requests = open_requests
        self._render_metrics = render_metrics
        self._document = document

    async def health(self, _: web.BaseRequest) -> web.Response:
        return json_response({"status": "ok"})

    async def ready(self, _: web.BaseRequest) -> web.Response:
        self._open_requests.check_open()
        self._generator.check_ready()
        return json_response({"status": "ready"})

    async def version(self, _: web.BaseRequest) -> web.Response:
        return json_response({"version": __version__})

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        body, content_type = self._render_metrics(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def openapi(self, _: web.BaseRequest) -> web.Response:
        return json_response(self._document())

    async def docs(self, _: web.BaseRequest) -> web.Response:
        return web.Response(body=DOCS_PAGE.read_bytes(), content_type="text/html")
