"""Endpoints of stored responses, and how an answer of the Responses API is stored."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.errors import NotFound, QuotaExceeded, UnsupportedField
from router.api.http_request import TENANT, json_response
from router.dialects.responses_writer import ResponseWriter
from router.store.database import StoreUnavailable
from router.store.responses import NewResponse

if TYPE_CHECKING:
    from router.dialects.fields import Writer
    from router.metrics import RouterMetrics
    from router.store.responses import ResponseStore

logger = logging.getLogger(__name__)


class ResponseApi:
    """Stored responses. A tenant sees only its own."""

    def __init__(self, store: ResponseStore, metrics: RouterMetrics) -> None:
        self._store, self._metrics = store, metrics

    async def keep(self, writer: Writer, tenant: str) -> int:
        """Store a complete answer of this API, unless the client opted out, and return its size in
        bytes. A failure is reported in the answer, and does not fail it."""
        if not isinstance(writer, ResponseWriter) or (written := writer.written()) is None:
            return 0
        stored = NewResponse(tenant=tenant, **written._asdict())
        try:
            await self._store.keep(stored)
        except (StoreUnavailable, QuotaExceeded) as error:
            self._metrics.count("responses_not_stored", error.code)
            logger.warning("response %s is not stored: %s", stored.id, error)
            writer.is_not_stored(error.message)
            return 0
        return len(stored.body) + len(stored.items)

    async def show(self, request: web.BaseRequest, response_id: str) -> web.Response:
        if request.query.get("stream", "false").lower() not in ("false", "0", ""):
            raise UnsupportedField(
                "'stream' is not supported: a response is stored as a whole", field="stream"
            )
        body = await self._store.body(response_id, request[TENANT])
        if body is None:
            raise _missing(response_id)
        return web.Response(body=body, content_type="application/json")

    async def input_items(self, _: web.BaseRequest, response_id: str) -> web.Response:
        text = f"the input of {response_id!r} is not listed: continue it with previous_response_id"
        raise UnsupportedField(text, field="input_items")

    async def cancel(self, _: web.BaseRequest, response_id: str) -> web.Response:
        text = f"{response_id!r} is no background response: close the connection of its request"
        raise UnsupportedField(text, field="background")

    async def delete(self, request: web.BaseRequest, response_id: str) -> web.Response:
        if not await self._store.delete(response_id, request[TENANT]):
            raise _missing(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})


def _missing(response_id: str) -> NotFound:
    return NotFound(f"no response {response_id!r} is stored")
