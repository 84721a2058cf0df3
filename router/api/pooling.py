"""Endpoints of pooling models: embeddings, scores and reranking, also as lines of a batch."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from aiohttp import web
from msgspec import Raw

from pdserve.errors import PdserveError
from pdserve.types import ServiceClass
from router.api.body_process import unpack
from router.api.dialects.embeddings import (
    EmbeddingsRequest,
    Inputs,
    ScoreRequest,
    tokenised,
)
from router.api.dialects.fields import encode, read, refuse
from router.api.handling import TENANT, AnsweredLine, read_body, request_id_of
from router.api.preprocess import Origin, new_request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from pdserve.types import ModelInfo
    from router.admission import Door
    from router.api.body_process import LargeBodies
    from router.api.dialects.embeddings import PoolingRequest
    from router.api.open_requests import OpenRequests
    from router.api.preprocess import Preprocessor
    from router.request.pooling import Embedder

    Vector = NDArray[np.float32]

T = TypeVar("T")

_AT_ONCE = 64  # inputs of one request in admission
_ID_PREFIX = "embd-"


class PoolingApi:
    """Handlers of embeddings, score and rerank requests."""

    def __init__(
        self,
        embedder: Embedder,
        preprocessor: Preprocessor,
        open_requests: OpenRequests,
        *,
        large: LargeBodies,
        door: Door,
    ) -> None:
        self._embedder = embedder
        self._preprocessor = preprocessor
        self._open_requests = open_requests
        self._large = large
        self._door = door

    async def pool(self, kind: type[PoolingRequest], request: web.BaseRequest) -> web.Response:
        data = await read_body(request)
        request_id = request_id_of(request, None, _ID_PREFIX)
        with self._open_requests.enter():
            answer = await self._serve(kind, data, Origin(request_id, request[TENANT]))
        return web.Response(body=answer, content_type="application/json")

    async def answer_line(
        self, kind: type[PoolingRequest], data: bytes, tenant: str, timeout_s: float
    ) -> AnsweredLine:
        """Answer the body of a batch line, behind all interactive requests. Raises
        PdserveError."""
        request_id = new_request_id(_ID_PREFIX)
        origin = Origin(request_id, tenant, ServiceClass.BATCH, timeout_s)
        return AnsweredLine(request_id, await self._serve(kind, data, origin))

    async def _serve(self, kind: type[PoolingRequest], data: bytes, origin: Origin) -> bytes:
        with self._door.charge(origin.tenant, len(data)):
            if len(data) > self._large.larger_than:
                model = self._model((await self._large.names(data)).model, kind)
                done = await self._large.read(kind.__name__, data, model.name, origin.tenant)
                body = read(kind, done.body)
                inputs = Inputs(unpack(done), done.second_at, done.order)
            else:
                body = read(kind, data)
                model = self._model(body.model, kind)
                tokenizer = await self._preprocessor.tokenizer_or_none(model)
                work = partial(tokenised, body, tokenizer, model)
                inputs = await self._preprocessor.run(len(data), work)
        return await self._answer(body, inputs, model, origin)

    def _model(self, name: str | None, kind: type[PoolingRequest]) -> ModelInfo:
        """Return the model with this name. Raises InvalidRequest if it cannot answer bodies of this
        kind."""
        model, adapter = self._preprocessor.find(name or "")
        if adapter is not None:
            refuse("model", f"{name} is a LoRA adapter: adapters have no embeddings")
        if model.cross_encoder and kind is EmbeddingsRequest:
            refuse("model", f"{model.name} scores pairs of texts, and has no embeddings")
        self._embedder.check(model.name)
        return model

    async def _answer(
        self, body: PoolingRequest, inputs: Inputs, model: ModelInfo, origin: Origin
    ) -> bytes:
        """Return the JSON of the answer. Raises PdserveError as `Embedder.embed` does."""
        tokens = sum(len(inputs.tokens[i]) for i in inputs.order)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        head = {"id": origin.request_id, "model": model.name, "usage": usage}
        if isinstance(body, EmbeddingsRequest):
            shape = _as_base64 if body.encoding_format == "base64" else _as_floats
            found = await self._embed(inputs, model, origin, shape)
            data: list[dict[str, Any]] = [
                {"object": "embedding", "index": i, "embedding": found[place]}
                for i, place in enumerate(inputs.order)
            ]
            return encode({**head, "object": "list", "data": data})
        scores = await self._scores(inputs, model, origin)
        if isinstance(body, ScoreRequest):
            data = [{"index": i, "object": "score", "score": x} for i, x in enumerate(scores)]
            return encode({**head, "object": "list", "data": data})
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results = [
            {"index": i, "relevance_score": scores[i]}
            | ({"document": {"text": body.documents[i]}} if body.return_documents else {})
            for i in best
        ]
        return encode({**head, "results": results})

    async def _scores(self, inputs: Inputs, model: ModelInfo, origin: Origin) -> list[float]:
        """Return the score of each pair."""
        found, order = await self._embed(inputs, model, origin, _vector), inputs.order
        if model.cross_encoder:
            return [float(found[i][0]) for i in order]
        pairs = zip(order[::2], order[1::2], strict=True)
        return [_cosine(found[a], found[b]) for a, b in pairs]

    async def _embed(
        self, inputs: Inputs, model: ModelInfo, origin: Origin, shape: Callable[[bytes], T]
    ) -> list[T]:
        """Return `shape(embedding)` of each input."""
        # A batch answers many lines at the same time, so each line sends its inputs one by one.
        places = asyncio.Semaphore(
            _AT_ONCE if origin.service_class is ServiceClass.INTERACTIVE else 1
        )

        async def embed(index: int, tokens: Sequence[int], second_at: int) -> T:
            request = self._preprocessor.embedding_request(tokens, second_at, model, origin, index)
            async with places:
                # Shaped one by one: shaping all at the end would delay other streams.
                return shape(await self._embedder.embed(request))

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(embed(i, *each))
                    for i, each in enumerate(zip(inputs.tokens, inputs.second_at, strict=True))
                ]
        except* PdserveError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in running]


def _vector(embedding: bytes) -> Vector:
    return np.frombuffer(embedding, "<f4")


def _as_floats(embedding: bytes) -> Raw:
    return Raw(encode(_vector(embedding).tolist()))


def _as_base64(embedding: bytes) -> str:
    return base64.b64encode(embedding).decode()


def _cosine(a: Vector, b: Vector) -> float:
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else 0.0
