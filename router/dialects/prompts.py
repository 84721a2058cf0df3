"""Requests with several prompts, and answers that echo their prompt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec import structs

from pdserve.types import Usage
from router.attempt.receipt import combined_receipt
from router.placement.values import shown_regions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.types import GenerateRequest, PositionLogprobs, Receipt
    from router.attempt.answer import AnswerDelta, Generates, Out


async def serve(generator: Generates, requests: Sequence[GenerateRequest], out: Out) -> None:
    """Write the answers to several prompts to `out`, numbered prompt by prompt. The first error
    ends all answers. Raises as `generator.serve` does."""
    totals, first = _Totals(out, len(requests)), 0
    try:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(generator.serve(request, _Part(totals, first)))
                first += request.sampling.n
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class _Totals:
    """Sums of usage and receipts over the prompts whose answers are complete."""

    def __init__(self, out: Out, prompts: int) -> None:
        self.out = out
        self._missing = prompts
        self._usage = Usage(0, 0)
        self._receipts: list[Receipt] = []

    def add(self, delta: AnswerDelta) -> None:
        """Move the totals of one prompt out of its last delta. The very last delta gets the totals
        of all prompts."""
        assert delta.usage is not None
        assert delta.receipt is not None
        self._missing -= 1
        self._usage.prompt_tokens += delta.usage.prompt_tokens
        self._usage.completion_tokens += delta.usage.completion_tokens
        self._usage.cached_tokens += delta.usage.cached_tokens
        self._receipts.append(delta.receipt)
        delta.usage = delta.receipt = None
        if not self._missing:
            delta.usage, delta.receipt = self._usage, combined_receipt(self._receipts)
            delta.usage.inference_geo = shown_regions(delta.receipt.regions)


class _Part:
    """Sink for the answers to one of several prompts. `first`: number of its first answer."""

    def __init__(self, totals: _Totals, first: int) -> None:
        self._totals = totals
        self._first = first

    def write(self, delta: AnswerDelta) -> bool:
        delta = structs.replace(delta, index=self._first + delta.index)
        if delta.usage is not None:
            self._totals.add(delta)
        return self._totals.out.write(delta)


class Echo:
    """Puts the prompt and its logprobs before each answer. `texts`: the prompts, each with `n`
    answers. With `only_prompt`, drops everything of the answers except their end."""

    def __init__(self, out: Out, texts: Sequence[str], n: int, *, only_prompt: bool) -> None:
        self._out = out
        self._texts = texts
        self._n = n
        self._only_prompt = only_prompt
        self._begun: set[int] = set()
        self._logprobs: dict[int, tuple[PositionLogprobs, ...]] = {}  # by prompt

    def write(self, delta: AnswerDelta) -> bool:
        delta = structs.replace(delta)
        if self._only_prompt:
            delta.token_ids, delta.text, delta.logprobs, delta.stop_reason = (), "", (), None
            if delta.usage is not None:
                delta.usage = structs.replace(delta.usage, completion_tokens=0)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            prompt = delta.index // self._n
            # Only a prompt's first answer has its logprobs, and the others begin after that one.
            logprobs = self._logprobs.setdefault(prompt, delta.prompt_logprobs)
            delta.text = self._texts[prompt] + delta.text
            delta.logprobs = logprobs + delta.logprobs
        return self._out.write(delta)
