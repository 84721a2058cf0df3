"""Bodies of /v1/embeddings, /v1/score and /v1/rerank, with the fields of OpenAI, vLLM and Cohere.

Scores are the cosine of two embeddings, or what a cross-encoder says of a pair, as in vLLM.
"""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from pdserve.errors import PdserveError
from pdserve.tokenizer import TextPair
from pdserve.types import ServiceClass
from router.api.bodies import NO_EFFECT, Body, Known, ModelName, Text, TokenId, knows, refuse
from router.api.openai import prompts_of
from router.api.preprocess import Truncation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pdserve.types import GenerateRequest, ModelInfo
    from router.api.preprocess import Origin, Preprocessor
    from router.pooling import Embedder

    Vector = NDArray[np.float32]

MAX_INPUTS = 2048
_AT_ONCE = 64  # inputs of one request in admission
_Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class PoolingBody(Body, kw_only=True):
    """Fields of all three."""

    model: ModelName = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="Most tokens of an input: more are cut off. -1: what fits."),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        Meta(
            description="Cut the first (left) or the last tokens (right), special ones included. "
            "By default texts are cut where the tokenizer's configuration says, and keep those."
        ),
    ] = None

    def truncation(self, model: ModelInfo) -> Truncation | None:
        """Raises InvalidRequest if the model takes less than `truncate_prompt_tokens`."""
        most, limit = self.truncate_prompt_tokens, model.max_model_len - 1
        if most is None:
            return None
        if most == 0 or most > limit:
            refuse("truncate_prompt_tokens", f"must be -1, or 1 to {limit}")
        return Truncation(limit if most < 0 else most, self.truncation_side)


@knows(
    {
        "add_special_tokens": Known((True,)),
        "dimensions": Known((), "embeddings have the model's own size"),
    }
)
class EmbeddingsRequest(PoolingBody, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[
        str | list[TokenId | str | list[TokenId]],
        Meta(description="A text, its token ids, or a list of several."),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    user: Annotated[str | None, Meta(description=NO_EFFECT)] = None

    def inputs(self) -> list[str | tuple[int, ...]]:
        """Raises InvalidRequest naming the field."""
        found = prompts_of(self.input, "input")
        if not all(found) or len(found) > MAX_INPUTS:
            refuse("input", f"must be 1 to {MAX_INPUTS} texts that are not empty")
        return found


class ScoreRequest(PoolingBody, kw_only=True):
    """Body of POST /v1/score: one text against each of others, or texts pair by pair."""

    text_1: Text | _Texts
    text_2: Text | _Texts

    def pairs(self) -> list[tuple[str, str]]:
        """Raises InvalidRequest unless `text_1` is one text, or both have the same length."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) not in (1, len(second)):
            refuse("text_1", f"must be one text, or {len(second)} like text_2")
        return list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))


@knows({"max_tokens_per_doc": Known()})
class RerankRequest(PoolingBody, kw_only=True):
    """Body of POST /v1/rerank."""

    query: Text
    documents: _Texts
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = True


Bodies = EmbeddingsRequest | ScoreRequest | RerankRequest


class PoolingApi:
    """Answers the bodies."""

    def __init__(self, embedder: Embedder, preprocessor: Preprocessor) -> None:
        self._embedder = embedder
        self._preprocessor = preprocessor

    async def answer(self, body: Bodies, origin: Origin) -> dict[str, Any]:
        """Return the answer to `body`. Raises PdserveError as `Embedder.embed` does."""
        if isinstance(body, EmbeddingsRequest):
            model, found, tokens = await self._embed(body, "input", body.inputs(), origin)
            shown = [
                base64.b64encode(x).decode()
                if body.encoding_format == "base64"
                else _vector(x).tolist()
                for x in found
            ]
            data: list[dict[str, Any]] = [
                {"object": "embedding", "index": i, "embedding": x} for i, x in enumerate(shown)
            ]
            return _list(origin.request_id, model, tokens) | {"data": data}
        if isinstance(body, ScoreRequest):
            model, scores, tokens = await self._scores(body, "text_2", body.pairs(), origin)
            data = [{"index": i, "object": "score", "score": x} for i, x in enumerate(scores)]
            return _list(origin.request_id, model, tokens) | {"data": data}
        pairs = [(body.query, document) for document in body.documents]
        model, scores, tokens = await self._scores(body, "documents", pairs, origin)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results = [
            {"index": i, "relevance_score": scores[i]}
            | ({"document": {"text": body.documents[i]}} if body.return_documents else {})
            for i in best
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"id": origin.request_id, "model": model, "usage": usage, "results": results}

    async def _scores(
        self,
        body: Bodies,
        field: str,
        pairs: Sequence[tuple[str, str]],
        origin: Origin,
    ) -> tuple[str, list[float], int]:
        """Return the model, the score of each pair, and how many tokens they have."""
        if self._preprocessor.find(body.model or "")[0].cross_encoder:
            whole = [TextPair(*pair) for pair in pairs]
            model, found, tokens = await self._embed(body, field, whole, origin)
            return model, [float(_vector(x)[0]) for x in found], tokens
        texts = [text for pair in pairs for text in pair]
        model, found, tokens = await self._embed(body, field, texts, origin)
        return model, [_cosine(*found[i : i + 2]) for i in range(0, len(found), 2)], tokens

    async def _embed(
        self,
        body: Bodies,
        field: str,
        inputs: Sequence[str | tuple[int, ...] | TextPair],
        origin: Origin,
    ) -> tuple[str, list[bytes], int]:
        """Return the model, the embedding of each input or the score of each pair, and how many
        tokens they have. Equal inputs are computed once."""
        model, adapter = self._preprocessor.find(body.model or "")
        if adapter is not None:
            refuse("model", f"{body.model} is a LoRA adapter: adapters have no embeddings")
        if model.cross_encoder and isinstance(body, EmbeddingsRequest):
            refuse("model", f"{model.name} scores pairs of texts, and has no embeddings")
        self._embedder.check(model.name)
        truncation = body.truncation(model)
        unique = list(dict.fromkeys(inputs))
        made = [
            await self._preprocessor.embedding_request(
                text, model, origin, i, truncation, field=field
            )
            for i, text in enumerate(unique)
        ]
        # Of a batch, other lines are answered at the same time.
        places = asyncio.Semaphore(
            _AT_ONCE if origin.service_class is ServiceClass.INTERACTIVE else 1
        )

        async def embed(request: GenerateRequest) -> bytes:
            async with places:
                return await self._embedder.embed(request)

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(embed(request)) for request in made]
        except* PdserveError as errors:
            raise errors.exceptions[0] from None
        by_input = {x: task.result() for x, task in zip(unique, running, strict=True)}
        sizes = {x: len(r.prompt_token_ids) for x, r in zip(unique, made, strict=True)}
        return model.name, [by_input[x] for x in inputs], sum(sizes[x] for x in inputs)


def _list(request_id: str, model: str, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": request_id, "object": "list", "model": model, "usage": usage}


def _vector(embedding: bytes) -> Vector:
    return np.frombuffer(embedding, "<f4")


def _cosine(first: bytes, second: bytes) -> float:
    a, b = _vector(first), _vector(second)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else 0.0
