"""What a page of the console is sent while requests run on a real router with fake engines."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.errors import DeadlineExceeded, Unavailable
from pdserve.net import rpc
from pdserve.types import SamplingParams
from pdserve.v1.admin_pb2 import DrainWorkerRequest
from pdserve.v1.admin_pb2_grpc import AdminStub
from tests.support.cluster import Cluster
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(prefill=1, decode=2) as cluster:
        yield cluster


class Page:
    """An open page, with all events that it received."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.events: list[dict[str, Any]] = []

    async def until(self, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first event, from the next one on, for which `found` is true."""
        async with asyncio.timeout(WAIT_S):
            async for line in self._response.content:
                if not line.startswith(b"data: "):
                    continue
                self.events.append(json.loads(line[6:]))
                if "hello" not in self.events[-1] and found(self.events[-1]):
                    return self.events[-1]
        raise AssertionError("the stream ended")


@pytest.fixture
async def page(cluster: Cluster) -> AsyncIterator[Page]:
    async with (
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
        http.get("/console/events") as response,
    ):
        yield Page(response)


async def test_a_request_is_sent_at_its_arrival_and_at_its_end(
    cluster: Cluster, page: Page
) -> None:
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
    asking = asyncio.create_task(cluster.ask([20, 21, 22], sampling))
    event = await page.until(lambda x: bool(x["open"]) and len(x["open"][0]["path"]) == 2)
    [row] = event["open"]
    assert row["prompt_tokens"] == 3
    assert row["path"][0] == "prefill-0"
    answer = await asking
    event = await page.until(lambda x: bool(x["ended"]))
    [ended] = event["ended"]
    assert answer.receipt is not None
    assert (ended["n"], ended["outcome"]) == (row["n"], "length")
    assert ended["receipt"]["decode_worker"] == answer.receipt.decode_worker
    assert ended["usage"]["completion_tokens"] == 1000
    quiet = await page.until(lambda _: True)
    assert (quiet["open"], quiet["ended"]) == ([], [])


async def test_a_page_that_opens_later_gets_the_last_requests(cluster: Cluster) -> None:
    for _ in range(3):
        await cluster.ask([20, 21], SamplingParams(max_tokens=2))
    async with (
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
        http.get("/console/events") as response,
    ):
        event = await Page(response).until(lambda _: True)
        assert [row["n"] for row in event["ended"]] == [1, 2, 3]
        named = event["ended"][0]["id"]
        async with http.get(f"/console/requests/{named}") as found:
            [decision] = (await found.json())["decisions"]
        assert decision["outcome"].startswith("prefill on prefill-0, decode on decode-")
        chosen = {x["worker"] for x in decision["candidates"] if x["chosen"]}
        assert "prefill-0" in chosen
        async with http.get("/console/requests/unknown") as found:
            assert found.status == 404


async def test_a_refused_request_is_shown_with_its_reason(cluster: Cluster, page: Page) -> None:
    for name in ("decode-0", "decode-1", "prefill-0"):
        await cluster.end(name)
    with pytest.raises(DeadlineExceeded):
        await cluster.ask([20], SamplingParams(max_tokens=2), timeout_s=0.1)
    event = await page.until(lambda x: bool(x["ended"]))
    [row] = event["ended"]
    assert "receipt" not in row
    assert row["admitted"] == 0.0
    # The client's own deadline ends at the same time: either may be first.
    assert row["outcome"] in ("deadline_exceeded", "cancelled")
    assert row["message"]


async def test_steps_come_with_their_tokens(cluster: Cluster, page: Page) -> None:
    asking = asyncio.create_task(
        cluster.ask([20] * 40, SamplingParams(max_tokens=1500, ignore_eos=True))
    )
    prompt, decoded = 0, 0
    while not (prompt and decoded):
        event = await page.until(lambda x: bool(x["steps"]))
        prompt += sum(x[2] for x in event["steps"].get("prefill-0", []))
        decoding = [x for name in ("decode-0", "decode-1") for x in event["steps"].get(name, [])]
        decoded += sum(x[3] for x in decoding)
        assert all(x[0] <= event["now"] for steps in event["steps"].values() for x in steps)
    assert prompt == 40
    await asking


async def test_a_worker_that_leaves_changes_its_state(cluster: Cluster, page: Page) -> None:
    event = await page.until(lambda x: len(x["workers"]) == 3)
    assert {x["id"]: x["state"] for x in event["workers"]}["decode-1"] == "ready"
    await cluster.end("decode-1")
    event = await page.until(lambda x: any(w["state"] == "left" for w in x["workers"]))
    [row] = [x for x in event["workers"] if x["state"] == "left"]
    assert (row["id"], row["reason"]) == ("decode-1", "it left")


async def test_a_model_without_workers_is_shown_as_it_is_asked_for_and_starts() -> None:
    only = {"router": {"on_demand_models": ("pdserve-demo",)}}
    async with (
        Cluster(aggregated=1, **only) as cluster,
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
        http.get("/console/events") as response,
    ):
        page = Page(response)
        event = await page.until(lambda x: "on_demand" in x)
        assert event["on_demand"] == [{"model": "pdserve-demo", "text": "has workers"}]
        await cluster.end("aggregated-0")
        event = await page.until(lambda x: "on_demand" in x)
        assert event["on_demand"][0]["text"] == "no worker until it is asked for"
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await cluster.ask([20], SamplingParams(max_tokens=2), timeout_s=0.1)
        event = await page.until(lambda x: "on_demand" in x)
        assert event["on_demand"][0]["text"].startswith("no worker, asked for ")


async def test_sessions_are_sent_as_their_turns_end(cluster: Cluster, page: Page) -> None:
    body = {"model": "pdserve-demo", "prompt": [20] * 40, "max_tokens": 2}
    async with aiohttp.ClientSession(f"http://{cluster.http}") as http:
        for turns in (1, 2):
            headers = {"x-session-id": "mine"}
            async with http.post("/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
            event = await page.until(lambda x: "sessions" in x)
            assert event["sessions"]["count"] == 1
            [row] = event["sessions"]["rows"]
            assert (row["id"], row["turns"], row["prompt_tokens"]) == ("mine", turns, 40 * turns)
            assert row["workers"]


async def test_answers_and_drains_are_in_the_logs_of_an_operator(tmp_path: Path) -> None:
    logs = {name: str(tmp_path / name) for name in ("access", "audit")}
    async with (
        Cluster(prefill=1, decode=2, router={"log": logs}) as cluster,
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
        rpc.open_channel(cluster.grpc) as channel,
    ):
        body = {"prompt": [20, 21, 22], "max_tokens": 5, "ignore_eos": True}
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200
        call = AdminStub(channel).DrainWorker(DrainWorkerRequest(worker_id="decode-0", timeout_s=9))
        async for _ in call:
            pass
        # A call is logged after its answer.
        await wait_until((tmp_path / "audit").read_text)
    answer = json.loads((tmp_path / "access").read_text())
    assert (answer["status"], answer["code"]) == ("200", "")
    assert (answer["prompt_tokens"], answer["completion_tokens"]) == (3, 5)
    assert 0 < answer["ttft_s"] <= answer["duration_s"]
    assert answer["model"] == cluster.workers["decode-0"].info.model.name
    drain = json.loads((tmp_path / "audit").read_text())
    assert (drain["action"], drain["worker"], drain["result"]) == ("drain", "decode-0", "ok")
    assert (drain["by"], drain["from"].partition(":")[0]) == ("anyone", "ipv4")
