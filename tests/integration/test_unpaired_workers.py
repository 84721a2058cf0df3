"""Workers that cannot exchange KV: found when they register, never placed together, and explained
wherever somebody looks."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from up_process import run_cli

from pdserve.errors import PdserveError
from pdserve.types import Role, SamplingParams
from tests.cluster import Cluster
from tests.patience import WAIT_S

PROMPT = list(range(20, 60))
PLAIN = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
REASON = "block_size: 16 on prefill-0, 32 on decode-9"


async def ready(cluster: Cluster) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{cluster.http}/ready") as response,
    ):
        return response.status, await response.text()


async def test_they_are_explained_and_never_placed_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", logger="router")
    async with Cluster(prefill=1, engine_args={"block_size": 16}) as cluster:
        await cluster.add("decode-9", Role.DECODE, engine_args={"block_size": 32})
        await cluster.until_ready()
        warnings = [x.getMessage() for x in caplog.records if "cannot exchange" in x.getMessage()]
        assert len(warnings) == 1
        assert REASON in warnings[0]

        status, text = await ready(cluster)
        assert status == 503
        assert REASON in text
        with pytest.raises(PdserveError) as caught:
            await cluster.ask(PROMPT, PLAIN)
        assert caught.value.code == "unavailable"
        assert REASON in caught.value.message

        await cluster.add("decode-0", Role.DECODE)
        await cluster.until_ready()
        assert (await ready(cluster))[0] == 200
        answers = await asyncio.gather(*(cluster.ask([*PROMPT, i], PLAIN) for i in range(8)))
        for answer in answers:
            assert answer.receipt is not None
            assert answer.receipt.decode_worker == "decode-0"
            assert not answer.fallbacks

        where = ("--grpc", cluster.grpc, "--timeout", str(WAIT_S))
        shown = await asyncio.to_thread(run_cli, "status", *where)
        assert "prefill-0 and decode-9" in shown.stdout
        assert REASON in shown.stdout
        plain = await asyncio.to_thread(run_cli, "status", "--json", *where)
        (pair,) = json.loads(plain.stdout)["unpaired"]
        assert (pair["prefill"], pair["decode"]) == ("prefill-0", "decode-9")
        assert pair["differences"] == [{"field": "block_size", "prefill": "16", "decode": "32"}]
