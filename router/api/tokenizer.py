"""Endpoints of the tokenizer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from router.api.dialects.fields import read
from router.api.handling import TENANT, json_response, read_body

if TYPE_CHECKING:
    from router.admission import Door
    from router.api.body_process import LargeBodies
    from router.api.dialects.anthropic import CountTokensRequest
    from router.api.dialects.tokens import DetokenizeRequest, TokenizeRequest
    from router.api.preprocess import Preprocessor

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
        data = await read_body(request)
        self._door.charge(request[TENANT], len(data), 1)
        if len(data) > self._large.larger_than:
            names = await self._large.names(data)
            found = (await self._large.read(kind.__name__, data, names.model)).body
        else:
            body = read(kind, data)
            model, _ = self._preprocessor.find(body.model or "")
            tokenizer = await self._preprocessor.tokenizer(model)
            work = partial(body.answer, tokenizer, model)
            found = await self._preprocessor.run(len(data), work)
        return web.Response(body=found, content_type="application/json")
