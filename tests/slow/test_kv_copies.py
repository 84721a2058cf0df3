"""Cached KV comes back to prefill on real vLLM behind a router: the second turn of a conversation
computes only what is new. A holder that dies while its blocks move costs only time."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from pdserve.types import SamplingParams
from router.attempt import copies
from router.placement import cost
from tests.support.cluster import Cluster
from tests.support.engine_pair import BLOCK, params, prompt
from tests.support.started_workers import vllm
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.engines import EngineProcess

pytestmark = pytest.mark.asyncio(loop_scope="session")
ENDLESS = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)


@pytest_asyncio.fixture(loop_scope="session")
async def service(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    # A tiny model computes as fast as it copies, and this machine may be slow.
    monkeypatch.setattr(cost, "is_clearly_cheaper", lambda _copy_s, _compute_s: True)
    monkeypatch.setattr(copies, "MIN_LIMIT_S", WAIT_S)
    router = {"policy": "prefix_aware", "lease_s": WAIT_S}
    async with Cluster(engine=vllm(tiny_model), prefill=1, decode=1, router=router) as service:
        yield service


async def turn(service: Cluster, ids: list[int], max_tokens: int) -> dict[str, Any]:
    """Return the answer to a turn of the session."""
    body = {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"X-Session-Id": "conversation"}
    url = f"{service.url}/v1/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers) as reply,
    ):
        assert reply.status == 200, await reply.text()
        answer: dict[str, Any] = await reply.json()
        return answer


async def recomputed(service: Cluster) -> float:
    name = r'^pdserve_recomputed_tokens_total\{model="tiny"\} (\S+)'
    found = re.search(name, await service.metrics(), re.MULTILINE)
    return float(found[1]) if found else 0.0


async def test_the_second_turn_computes_what_is_new_while_decode_is_busy(
    service: Cluster, aggregated: EngineProcess
) -> None:
    first = prompt(300, 1)
    answer = await turn(service, first, 200)
    history = first + answer["choices"][0]["token_ids"]
    others = [service.open(prompt(100, 10 + i), ENDLESS) for i in range(3)]
    for each in others:
        await each.until(5)
    second = history + prompt(40, 2)
    answer = await turn(service, second, 50)
    assert not any(x.task.done() for x in others), "decode is busy all the time"
    expected = await aggregated.run(second, params(50, ignore_eos=True))
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    receipt, known = answer["pdserve"]["receipt"], (len(history) - 1) // BLOCK * BLOCK
    assert receipt["prefill_worker"] == "prefill-0"
    assert receipt["fetched_from"] == "decode-0"
    assert receipt["cached_tokens"] == known
    assert receipt["fetched_tokens"] == known - 300 // BLOCK * BLOCK
    assert await recomputed(service) == len(history) - known, "less than a block"
    for each in others:
        each.task.cancel()
    await asyncio.gather(*(x.task for x in others), return_exceptions=True)


async def test_a_holder_that_is_killed_while_its_blocks_move_costs_no_token(
    service: Cluster, aggregated: EngineProcess
) -> None:
    first = prompt(300, 3)
    answer = await turn(service, first, 200)
    second = first + answer["choices"][0]["token_ids"] + prompt(40, 4)
    service.freeze("decode-0")
    asking = asyncio.create_task(turn(service, second, 50))

    async def waits_for_blocks() -> bool:
        return bool((await service.status("prefill-0")).ledger.in_flight_blocks)

    await wait_until(waits_for_blocks)
    await service.kill("decode-0")
    answer = await asyncio.wait_for(asking, 2 * WAIT_S)
    expected = await aggregated.run(second, params(50, ignore_eos=True))
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    assert answer["pdserve"]["receipt"]["fetched_tokens"] == 0
