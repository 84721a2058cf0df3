"""POST /inference/v1/generate over a router and fake engines: the experts of each token, whatever
happened to the request."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np
import pytest

from tests.support.cluster import LONG, PROMPT, Cluster, ask_and_hold
from tests.support.timeouts import WAIT_S
from workers.fake.model import experts_of
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLING = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "routed_experts": True}


async def generate(cluster: Cluster, *, stream: bool, **sampling: object) -> list[dict[str, Any]]:
    """Return the events of the answer, or the whole answer as the only one."""
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, **sampling}, "stream": stream}
    url = f"http://{cluster.http}/inference/v1/generate"
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session,
        session.post(url, json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()
        text = await reply.text()
    lines = text.split("\n\n")[:-2] if stream else [text]
    return [msgspec.json.decode(x.removeprefix("data: ")) for x in lines]


def experts_in(choice: dict[str, Any]) -> np.ndarray:
    file = io.BytesIO(base64.b64decode(choice["routed_experts"]))
    array: np.ndarray = np.load(file, allow_pickle=False)
    return array


def experts_before(answer: Sequence[int]) -> bytes:
    """Return the experts of the prompt and of all tokens of the answer but the last."""
    return experts_of((*PROMPT, *answer[:-1])).ids


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_has_the_experts_of_its_tokens(*, stream: bool) -> None:
    async with Cluster(prefill=1, decode=1) as cluster:
        events = await generate(cluster, stream=stream, n=2)
        for index in (0, 1):
            pieces = [x for event in events for x in event["choices"] if x["index"] == index]
            tokens = [t for x in pieces for t in x["token_ids"]]
            (last,) = [x for x in pieces if "routed_experts" in x]
            assert last["finish_reason"] == "length"
            experts = experts_in(last)
            assert (experts.shape, experts.dtype) == ((len(PROMPT) + 11, 2, 2), np.uint8)
            assert experts.tobytes() == experts_before(tokens)
        (plain,) = await generate(cluster, stream=False, routed_experts=False)
        assert "routed_experts" not in plain["choices"][0]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_experts_arrive_once_although_a_worker_dies(role: str) -> None:
    sampling = replace(LONG, routed_experts=True)
    async with Cluster(prefill=2, decode=2) as cluster:
        busy, other, asking = await ask_and_hold(cluster, sampling, role)
        cluster.faults(other, FakeFaults())
        await cluster.kill(busy)
        answer = await asking
        assert answer.token_ids == cluster.expected(PROMPT, LONG).token_ids
        assert answer.experts == experts_before(answer.token_ids)
        assert answer.receipt is not None
        assert answer.receipt.fallbacks
