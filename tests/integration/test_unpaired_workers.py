"""Workers that cannot exchange KV: found when they register, never placed together, and explained
wherever somebody looks."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from up_process import run_cli

from pdserve.types import Role, SamplingParams
from tests.cluster import Cluster
from tests.patience import WAIT_S

if TYPE_CHECKING:
    import pytest

PROMPT = list(range(20, 60))
PLAIN = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
REASON = "block_size: 16 on prefill-0, 32 on decode-9"


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

        alone = await cluster.ask(PROMPT, PLAIN)
        assert alone.receipt is not None
        assert alone.receipt.prefill_worker == alone.receipt.decode_worker == "decode-9"

        await cluster.add("decode-0", Role.DECODE)
        await cluster.until_ready()
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
