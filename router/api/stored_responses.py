"""Endpoints of stored responses, and how an answer of the Responses API is stored."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.errors import InvalidRequest, NotFound, QuotaExceeded
from router.api.dialects.responses_writer import ResponseWriter
from router.api.handling import TENANT, json_response
from router.store.database import StoreUnavailable

if TYPE_CHECKING:
    from router.api.dialects.fields import Writer
    from router.metrics import RouterMetrics
    from router.store.responses import ResponseStore

logger = logging.getLogger(__name__)


class ResponseApi:
    """Stored responses. A tenant sees only its own."""

    def __init__(self, store: ResponseStore, metrics: RouterMetrics) -> None:
        self._store, self._metrics = store, metrics

    async def previous(self, previous: str | None, tenant: str) -> tuple[bytes, str]:
        """Return (the JSON of a previous response's items, the id of its conversation), both empty
        without `previous`. Raises InvalidRequest if the response is not stored."""
        if previous is None:
            return b"", ""
        found = await self._store.items(previous, tenant)
        if found is None:
            field = "previous_response_id"
            raise InvalidRequest(f"'{field}': no response {previous!r} is stored", field=field)
        return found

    async def keep(self, writer: Writer, tenant: str) -> None:
        """Store a complete answer of this API, unless the client opted out. A failure is reported
        in the answer, and does not fail it."""
        if not isinstance(writer, ResponseWriter) or (stored := writer.stored(tenant)) is None:
            return
        try:
            await self._store.keep(stored)
        except (StoreUnavailable, QuotaExceeded) as error:
            self._metrics.count("responses_not_stored", error.code)
            logger.warning("response %s is not stored: %s", stored.id, error)
            writer.is_not_stored(error.message)

    async def show(self, request: web.BaseRequest, response_id: str) -> web.Response:
        body = await self._store.body(response_id, request[TENANT])
        if body is None:
            raise _missing(response_id)
        return web.Response(body=body, content_type="application/json")

    async def delete(self, request: web.BaseRequest, response_id: str) -> web.Response:
        if not await self._store.delete(response_id, request[TENANT]):
            raise _missing(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})


def _missing(response_id: str) -> NotFound:
    return NotFound(f"no response {response_id!r} is stored")
