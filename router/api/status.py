"""Endpoints about the router itself: health, version, metrics, and the documents of its API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve import __version__
from router.api.http_request import json_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.api.open_requests import OpenRequests
    from router.attempt.answer import Models
    from router.fleet.peers import RegionPeers

_PAGES = {"/docs": "the API", "/console": "what the service does", "/v1/models": "the models"}
DOCS_PAGE = Path(__file__).with_name("docs.html")


class StatusApi:
    """Handlers. `document` returns the OpenAPI document."""

    def __init__(
        self,
        models: Models,
        peers: RegionPeers,
        open_requests: OpenRequests,
        render_metrics: Callable[[str], tuple[bytes, str]],
        document: Callable[[], dict[str, object]],
    ) -> None:
        self._models, self._peers = models, peers
        self._open_requests = open_requests
        self._render_metrics = render_metrics
        self._document = document

    async def health(self, _: web.BaseRequest) -> web.Response:
        return json_response({"status": "draining" if self._peers.draining else "ok"})

    async def load(self, _: web.BaseRequest) -> web.Response:
        return json_response({"server_load": self._open_requests.count})

    async def ready(self, _: web.BaseRequest) -> web.Response:
        self._open_requests.check_open()
        self._models.check_ready()
        return json_response({"status": "ready"})

    async def version(self, _: web.BaseRequest) -> web.Response:
        return json_response({"version": __version__})

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        body, content_type = self._render_metrics(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def openapi(self, _: web.BaseRequest) -> web.Response:
        return json_response(self._document())

    async def root(self, _: web.BaseRequest) -> web.Response:
        links = "".join(f'<li><a href="{path}">{path}</a>: {what}' for path, what in _PAGES.items())
        page = f"<!doctype html><title>pdserve</title><p>pdserve {__version__}<ul>{links}</ul>"
        return web.Response(text=page, content_type="text/html")

    async def docs(self, _: web.BaseRequest) -> web.Response:
        return web.Response(body=DOCS_PAGE.read_bytes(), content_type="text/html")
