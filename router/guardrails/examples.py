"""Example texts, and how near other texts are to them, by the embeddings of a pooling worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from pdserve.errors import Unavailable
from pdserve.net import deadline
from pdserve.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from pdserve.model.tokenizer import Tokenizer
    from pdserve.types import ModelInfo, Regions

    Vectors = NDArray[np.floating]
    Embed = Callable[[GenerateRequest], Awaitable[bytes]]

_EXAMPLES_TIMEOUT_S = 60.0
_AT_ONCE = 8  # embeddings of one call, or of the examples


class EmbeddedExamples:
    """State: the vectors of the examples, for one version of the model."""

    def __init__(
        self,
        model: str,
        texts: Sequence[str],
        models: Callable[[], Mapping[str, ModelInfo]],
        tokenizer: Callable[[ModelInfo], Awaitable[Tokenizer]],
        embed: Embed,
    ) -> None:
        self._name, self._texts = model, texts
        self._models, self._tokenizer, self._embed = models, tokenizer, embed
        self._examples: tuple[ModelInfo, asyncio.Task[Vectors]] | None = None

    async def close(self) -> None:
        if self._examples is not None:
            self._examples[1].cancel()
            await asyncio.wait([self._examples[1]])

    async def model(self) -> tuple[ModelInfo, Tokenizer]:
        """Return the model and its tokenizer. Raises Unavailable without a worker."""
        models = self._models().values()
        if (model := next((x for x in models if self._name in x.names), None)) is None:
            raise Unavailable(f"no worker of model {self._name} is registered")
        return model, await self._tokenizer(model)

    async def scores(
        self,
        prompts: Sequence[tuple[int, ...]],
        model: ModelInfo,
        request_id: str,
        regions: Regions,
        timeout_s: float,
    ) -> Vectors:
        """Return the cosine of each prompt of token ids (row) and each example (column). The
        embeddings stay in the regions of the request, and no tenant pays for them. Raises as
        EmbeddingServer.embed."""
        # Shielded: the examples are embedded for all requests.
        examples = await asyncio.shield(self._examples_of(model))
        until = deadline.after(timeout_s)
        return await self._vectors(prompts, model, request_id, regions, until) @ examples.T

    def _examples_of(self, model: ModelInfo) -> asyncio.Task[Vectors]:
        if (known := self._examples) is not None:
            task = known[1]
            has_failed = task.done() and (task.cancelled() or task.exception() is not None)
            if known[0] == model and not has_failed:
                return task
            task.cancel()
        task = asyncio.create_task(self._embed_examples(model), name="embed-examples")
        self._examples = model, task
        return task

    async def _embed_examples(self, model: ModelInfo) -> Vectors:
        tokenizer, until = await self._tokenizer(model), deadline.after(_EXAMPLES_TIMEOUT_S)
        tokens = [tokenizer.encode_within([x], model.max_model_len)[0] for x in self._texts]
        return await self._vectors(tokens, model, "examples", None, until)

    async def _vectors(
        self,
        prompts: Sequence[tuple[int, ...]],
        model: ModelInfo,
        request_id: str,
        regions: Regions,
        until: float | None,
    ) -> Vectors:
        """Return the embeddings of token ids as rows of length 1."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def vector(number: int, tokens: tuple[int, ...]) -> Vectors:
            request = GenerateRequest(
                request_id=f"{request_id}-embed-{number}",
                model=model.name,
                prompt_token_ids=tokens,
                sampling=SamplingParams(max_tokens=1),
                deadline=until,
                regions=regions,
            )
            async with places:
                found = np.frombuffer(await self._embed(request), "<f4")
            return found / np.float32(max(float(np.linalg.norm(found)), 1e-12))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(vector(*x)) for x in enumerate(prompts)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return np.stack([x.result() for x in tasks])
