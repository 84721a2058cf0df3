"""Endpoints of pooling models: embeddings, scores and reranking, also as lines of a batch."""

from __future__ import annotations

import asyncio
import base64
import time
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from aiohttp import web
from msgspec import Raw, structs

from pdserve.errors import PdserveError
from pdserve.types import ServiceClass
from router.api.answer_sinks import AnsweredLine
from router.api.http_request import TENANT, read_body, request_id_of
from router.api.open_requests import new_request_id
from router.dialects.embeddings import (
    CohereEmbedRequest,
    EmbeddingBody,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from router.dialects.fields import encode, refuse
from router.intake.intake import Origin
from router.placement.residency import HEADER, narrowest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from pdserve.types import ModelInfo
    from router.api.shared import SharedParts
    from router.attempt.answer import Embeds
    from router.attempt.pooling_placer import PoolingPlacer
    from router.dialects.embeddings import PoolingRequest
    from router.intake.tokenise import Inputs

    Vector = NDArray[np.float32]

T = TypeVar("T")

_AT_ONCE = 64  # inputs of one request in admission
_ID_PREFIX = "embd-"
_BYTES = "application/octet-stream"


class _Answer(NamedTuple):
    body: bytes
    content: str = "application/json"
    headers: Mapping[str, str] = MappingProxyType({})


class PoolingApi:
    """Handlers of embeddings, score and rerank requests."""

    def __init__(self, embedder: Embeds, workers: PoolingPlacer, shared: SharedParts) -> None:
        self._embedder, self._workers, self._ledger = embedder, workers, shared.ledger
        self._intake, self._open_requests = shared.intake, shared.open_requests

    async def pool(self, kind: type[PoolingRequest], request: web.BaseRequest) -> web.Response:
        data = await read_body(request)
        request_id = request_id_of(request, None, _ID_PREFIX)
        header = request.headers.get(HEADER, "")
        origin = Origin(request_id, request[TENANT], inference_geo=header)
        with self._open_requests.enter():
            answer = await self._serve(kind, data, origin)
        return web.Response(body=answer.body, content_type=answer.content, headers=answer.headers)

    async def answer_line(
        self, kind: type[PoolingRequest], data: bytes, tenant: str, timeout_s: float
    ) -> AnsweredLine:
        """Answer the body of a batch line, behind all interactive requests. Raises
        PdserveError."""
        request_id = new_request_id(_ID_PREFIX)
        origin = Origin(request_id, tenant, service_class=ServiceClass.BATCH, timeout_s=timeout_s)
        body = (await self._serve(kind, data, origin)).body
        self._ledger.stored(tenant, request_id, "batch_result", len(body))
        return AnsweredLine(request_id, body)

    async def _serve(self, kind: type[PoolingRequest], data: bytes, origin: Origin) -> _Answer:
        tenant = origin.tenant
        with self._intake.charge(tenant, data):
            names = await self._intake.names(kind, data)
            model = self._model(names.model, kind)
            self._intake.check_allowed(tenant, names.model, model)
            found = await self._intake.tokenise(kind, data, names, model, tenant)
        geo = narrowest(found.body.inference_geo, {HEADER: origin.inference_geo})
        origin = structs.replace(origin, inference_geo=geo)
        return await self._answer(found.body, found.inputs, model, origin)

    def _model(self, name: str | None, kind: type[PoolingRequest]) -> ModelInfo:
        """Return the model with this name. Raises InvalidRequest if it cannot answer bodies of this
        kind."""
        model, adapter = self._intake.models.find(name or "")
        if adapter is not None:
            refuse("model", f"{name} is a LoRA adapter: adapters have no embeddings")
        if model.cross_encoder and kind not in (ScoreRequest, RerankRequest):
            refuse("model", f"{model.name} scores pairs of texts, and has no embeddings")
        self._workers.check(model.name)
        return model

    async def _answer(
        self, body: PoolingRequest, inputs: Inputs, model: ModelInfo, origin: Origin
    ) -> _Answer:
        """Return the answer. Raises PdserveError as `EmbeddingServer.embed` does."""
        counted = inputs.order
        if isinstance(body, ScoreRequest | RerankRequest) and not model.cross_encoder:
            # A query is embedded once, however many documents it is compared with.
            counted = [*dict.fromkeys(counted[::2]), *counted[1::2]]
        tokens = sum(len(inputs.tokens[i]) for i in counted)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        head: dict[str, Any] = {"id": origin.request_id, "model": model.name, "usage": usage}
        if isinstance(body, CohereEmbedRequest):
            return await self._by_type(body, inputs, model, origin, tokens)
        head["created"] = int(time.time())
        if isinstance(body, EmbeddingBody):
            return await self._embeddings(body, inputs, model, origin, head)
        scores = await self._scores(inputs, model, origin)
        if isinstance(body, ScoreRequest):
            data = [{"index": i, "object": "score", "score": x} for i, x in enumerate(scores)]
            return _Answer(encode({**head, "object": "list", "data": data}))
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results = [
            {"index": i, "relevance_score": scores[i]}
            | (
                {"document": {"text": body.documents[i]}}
                if body.return_documents is not False
                else {}
            )
            for i in best
        ]
        return _Answer(encode({**head, "results": results}))

    async def _embeddings(
        self,
        body: EmbeddingBody,
        inputs: Inputs,
        model: ModelInfo,
        origin: Origin,
        head: dict[str, Any],
    ) -> _Answer:
        form, head = body.encoding_format, {**head, "object": "list"}
        if form in ("bytes", "bytes_only"):
            if origin.service_class is ServiceClass.BATCH:
                refuse("encoding_format", "must be float or base64 in a batch")
            vectors = await self._embed(inputs, model, origin, bytes)
            content = b"".join(vectors[place] for place in inputs.order)
            if form == "bytes_only":
                return _Answer(content, _BYTES)
            size = len(content) // len(inputs.order)
            kind = {"embed_dtype": "float32", "endianness": "little", "shape": [size // 4]}
            head["data"] = [
                {"index": i, **kind, "start": i * size, "end": (i + 1) * size}
                for i in range(len(inputs.order))
            ]
            return _Answer(content, _BYTES, {"metadata": encode(head).decode()})
        found = await self._embed(inputs, model, origin, _SHAPES[form or "float"])
        names = ("pooling", "data") if isinstance(body, PoolRequest) else ("embedding", "embedding")
        data = [
            {"object": names[0], "index": i, names[1]: found[place]}
            for i, place in enumerate(inputs.order)
        ]
        return _Answer(encode({**head, "data": data}))

    async def _by_type(
        self,
        body: CohereEmbedRequest,
        inputs: Inputs,
        model: ModelInfo,
        origin: Origin,
        tokens: int,
    ) -> _Answer:
        """Return an answer in Cohere's form."""
        kinds = body.embedding_types or ["float"]
        found = await self._embed(
            inputs, model, origin, lambda vector: {kind: _SHAPES[kind](vector) for kind in kinds}
        )
        answer = {
            "id": origin.request_id,
            "embeddings": {kind: [found[i][kind] for i in inputs.order] for kind in kinds},
            "texts": body.texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
            "response_type": "embeddings_by_type",
        }
        return _Answer(encode(answer))

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
        places = asyncio.Semaphore(1 if origin.service_class is ServiceClass.BATCH else _AT_ONCE)

        async def embed(index: int, tokens: Sequence[int], second_at: int) -> T:
            one = structs.replace(origin, request_id=f"{origin.request_id}-{index}")
            request = self._intake.embedding_request(tokens, second_at, model, one)
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


def _as_signs(embedding: bytes, offset: int) -> list[int]:
    """Return the signs of 8 numbers in each byte, the first in its highest bit."""
    signs: list[int] = (np.packbits(_vector(embedding) >= 0).astype(np.int16) - offset).tolist()
    return signs


_SHAPES: dict[str, Callable[[bytes], Any]] = {
    "float": _as_floats,
    "base64": _as_base64,
    "binary": partial(_as_signs, offset=128),
    "ubinary": partial(_as_signs, offset=0),
}


def _cosine(a: Vector, b: Vector) -> float:
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else 0.0
