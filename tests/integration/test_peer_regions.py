"""Routers of several regions as one service: what its own region does not serve is served in
another one, if the request may be there."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc.aio
import pytest
from msgspec import convert

from pdserve.background import background
from pdserve.client import Client
from pdserve.config import (
    PeerConfig,
    ResidencyConfig,
    RouterConfig,
    TenantConfig,
    TopologyConfig,
    parse,
)
from pdserve.errors import BudgetExhausted, Overloaded, PdserveError, Refusal, Unavailable
from pdserve.net import rpc
from pdserve.observe.explanation import details, outcome
from pdserve.security.keys import hash_key
from pdserve.types import GenerateRequest, SamplingParams
from pdserve.v1 import peer_pb2 as p
from pdserve.v1.peer_pb2_grpc import PeerStub
from router.attempt.forwarded import request_to_pb
from router.fleet.peers import Peer, open_peers
from router.main import RouterServer
from router.placement.decisions import explained
from tests.support.cluster import LONG, PROMPT, Cluster, Trigger, assert_same
from tests.support.timeouts import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

REGIONS = ("eu", "us", "ap")
SHORT = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def region(
    name: str,
    peers: dict[str, str] | None = None,
    *,
    workers: int = 1,
    engine_args: Mapping[str, object] = MappingProxyType({}),
    **router: Any,
) -> Cluster:
    """Return the router and the aggregated workers of a region. `peers`: addresses by region, the
    nearest first."""
    values = {
        "topology": TopologyConfig(region=name),
        "residency": ResidencyConfig(regions=REGIONS),
        "queue": {"timeout_s": 0.5},
        "peers": [
            {"region": x, "address": address, "delay_s": i + 0.001}
            for i, (x, address) in enumerate((peers or {}).items())
        ],
        **router,
    }
    topology = {"topology": TopologyConfig(region=name)}
    return Cluster(aggregated=workers, router=values, worker=topology, engine_args=engine_args)


async def until_open(cluster: Cluster, *regions: str) -> None:
    """Wait until the router sends requests to these regions."""
    peers = cluster.router.requests.peers
    await wait_until(
        lambda: all(
            not x.reason and any(load.workers for load in x.models.values())
            for x in peers.views()
            if x.region in regions
        )
    )


@asynccontextmanager
async def eu_and_us(**router: Any) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Two regions, of which eu forwards to us. `router`: further configuration of eu."""
    async with region("us") as us, region("eu", {"us": us.grpc}, **router) as eu:
        await until_open(eu, "us")
        yield eu, us


def counts(cluster: Cluster, name: str) -> dict[tuple[str, ...], float]:
    return dict(cluster.router.metrics._counts[name])


async def test_an_answer_continues_in_another_region_when_its_own_dies() -> None:
    async with eu_and_us() as (eu, us):
        begun = Trigger(20)
        asking = asyncio.create_task(eu.ask(PROMPT, LONG, on_token=begun))
        await asyncio.wait_for(begun.fired.wait(), WAIT_S)
        await eu.kill("aggregated-0")
        answer = await asking
        assert_same(answer, us.expected(PROMPT, LONG))
        assert answer.receipt is not None
        assert answer.usage is not None
        assert answer.receipt.forwarded_to == "us"
        assert answer.receipt.regions == ("eu", "us")
        assert answer.usage.inference_geo == "eu+us"
        assert answer.usage.completion_tokens == LONG.max_tokens
        # Later requests need not wait for a worker here.
        later = await eu.ask(PROMPT, SHORT)
        assert_same(later, us.expected(PROMPT, SHORT))
        assert later.receipt is not None
        assert later.receipt.fallbacks == ("forwarded:no_worker",)
        assert later.receipt.regions == ("us",)


async def test_answers_that_another_region_computes_again_count_against_the_budget() -> None:
    async with eu_and_us(retry={"tokens_per_s": 0.001}) as (eu, us):
        begun = [Trigger(5), Trigger(5)]
        asking = [asyncio.create_task(eu.ask(PROMPT, LONG, on_token=x)) for x in begun]
        for x in begun:
            await asyncio.wait_for(x.fired.wait(), WAIT_S)
        await eu.kill("aggregated-0")
        found = await asyncio.gather(*asking, return_exceptions=True)
        (failed,) = [x for x in found if isinstance(x, BaseException)]
        assert isinstance(failed, BudgetExhausted)
        (answer,) = [x for x in found if not isinstance(x, BaseException)]
        assert_same(answer, us.expected(PROMPT, LONG))
        # A request that was not computed here costs no retry.
        assert_same(await eu.ask(PROMPT, SHORT), us.expected(PROMPT, SHORT))


async def test_a_refused_request_is_served_where_its_data_may_be() -> None:
    tenants = [
        {"name": "both", "keys": [hash_key("both")], "allowed_inference_geos": ["eu", "us"]},
        {"name": "home", "keys": [hash_key("home")], "allowed_inference_geos": ["eu"]},
    ]
    rules = [convert(x, TenantConfig) for x in tenants]
    async with (
        region("us", tenants=rules) as us,
        region("eu", {"us": us.grpc}, tenants=rules) as eu,
        aiohttp.ClientSession() as http,
    ):
        await until_open(eu, "us")
        await eu.kill("aggregated-0")

        async def ask(key: str, **body: Any) -> tuple[int, dict[str, Any], str]:
            headers = {"authorization": f"Bearer {key}"}
            url = f"http://{eu.http}/v1/completions"
            body = {"prompt": PROMPT, "max_tokens": 4, **body}
            async with http.post(url, json=body, headers=headers) as answer:
                return answer.status, await answer.json(), answer.headers.get("retry-after", "")

        status, body, _ = await ask("both")
        assert (status, body["usage"]["inference_geo"]) == (200, "us")
        for key, given in (("home", {}), ("both", {"inference_geo": "eu"})):
            status, body, retry_after = await ask(key, **given)
            assert status == 503
            assert "in region eu" in body["error"]["message"]
            assert int(retry_after) > 0
        assert counts(eu, "forwarded_requests") == {("pdserve-demo", "us", "no_worker"): 1.0}
        assert counts(us, "peer_requests") == {("pdserve-demo", "eu"): 1.0}
        assert counts(us, "tenant_answers") == {("both",): 1.0}


async def test_a_full_region_forwards_and_a_tenants_limit_does_not() -> None:
    tenants = [{"name": "a", "keys": [hash_key("k")], "max_concurrent_requests": 2}]
    rules = [convert(x, TenantConfig) for x in tenants]
    full = {"max_running_requests": 1, "max_queued_requests": 0}
    async with (
        region("us", tenants=rules) as us,
        region("eu", {"us": us.grpc}, tenants=rules, queue=full) as eu,
        Client(eu.grpc, api_key="k") as client,
    ):
        await until_open(eu, "us")

        async def ask(begun: asyncio.Event) -> str:
            async for delta in client.generate(PROMPT, LONG):
                begun.set()
                last = delta
            assert last.receipt is not None
            return last.receipt.forwarded_to

        begun = [asyncio.Event(), asyncio.Event()]
        first = asyncio.create_task(ask(begun[0]))
        await begun[0].wait()
        second = asyncio.create_task(ask(begun[1]))
        await begun[1].wait()
        with pytest.raises(Overloaded) as refused:  # the forwarded one counts here too
            await ask(asyncio.Event())
        assert refused.value.reason == Refusal.TENANT_CONCURRENCY
        assert [await first, await second] == ["", "us"]
    assert counts(eu, "forwarded_requests") == {("pdserve-demo", "us", "queue_full"): 1.0}


async def test_a_forwarded_request_is_not_forwarded_again() -> None:
    async with (
        eu_and_us() as (eu, us),
        rpc.open_channel(eu.grpc) as to_eu,
        rpc.open_channel(us.grpc) as to_us,
    ):
        back = Peer(PeerConfig(region="eu", address=eu.grpc), to_eu, rpc.PLAIN)
        us.router.requests.peers.by_region["eu"] = back
        async with background("back", back.watch):
            await until_open(us, "eu")
            await us.kill("aggregated-0")
            assert_same(await us.ask(PROMPT, SHORT), eu.expected(PROMPT, SHORT))
            tokenizer = us.router.requests.models.models()["pdserve-demo"].tokenizer
            request = GenerateRequest("r1", "pdserve-demo", PROMPT, SHORT)
            for region_, reason in (("ap", "no "), ("us", "it is the region that forwards")):
                message = await request_to_pb(request, tokenizer=tokenizer, from_region=region_)
                with pytest.raises(grpc.aio.AioRpcError, match=reason) as error:
                    [_ async for _ in PeerStub(to_us).Forward(message, timeout=WAIT_S)]
                assert isinstance(rpc.error_from_rpc(error.value), Unavailable)
        assert counts(eu, "peer_requests") == {("pdserve-demo", "us"): 1.0}


async def test_a_drained_router_forwards_all_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with eu_and_us() as (eu, us), aiohttp.ClientSession() as http:
        begun = Trigger(5)
        here = asyncio.create_task(eu.ask(PROMPT, LONG, on_token=begun))
        await asyncio.wait_for(begun.fired.wait(), WAIT_S)
        assert await eu.command("drain", "--router", "--timeout", "0") == 1
        assert "1 streams" in capsys.readouterr().out
        answer = await eu.ask(PROMPT, SHORT)
        assert answer.receipt is not None
        assert answer.receipt.fallbacks == ("forwarded:drained",)
        for path, status in (("/health", "draining"), ("/ready", "ready")):
            async with http.get(f"http://{eu.http}{path}") as reply:
                assert (await reply.json())["status"] == status
        assert_same(await here, us.expected(PROMPT, LONG))
        assert await eu.command("drain", "--router") == 0
        with pytest.raises(Unavailable, match=r"region eu is drained.*may be in eu alone") as error:
            await eu.ask(PROMPT, SHORT, inference_geo="eu")
        assert error.value.reason == Refusal.REGION_DRAINED
        assert await eu.command("status", "--json") == 0
        found = json.loads(capsys.readouterr().out.partition("\n{")[2].join(("{", "")))
        assert found["draining"]
        assert [(x["region"], x["reason"]) for x in found["peers"]] == [("us", "")]
        assert await eu.command("drain", "--router", "--undo") == 0
        answer = await eu.ask(PROMPT, SHORT)
        assert answer.receipt is not None
        assert answer.receipt.forwarded_to == ""
        assert await us.command("drain", "--router") == 1  # it has no other regions
        assert "router.peers is empty" in capsys.readouterr().err


async def test_a_client_that_leaves_ends_its_request_in_the_other_region() -> None:
    async with eu_and_us() as (eu, us):
        await eu.kill("aggregated-0")
        begun = Trigger(5)
        asking = asyncio.create_task(eu.ask(PROMPT, LONG, on_token=begun))
        await asyncio.wait_for(begun.fired.wait(), WAIT_S)
        assert us.busy("aggregated-0")
        asking.cancel()
        await wait_until(lambda: not us.busy("aggregated-0"))
        await wait_until(lambda: counts(us, "requests").get(("pdserve-demo", "cancelled")) == 1.0)


async def test_a_forwarded_answer_continues_where_it_may_when_that_region_dies() -> None:
    async with (
        region("ap") as ap,
        region("us", workers=1) as us,
        region("eu", {"us": us.grpc, "ap": ap.grpc}, workers=0) as eu,
    ):
        await until_open(eu, "us", "ap")
        begun = Trigger(20)
        asking = asyncio.create_task(eu.ask(PROMPT, LONG, on_token=begun))
        parallel = replace(LONG, n=2)
        several = asyncio.create_task(eu.ask(PROMPT, parallel))
        await asyncio.wait_for(begun.fired.wait(), WAIT_S)
        await us.router.stop()
        answer = await asking
        assert_same(answer, ap.expected(PROMPT, LONG))
        assert answer.receipt is not None
        assert answer.receipt.forwarded_to == "ap"
        with pytest.raises(PdserveError, match="region us"):  # several outputs cannot continue
            await several
        await us.start_router()
        await until_open(eu, "us")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ("responses", {"input": "hi", "max_output_tokens": 8}),
        ("completions", {"prompt": ["hi", "there"]}),
    ],
)
async def test_a_model_of_another_region_is_served_in_every_dialect(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    """The router here has no worker, and so gets the tokenizer from there."""
    file = tmp_path / "ledger"
    kept = ResidencyConfig(regions=REGIONS, ledger=str(file))
    async with (
        region("us") as us,
        region("eu", {"us": us.grpc}, workers=0, residency=kept) as eu,
        aiohttp.ClientSession() as http,
    ):
        await until_open(eu, "us")
        async with http.get(f"http://{eu.http}/v1/models") as listed:
            assert [x["id"] for x in (await listed.json())["data"]] == ["pdserve-demo"]
        body = {"max_tokens": 8, **body} if path != "responses" else body
        url = f"http://{eu.http}/v1/{path}"
        async with http.post(url, json=body) as answer:
            found = await answer.json()
            assert answer.status == 200, found
        assert found["usage"]["inference_geo"] == "us"
        tokens = found["usage"].get("prompt_tokens") or found["usage"]["input_tokens"]
        lines = [json.loads(x) for x in file.read_text().splitlines()]
        moved = [x for x in lines if x["data"] == "prompt"]
        assert {(x["from_region"], x["to_region"]) for x in moved} == {("eu", "us")}
        assert sum(x["bytes"] for x in moved) == 4 * tokens
        (request, *_) = eu.router.requests.log.ended
        found = explained(eu.router.requests.decisions.of(request.request_id))
        (decision,) = found.decisions
        assert outcome(decision) == "forwarded to region us"
        assert details(decision)[0] == "not served here: no_worker"


async def test_a_request_leaves_a_slow_region_for_a_clearly_faster_one() -> None:
    slow, fast = {"prefill_s": 0.002}, {"prefill_s": 0.0001}
    async with (
        region("us", engine_args=fast) as us,
        region("eu", {"us": us.grpc}, engine_args=slow, slo={"ttft_s": 0.05}) as eu,
        aiohttp.ClientSession() as http,
    ):
        await until_open(eu, "us")
        for cluster in (eu, us):
            geo = cluster.router.requests.peers.region

            async def is_measured(cluster: Cluster = cluster, geo: str = geo) -> bool:
                await cluster.ask(PROMPT, replace(SHORT, max_tokens=2), inference_geo=geo)
                return bool(cluster.router.requests.load.models()["pdserve-demo"].ttft_s)

            await wait_until(is_measured)
        there = eu.router.requests.peers
        await wait_until(lambda: there.views()[0].models["pdserve-demo"].ttft_s)
        found = []
        for geo, session in ((None, "one"), ("eu", "other"), (None, "other")):
            body = {"prompt": [20, *PROMPT], "max_tokens": 2, "inference_geo": geo}
            url, headers = f"http://{eu.http}/v1/completions", {"x-session-id": session}
            async with http.post(url, json=body, headers=headers) as answer:
                found.append((await answer.json())["usage"]["inference_geo"])
        assert found == ["us", "eu", "eu"]  # the history of the last one is here
        assert counts(eu, "forwarded_requests") == {("pdserve-demo", "us", "spill_over"): 1.0}


async def test_only_a_router_of_another_region_may_forward(tmp_path: Path) -> None:
    secrets = {}
    for name in ("worker", "peer", "other"):
        secrets[name] = tmp_path / name
        secrets[name].write_text(name.ljust(40, "x"))
    access = {
        "worker_token_file": str(secrets["worker"]),
        "peer_token_file": str(secrets["peer"]),
    }
    us_router = RouterServer(
        parse(
            RouterConfig,
            {"http": {"port": 0}, "grpc": {"port": 0}, "access": access, "stop_grace_s": 0.0},
        )
    )
    address = (await us_router.start()).grpc
    try:
        async with rpc.open_channel(address) as channel:
            stub = PeerStub(channel)
            for token, code in (
                ("peer", grpc.StatusCode.OK),
                ("worker", grpc.StatusCode.PERMISSION_DENIED),
                ("", grpc.StatusCode.UNAUTHENTICATED),
            ):
                metadata = rpc.authorization(secrets[token].read_text() if token else "")
                call = stub.GetLoad(p.GetLoadRequest(), metadata=metadata, timeout=WAIT_S)
                assert await call.code() is code
        for file, reason in (
            ("peer", "the router there is in region (none)"),
            ("other", "permission denied"),
        ):
            changes = {"access": {"peer_token_file": str(secrets[file])}}
            peers = [{"region": "us", "address": address}]
            config = parse(RouterConfig, {"topology": {"region": "eu"}, "peers": peers, **changes})
            async with open_peers(config) as found:
                await wait_until(lambda: "yet" not in found.views()[0].reason)
                assert reason in found.views()[0].reason
    finally:
        await us_router.stop()
