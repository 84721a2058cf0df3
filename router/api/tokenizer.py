"""Endpoints of the tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from router.api.http_request import TENANT, json_response, read_body
from router.dialects.tokens import DetokenizeRequest
from router.intake.image_prompts import ImagePrompt
from router.placement.residency import narrowest

if TYPE_CHECKING:
    from router.api.shared import SharedParts
    from router.dialects.anthropic import CountTokensRequest
    from router.dialects.tokens import TokenizeRequest

    TokenizerBody = TokenizeRequest | DetokenizeRequest | CountTokensRequest


class TokenizerApi:
    """Handlers."""

    def __init__(self, shared: SharedParts) -> None:
        self._intake = shared.intake

    async def info(self, request: web.BaseRequest) -> web.Response:
        model, _ = self._intake.models.find(request.query.get("model", ""))
        return json_response((await self._intake.tokenizer(model)).info)

    async def tokens(self, kind: type[TokenizerBody], request: web.BaseRequest) -> web.Response:
        data, tenant = await read_body(request), request[TENANT]
        self._intake.charge(tenant, data, requests=1)
        names = await self._intake.names(kind, data)
        geo = narrowest(names.inference_geo, request.headers)
        regions = self._intake.residency.regions_of(tenant, geo)
        model = await self._intake.find_model(names.model)
        found = await self._intake.tokenise(kind, data, names, model, tenant)
        answer = found.answer
        for prompt in found.prompts:  # one with images
            assert isinstance(prompt, ImagePrompt)
            assert not issubclass(kind, DetokenizeRequest)
            rendered = await self._intake.render(prompt, model, regions, tenant)
            answer = kind.counted(rendered.token_ids, model)
        return web.Response(body=answer, content_type="application/json")
