"""Requests that are bound to a region, in a fleet of three: nothing of them gets elsewhere, also
while the region's workers die."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from msgspec import convert

from pdserve.cli.residency import summary
from pdserve.config import ResidencyConfig, TenantConfig, TopologyConfig
from pdserve.errors import Refusal, Unavailable
from pdserve.security.keys import hash_key
from pdserve.types import Role, SamplingParams
from tests.support.cluster import Cluster
from tests.support.commands import ROOT
from workers.fake.engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.support.cluster import Answer
    from workers.engine import Work

REGIONS = ("ap", "eu", "us")
PROMPT = [20 + i % 40 for i in range(64)]
SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def in_eu(tenants: Sequence[dict[str, Any]] = (), **values: Any) -> dict[str, Any]:
    """Return the configuration of a router in eu that knows three regions."""
    return {
        "topology": TopologyConfig(region="eu"),
        "residency": ResidencyConfig(regions=REGIONS),
        "tenants": [convert(x, TenantConfig) for x in tenants],
        **values,
    }


@asynccontextmanager
async def three_regions(**router: Any) -> AsyncIterator[Cluster]:
    """A router in eu, and a prefill, a decode and an aggregated worker in each region."""
    values = in_eu(queue={"timeout_s": 0.5}, policy="prefix_aware", **router)
    async with Cluster(router=values, engine_args={"prefix_cache": True}) as cluster:
        for region in REGIONS:
            for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED):
                await cluster.add(f"{role}-{region}", role, topology={"region": region})
        await cluster.until_ready()
        yield cluster


def asked(cluster: Cluster) -> set[str]:
    """Return the regions whose workers hold KV, by their own count."""
    return {x.rpartition("-")[2] for x, y in cluster.workers.items() if y.service.cache.blocks}


async def test_no_other_region_gets_the_prompt_while_the_workers_of_the_region_die() -> None:
    async with three_regions() as cluster:
        doomed = ["decode-eu", "prefill-eu", "aggregated-eu"]
        killing: list[asyncio.Task[None]] = []

        def kill_one(answer: Answer) -> None:
            if doomed and len(answer.token_ids) % 6 == 5:
                killing.append(asyncio.create_task(cluster.kill(doomed.pop(0))))

        async def ask_until_refused() -> None:
            while True:
                await cluster.ask(PROMPT, SAMPLING, on_token=kill_one, inference_geo="eu")

        with pytest.raises(Unavailable, match="in region eu") as error:
            await ask_until_refused()
        await asyncio.gather(*killing)
        assert error.value.reason == Refusal.NO_WORKER_IN_REGION
        assert error.value.retry_after_s > 0
        assert asked(cluster) <= {"eu"}
        url, body = f"http://{cluster.http}/v1/completions", {"prompt": PROMPT, "max_tokens": 4}
        async with aiohttp.ClientSession() as http:
            headers = {"x-inference-geo": "eu"}
            async with http.post(url, json=body, headers=headers) as answer:
                assert answer.status == 503, await answer.text()
                assert "in region eu" in (await answer.json())["error"]["message"]
                assert int(answer.headers["retry-after"]) > 0
            async with http.post(url, json=body) as answer:  # the service itself is well
                assert answer.status == 200


async def test_kv_of_a_region_is_no_cached_prefix_of_other_requests() -> None:
    worker = {"topology": TopologyConfig(region="eu")}
    args: dict[str, object] = {"prefix_cache": True}
    async with Cluster(
        prefill=1, decode=1, router=in_eu(), worker=worker, engine_args=args
    ) as cluster:
        cached = []
        for geo in ("eu", "eu", "", "global"):
            answer = await cluster.ask(PROMPT, SAMPLING, inference_geo=geo)
            assert answer.receipt is not None
            cached.append(answer.receipt.cached_tokens > 0)
        assert cached == [False, True, False, True]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
async def test_each_dialect_has_the_field_and_the_header(path: str, body: dict[str, Any]) -> None:
    tenants = [{"name": "a", "keys": [hash_key("k")], "allowed_inference_geos": ["eu", "us"]}]
    async with three_regions(tenants=tenants) as cluster, aiohttp.ClientSession() as http:

        async def ask(geo: str | None, header: str | None) -> tuple[int, str]:
            headers = {"authorization": "Bearer k"}
            headers |= {} if header is None else {"x-inference-geo": header}
            field = {} if geo is None else {"inference_geo": geo}
            url = f"http://{cluster.http}{path}"
            async with http.post(url, json={**body, **field}, headers=headers) as answer:
                return answer.status, await answer.text()

        for geo, header, expected in (
            ("eu", None, ""),
            (None, "eu", ""),
            ("eu", "eu", ""),
            (None, None, ""),
            ("eu", "us", "the header x-inference-geo is 'us'"),
            ("mars", None, "must be one of ap, eu, us, global, not 'mars'"),
            (None, "ap", "tenant a may use eu+us alone"),
            ("us", None, "may be in us alone, and this router is in eu"),
        ):
            status, text = await ask(geo, header)
            assert (status, expected in text) == (400 if expected else 200, True), text


async def test_the_ledger_and_each_dialect_say_where_data_was(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger"
    router = in_eu(
        [{"name": "a", "keys": [hash_key("k")], "allowed_inference_geos": ["eu"]}],
        residency=ResidencyConfig(regions=REGIONS, ledger=str(path)),
    )
    worker = {"topology": TopologyConfig(region="eu")}
    messages = [{"role": "user", "content": "hi"}]
    async with (
        Cluster(prefill=1, decode=1, router=router, worker=worker) as cluster,
        aiohttp.ClientSession(headers={"authorization": "Bearer k"}) as http,
    ):
        for name, body in (
            ("chat/completions", {"messages": messages, "max_tokens": 8}),
            ("messages", {"messages": messages, "max_tokens": 8}),
            ("responses", {"input": "hi", "max_output_tokens": 8}),
            ("completions", {"prompt": [PROMPT, PROMPT[1:]], "max_tokens": 8}),
        ):
            headers = {"idempotency-key": name.replace("/", "-")}
            url = f"http://{cluster.http}/v1/{name}"
            async with http.post(url, json=body, headers=headers) as answer:
                assert (await answer.json())["usage"]["inference_geo"] == "eu"
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert {x["to_region"] for x in lines} | {x["from_region"] for x in lines} == {"eu"}
    kv = [x for x in lines if x["data"] == "kv"]
    assert {(x["from"], x["to"], x["tenant"]) for x in kv} == {("prefill-0", "decode-0", "a")}
    assert all(x["bytes"] > 0 for x in kv)
    since = time.time() - 3600.0
    found = {x["data"]: (x["from"], x["to"], x["times"]) for x in summary([path], "a", since)}
    assert found == {
        "prompt": ("eu", "eu", 10),
        "kv": ("eu", "eu", 5),
        "answer": ("eu", "eu", 5),
        "response": ("eu", "eu", 1),
        "idempotent_answer": ("eu", "eu", 4),
    }
    assert summary([path], "b", since) == summary([path], "a", time.time() + 3600.0) == []


async def test_tiers_of_workers_elsewhere_store_nothing_of_a_tenant_with_a_storage_region(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenants = [
        {"name": "a", "keys": [hash_key("a")], "storage_geo": "us"},
        {"name": "b", "keys": [hash_key("b")]},
    ]
    asked: set[tuple[str, str, bool]] = set()
    submit = FakeEngine.submit

    def seen(engine: FakeEngine, work: Work) -> None:
        asked.add((tenant, region, work.no_tiers))
        submit(engine, work)

    monkeypatch.setattr(FakeEngine, "submit", seen)
    async with Cluster(router=in_eu(tenants)) as cluster, aiohttp.ClientSession() as http:
        for region in ("eu", "us"):
            await cluster.add(f"aggregated-{region}", topology={"region": region})
            await cluster.until_ready()
            for tenant in ("a", "b"):
                body, url = (
                    {"prompt": PROMPT, "max_tokens": 4},
                    f"http://{cluster.http}/v1/completions",
                )
                headers = {"authorization": f"Bearer {tenant}"}
                async with http.post(url, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
            await cluster.kill(f"aggregated-{region}")
    assert asked == {
        ("a", "eu", True),
        ("a", "us", False),
        ("b", "eu", False),
        ("b", "us", False),
    }


async def test_the_example_of_the_documentation_does_what_it_says() -> None:
    text = (ROOT / "docs/places.md").read_text("utf-8")
    (config,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (script,) = re.findall(r"```sh\n(pdserve up.*?)```", text, re.DOTALL)
    curl = shlex.split(script.splitlines()[1])
    assert curl[0] == "curl"
    headers = dict(x.split(": ") for option, x in pairwise(curl) if option == "-H")
    (body,) = [x for option, x in pairwise(curl) if option == "-d"]
    values = msgspec.yaml.decode(config)
    router = {**values["router"], "queue": {"timeout_s": 0.2}}
    worker = {"topology": convert(values["worker"]["topology"], TopologyConfig)}
    async with (
        Cluster(prefill=1, decode=1, router=router, worker=worker) as cluster,
        aiohttp.ClientSession() as http,
    ):

        async def ask(**more: str) -> tuple[int, str, Any]:
            url = curl[1].replace("localhost:8000", cluster.http)
            async with http.post(f"http://{url}", data=body, headers=headers | more) as answer:
                return answer.status, await answer.text(), answer.headers.get("retry-after")

        status, answer, _ = await ask()
        assert (status, json.loads(answer)["usage"]["inference_geo"]) == (200, "eu")
        status, answer, _ = await ask(**{"x-inference-geo": "us"})
        assert (status, "this router is in eu" in answer) == (400, True)
        for name in ("prefill-0", "decode-0"):
            assert await cluster.command("drain", name, "--force") == 0
        status, answer, retry_after = await ask()
        assert (status, "in region eu" in answer, int(retry_after) > 0) == (503, True, True)
        assert Refusal.NO_WORKER_IN_REGION in answer


async def test_nothing_is_stored_outside_of_the_tenants_region() -> None:
    tenants = [{"name": "a", "keys": [hash_key("k")], "storage_geo": "us"}]
    async with three_regions(tenants=tenants) as cluster, aiohttp.ClientSession() as http:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}", filename="a.jsonl")
        for path, arguments, field in (
            ("/v1/responses", {"json": {"input": "hi"}}, "store"),
            ("/v1/files", {"data": form}, "file"),
            ("/v1/batches", {"json": {}}, "input_file_id"),
            (
                "/v1/completions",
                {"json": {"prompt": PROMPT}, "headers": {"idempotency-key": "1"}},
                "idempotency-key",
            ),
        ):
            headers = {"authorization": "Bearer k", **arguments.pop("headers", {})}
            url = f"http://{cluster.http}{path}"
            async with http.post(url, headers=headers, **arguments) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["param"]) == (400, field)
                assert "kept in us alone" in error["message"]
        body = {"input": "hi", "store": False}
        url, headers = f"http://{cluster.http}/v1/responses", {"authorization": "Bearer k"}
        async with http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200
