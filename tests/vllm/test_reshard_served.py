"""A service whose prefill worker has two tensor-parallel ranks and blocks of 64 tokens, and whose
decode worker has one rank and blocks of 32: through the router, the tokens of one engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.config import RouterConfig
from pdserve.failure_config import DetectionConfig
from pdserve.types import SamplingParams
from tests.vllm.service import Service
from tests.vllm.test_handoff_exact import params, prompt
from tests.vllm.test_handoff_reshard import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve.types import Receipt
    from tests.vllm.engines import EngineProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]
BLOCK = 32  # of the decode worker
GREEDY = params(8, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.9, seed=11, presence_penalty=0.5, max_tokens=12, ignore_eos=True
)


async def ask(
    service: Service, engine: EngineProcess, ids: Sequence[int], sampling: SamplingParams = GREEDY
) -> Receipt:
    """One request, compared with what the engine answers."""
    expected = await engine.run(ids, sampling)
    tokens: list[int] = []
    receipt = None
    async for delta in service.client.generate(ids, sampling):
        tokens += delta.token_ids
        receipt = delta.receipt or receipt
    assert tuple(tokens) == expected.token_ids
    assert receipt is not None
    assert (receipt.prefill_worker, receipt.decode_worker) == ("prefill-0", "decode-0")
    assert (receipt.first_token_source, receipt.fallbacks) == ("prefill", ())
    return receipt


async def test_two_ranks_of_large_blocks_hand_over_to_one_of_small_blocks(
    tiny_model: Path, aggregated: EngineProcess
) -> None:
    config = RouterConfig(
        http_port=0,
        grpc_port=0,
        stop_grace_s=0.0,
        policy="least_loaded",
        detection=DetectionConfig(canary_s=0.0),  # its blocks would be counted
    )
    async with Service.start(config, tiny_model) as service:
        await service.add("prefill-0", tensor_parallel_size=2, block_size=2 * BLOCK)
        await service.add("decode-0", block_size=BLOCK)
        await service.until_ready()
        found = {name: x.info for name, x in (await service.entries()).items()}
        assert {name: len(x.kv.addresses) for name, x in found.items()} == {
            "prefill-0": 2,
            "decode-0": 1,
        }
        assert {x.kv.compatibility for x in found.values()} == {found["decode-0"].kv.compatibility}
        assert [found[x].block_size for x in ("prefill-0", "decode-0")] == [64, 32]
        for length in (BLOCK + 1, 300):
            receipt = await ask(service, aggregated, prompt(length, 1))
            assert receipt.transport == "shm"
            assert receipt.transfer_blocks == -(-length // BLOCK)
            assert receipt.transfer_bytes == length * TOKEN_BYTES
        # The decode worker has three of its own blocks of this one, which are no two of prefill's.
        ids = prompt(300, 1)[: 3 * BLOCK + 5] + prompt(100, 2)
        receipt = await ask(service, aggregated, ids)
        assert receipt.transfer_bytes == (len(ids) - 3 * BLOCK) * TOKEN_BYTES
        asked = [(prompt(20 + 83 * n, 3), SEEDED if n % 2 else GREEDY) for n in range(4)]
        await asyncio.gather(*(ask(service, aggregated, *each) for each in asked))
        leaving = service.client.generate(prompt(300, 4), params(200, ignore_eos=True))
        async for _ in leaving:
            break
        await leaving.aclose()  # type: ignore[attr-defined]
        await service.until_empty()
