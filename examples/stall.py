"""Show how long a long prompt stalls the streams that run beside it.

    pdserve up --model smollm2
    python examples/stall.py 127.0.0.1:8001

Two streams start, then a prompt of 3,000 random tokens, which no cache can have. The longest
pause between two tokens is printed for each stream, before and after that prompt was sent.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from pdserve.client import Client
from pdserve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.client import Delta

STREAMS = 2
TOKENS_BEFORE, TOKENS_AFTER = 40, 200
STREAM_PROMPT, STREAM_TOKENS = 20, 2 * (TOKENS_BEFORE + TOKENS_AFTER)
LONG_PROMPT = 3000


async def longest_pause(deltas: AsyncIterator[Delta], tokens: int) -> float:
    """Read `tokens` tokens of a stream. Return the longest pause before one of them, in seconds."""
    longest, received, last = 0.0, 0, time.monotonic()
    while received < tokens:
        received += len((await anext(deltas)).token_ids)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


async def measure(client: Client, prompt: list[int], begun: asyncio.Barrier) -> tuple[float, float]:
    """Return the longest pause of one stream, before and after `begun`."""
    sampling = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True)
    async with aclosing(client.generate(prompt, sampling)) as deltas:
        await anext(deltas)  # TTFT is not a pause
        before = await longest_pause(deltas, TOKENS_BEFORE)
        await begun.wait()
        return before, await longest_pause(deltas, TOKENS_AFTER)


async def main(router: str) -> None:
    async with Client(router) as client:
        models = await client.list_models()
        if not models:
            raise SystemExit(f"the router at {router} serves no model that makes text yet")
        model, needed = models[0], 2 * (STREAM_PROMPT + STREAM_TOKENS)
        if model.max_model_len < needed:
            limit = f"a context of {model.max_model_len} tokens"
            raise SystemExit(f"{model.name} has {limit}, and a prompt that stalls needs {needed}")

        def tokens(count: int) -> list[int]:
            return random.choices(range(model.vocab_size // 2), k=count)

        begun = asyncio.Barrier(STREAMS + 1)
        async with asyncio.TaskGroup() as group:
            streams = [
                group.create_task(measure(client, tokens(STREAM_PROMPT), begun))
                for _ in range(STREAMS)
            ]
            await begun.wait()
            prompt = tokens(min(LONG_PROMPT, model.max_model_len - 100))
            sent, ttft_s = time.monotonic(), 0.0
            async for delta in client.generate(prompt, SamplingParams(max_tokens=8)):
                ttft_s, last = ttft_s or time.monotonic() - sent, delta
    for number, stream in enumerate(streams, 1):
        before, after = (f"{1000 * x:,.0f} ms" for x in stream.result())
        print(f"stream {number}: longest pause {before}, beside the long prompt {after}")  # noqa: T201
    took, receipt = f"{len(prompt):,} tokens, first token after {ttft_s:.1f} s", last.receipt
    workers = f"prefill on {receipt.prefill_worker}, decode on {receipt.decode_worker}"
    print(f"long prompt: {took}, {workers}, request {last.request_id}")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
