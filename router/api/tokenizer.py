"""Endpoints of the tokenizer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from router.api.dialects.fields import read
from router.api.dialects.tokens import DetokenizeRequest
from router.api.handling import TENANT, json_response, read_body
from router.api.images import image_bytes

if TYPE_CHECKING:
    from router.admission import Door
    from router.api.body_process import LargeBodies
    from router.api.dialects.anthropic import CountTokensRequest
    from router.api.dialects.tokens import TokenizeRequest
    from router.api.preprocess import Preprocessor
    from router.operations.rendering import ImagePrompt

    TokenizerBody = TokenizeRequest | DetokenizeRequest | CountTokensRequest


class TokenizerApi:
    """Handlers."""

    def __init__(self, preprocessor: Preprocessor, large: LargeBodies, door: Door) -> None:
        self._preprocessor = preprocessor
        self._large = large
        self._door = door

    async def info(self, request: web.BaseRequest) -> web.Response:
        model, _ = self._preprocessor.find(request.query.get("model", ""))
        return json_response((await self._preprocessor.tokenizer(model)).info)

    async def tokens(self, kind: type[TokenizerBody], request: web.BaseRequest) -> web.Response:
        data, tenant = await read_body(request), request[TENANT]
        self._door.charge(tenant, len(data), 1, images=image_bytes(data))
        found: bytes | ImagePrompt
        if len(data) > self._large.larger_than:
            name = (await self._large.names(data)).model
            done = await self._large.read(kind.__name__, data, name, tenant)
            found = done.images or done.body
        else:
            body = read(kind, data)
            name = body.model
            model, _ = self._preprocessor.find(name or "")
            tokenizer = await self._preprocessor.tokenizer(model)
            work = partial(body.answer, tokenizer, model, self._preprocessor.parts_of(tenant))
            found = await self._preprocessor.run(len(data), work)
        if not isinstance(found, bytes):
            assert not issubclass(kind, DetokenizeRequest), "it has no images"
            model, _ = self._preprocessor.find(name or "")
            found = kind.counted(await self._preprocessor.count_with_images(found, model), model)
        return web.Response(body=found, content_type="application/json")
