"""vLLM's own NixlConnector under the same router: the answers are one engine's, token for token."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import pytest
import pytest_asyncio

from pdserve.client import Client
from tests.support.engine_pair import joined, params, prompt
from tests.support.pdserve_up import UpProcess
from tests.support.served_up import ServedUp

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence
    from pathlib import Path

    from pdserve.client import Delta
    from pdserve.types import Receipt, SamplingParams, Usage
    from tests.support.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
BLOCK = 32
ENGINE_ARGS = {
    "dtype": "float32",  # where no tie can flip
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 256,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServedUp]:
    options = ["--http-port", "0", "--grpc-port", "0", "--model", str(tiny_model)]
    for name, value in ENGINE_ARGS.items():
        options += ["--set", f"worker.engine_args.{name}={value}"]
    options += ["--set", "router.policy=least_loaded"]
    options += ["--set", "worker.kv.lease_s=6", "--kv-connector", "nixl"]
    up = UpProcess(tmp_path_factory.mktemp("up"), *options)
    try:
        yield await asyncio.to_thread(ServedUp, up)
        up.send(signal.SIGINT)
        assert await asyncio.to_thread(up.wait) == 0, up.output
        assert up.survivors() == []
    finally:
        up.close()


@pytest_asyncio.fixture(loop_scope="session")
async def stack(running: ServedUp) -> AsyncIterator[ServedUp]:
    """Assert that every test leaves the workers empty."""
    yield running
    await running.until_empty()


class Answer:
    """Return an answer, joined, with the usage and the receipt of its last delta."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        last = deltas[-1]
        assert last.receipt is not None
        assert last.usage is not None
        self.receipt: Receipt = last.receipt
        self.usage: Usage = last.usage
        self.joined = joined(*deltas)


async def ask(stack: ServedUp, ids: Sequence[int], sampling: SamplingParams) -> Answer:
    async with Client(stack.grpc) as client:
        return Answer([delta async for delta in client.generate(ids, sampling)])


def assert_nixl(answer: Answer, blocks: int) -> None:
    """Assert that vLLM's connector moved the KV and that each token was counted once."""
    receipt = answer.receipt
    assert (receipt.transport, receipt.transfer_blocks) == ("nixl", blocks)
    assert receipt.transfer_bytes > 0
    assert (receipt.prefill_worker, receipt.decode_worker) == ("prefill-0", "decode-0")
    assert receipt.first_token_source == "prefill"
    assert receipt.fallbacks == ()
    assert answer.usage.completion_tokens == len(answer.joined.token_ids)


@pytest.mark.parametrize("length", [1, 32, 33, 257, 700])
async def test_every_prompt_length_is_exact(
    stack: ServedUp, aggregated: EngineProcess, length: int
) -> None:
    ids, sampling = prompt(length, 200), params(ignore_eos=True)
    answer = await ask(stack, ids, sampling)
    assert answer.joined == joined(await aggregated.run(ids, sampling))
    assert_nixl(answer, -(-length // BLOCK))


async def test_only_missing_blocks_are_fetched(stack: ServedUp, aggregated: EngineProcess) -> None:
    ids, sampling = prompt(10 * BLOCK, 230), params(ignore_eos=True)
    await ask(stack, ids, sampling)
    longer = ids + prompt(3 * BLOCK, 231)
    answer = await ask(stack, longer, sampling)
    assert answer.joined == joined(await aggregated.run(longer, sampling))
    assert_nixl(answer, 3)


async def test_a_first_token_that_ends_the_answer_frees_its_kv_at_once(
    stack: ServedUp, aggregated: EngineProcess
) -> None:
    ids = prompt(300, 250)
    first = (await aggregated.run(ids, params(1))).token_ids
    answer = await ask(stack, ids, params(16, stop_token_ids=first))
    assert answer.joined == joined(await aggregated.run(ids, params(16, stop_token_ids=first)))
    assert (answer.receipt.transport, answer.receipt.decode_worker) == ("", "")


@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_client_that_leaves_frees_both_workers(stack: ServedUp, pieces: int) -> None:
    """The client leaves after the first token, before the transfer, or during decode."""
    async with Client(stack.grpc) as client:
        deltas = client.generate(prompt(1500, 260 + pieces), params(400, ignore_eos=True))
        # An async generator behind its narrower type; closing it cancels the request.
        async with aclosing(cast("AsyncGenerator[Delta, None]", deltas)):
            for _ in range(pieces):
                await anext(deltas)


async def test_an_answer_outlives_its_decode_worker(
    stack: ServedUp, aggregated: EngineProcess
) -> None:
    """Last in this file. The answer continues exactly on the prefill worker."""
    ids, sampling = prompt(100, 270), params(100, temperature=0.9, seed=5, ignore_eos=True)
    decode = next(x for x in stack.ready["workers"] if x["role"] == "decode")
    # Stopped, it makes no token before it is killed, however fast the machine is.
    os.kill(decode["pid"], signal.SIGSTOP)
    deltas = []
    async with Client(stack.grpc) as client:
        async for delta in client.generate(ids, sampling):
            if not deltas:
                os.kill(decode["pid"], signal.SIGKILL)
            deltas.append(delta)
    answer = Answer(deltas)
    assert answer.joined == joined(await aggregated.run(ids, sampling))
    assert answer.receipt.fallbacks
    stack.ready["workers"].remove(decode)
