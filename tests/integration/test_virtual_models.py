"""A virtual model over two models with fake engines, whose tokens all have the logprob -0.5."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.client import ChatMessage
from pdserve.errors import InvalidRequest
from pdserve.security.keys import hash_key
from pdserve.types import Role, SamplingParams
from tests.support.cluster import Cluster
from tests.support.timeouts import wait_until
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONG = "word " * 60
PASSES = {"to": "large", "tokens": 8, "min_mean_logprob": -1.0}
FAILS = {**PASSES, "min_mean_logprob": -0.1}
RULES = [
    {"name": "long", "model": "large", "prompt_tokens_above": 60},
    {"name": "sure", "model": "small", "tenants": ["sure"], "escalate": PASSES},
    {"name": "unsure", "model": "small", "tenants": ["unsure"], "escalate": FAILS},
    {"name": "strict", "model": "small", "tenants": ["strict"], "next_if_busy": False},
    {"name": "small", "model": "small"},
]
AUTO = {"name": "auto", "default": "small", "rules": RULES[:1]}  # for a router without tenants
TENANTS = [
    *({"name": x, "keys": [hash_key(x)]} for x in ("plain", "sure", "unsure", "strict")),
    {"name": "bound", "keys": [hash_key("bound")], "allowed_models": ["small"]},
]


@asynccontextmanager
async def two_models(
    *, prices: bool = False, small: dict[str, object] | None = None, **router: Any
) -> AsyncIterator[Cluster]:
    values = {
        "tenants": TENANTS,
        "virtual_models": [{"name": "auto", "default": "large", "rules": RULES}],
        **({"prices": {"cpu": 1.0}} if prices else {}),
        **router,
    }
    async with Cluster(router=values) as cluster:
        for name, args in (("small", small), ("large", None)):
            await cluster.add(name, Role.AGGREGATED, model_names=(name,), engine_args=args or {})
        await cluster.until_ready()
        yield cluster


async def ask(
    cluster: Cluster,
    tenant: str = "plain",
    prompt: str = "hi",
    *,
    override: str = "",
    **body: Any,
) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an answer, or of a stream as `chunks`."""
    headers = {"authorization": f"Bearer {tenant}"}
    if override:
        headers["x-model-override"] = override
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 24,
        "ignore_eos": True,
        **body,
    }
    url = f"http://{cluster.http}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as got:
        if not body.get("stream"):
            return got.status, await got.json()
        events = [x.removeprefix("data: ") for x in (await got.text()).split("\n\n")]
        return got.status, {"chunks": [json.loads(x) for x in events if x.startswith("{")]}


def choice(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["pdserve"]["receipt"]["model_choice"]
    return found


async def test_rules_choose_the_model_and_an_override_replaces_them() -> None:
    async with two_models() as cluster:
        for prompt, override, model, rule in (
            ("hi", "", "small", "small"),
            (LONG, "", "large", "long"),
            ("hi", "large", "large", "override"),
        ):
            status, body = await ask(cluster, prompt=prompt, override=override)
            assert (status, body["model"]) == (200, model)
            assert (choice(body)["model"], choice(body)["rule"]) == (model, rule)
        status, body = await ask(cluster, override="other")
        assert (status, body["error"]["param"]) == (400, "x-model-override")
        status, body = await ask(cluster, override="large", model="small")
        assert (status, body["error"]["param"]) == (400, "x-model-override")
        labels = 'model="large",rule="long",virtual_model="auto"'
        assert f"pdserve_model_choices_total{{{labels}}} 1.0" in await cluster.metrics()
        async with aiohttp.ClientSession() as http:
            headers = {"authorization": "Bearer plain"}
            async with http.get(f"http://{cluster.http}/v1/models", headers=headers) as got:
                names = [x["id"] for x in (await got.json())["data"]]
        assert names == ["large", "small", "auto"]
        assert await cluster.command("explain", body_id(await ask(cluster, prompt=LONG))) == 0


def body_id(answer: tuple[int, dict[str, Any]]) -> str:
    found: str = answer[1]["id"]
    return found


async def test_a_tenant_gets_no_model_that_it_may_not_use() -> None:
    async with two_models() as cluster:
        status, body = await ask(cluster, "bound", LONG)
        assert (status, body["model"]) == (200, "small")
        assert "may not use model large" in choice(body)["skipped"][0]
        for values in ({"override": "large"}, {"model": "large"}):
            status, body = await ask(cluster, "bound", **values)
            assert (status, body["error"]["code"]) == (403, "permission_denied")


async def test_what_is_bound_to_one_model_is_refused() -> None:
    async with two_models(tenants=[], virtual_models=[AUTO]) as cluster:
        with pytest.raises(InvalidRequest, match="name a model") as error:
            await cluster.ask([20, 21], model="auto")
        assert error.value.field == "token_ids"


async def test_a_model_that_is_full_or_gone_is_passed_over_unless_its_rule_forbids_it() -> None:
    queue = {"max_queued_requests": 0}
    async with two_models(queue=queue, small={"total_blocks": 4, "step_s": 0.01}) as cluster:
        holding = asyncio.create_task(ask(cluster, max_tokens=40))
        await wait_until(lambda: cluster.busy("small"))
        status, body = await ask(cluster)
        assert (status, body["model"], choice(body)["rule"]) == (200, "large", "default")
        assert "model small" in choice(body)["skipped"][-1]
        status, body = await ask(cluster, "strict")
        assert (status, body["error"]["reason"]) == (429, "no_room")
        assert (await holding)[1]["model"] == "small"
        await cluster.kill("small")
        await wait_until(lambda: cluster.router.fleet.members["small"].lost)
        assert (await ask(cluster))[1]["model"] == "large"
        assert (await ask(cluster, "strict"))[0] == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_held_back_until_it_passes_and_streams_never_mix_models(
    stream: bool,
) -> None:
    async with two_models(prices=True) as cluster:
        for tenant, model in (("sure", "small"), ("unsure", "large")):
            options = {"stream_options": {"include_usage": True}} if stream else {}
            status, body = await ask(cluster, tenant, stream=stream, **options)
            assert status == 200
            whole = body
            if stream:
                assert {x["model"] for x in body["chunks"]} == {model}
                whole = body["chunks"][-1]
                texts = [y["delta"].get("content") for x in body["chunks"] for y in x["choices"]]
                assert sum(bool(x) for x in texts) <= 24
            assert whole["model"] == model
            assert whole["usage"]["completion_tokens"] == 24
            assert not any(x.get("logprobs") for x in whole["choices"])
            found = choice(whole)
            assert found["discarded_model"] == ("" if tenant == "sure" else "small")
            if tenant == "unsure":
                assert found["rule"] == "escalated"
                assert "mean logprob -0.500" in found["discarded_reason"]
                assert 8 <= found["discarded_tokens"] <= 24
        labels = 'model="small",reason="logprob",virtual_model="auto"'
        assert f"pdserve_escalations_total{{{labels}}} 1.0" in await cluster.metrics()


async def test_nothing_stays_when_a_client_leaves_while_its_answer_is_held_back() -> None:
    async with two_models() as cluster:
        cluster.faults("small", FakeFaults(stall_at_step=4))
        asking = asyncio.create_task(ask(cluster, "sure", stream=True))
        await wait_until(lambda: cluster.busy("small"))
        asking.cancel()
        await asyncio.wait([asking])
        await wait_until(lambda: not cluster.busy("small", "large"))
        cluster.faults("small", FakeFaults())
        assert (await ask(cluster, "sure"))[1]["model"] == "small"


async def test_a_classifier_labels_the_last_message_once_its_examples_are_embedded() -> None:
    classifier = {
        "model": "embedder",
        "examples": {"greeting": ["good morning"], "sum": ["add the numbers"]},
        "min_similarity": 0.99,  # the fake engine's vectors are equal for equal texts alone
        "timeout_s": 30.0,
    }
    rules = [{"name": "sums", "model": "large", "labels": ["sum"]}]
    virtual = [{"name": "auto", "default": "small", "rules": rules, "classifier": classifier}]
    async with two_models(virtual_models=virtual) as cluster:
        assert (await ask(cluster, prompt="add the numbers"))[1]["model"] == "small"  # no worker
        await cluster.add("pooling-0", model_names=("embedder",))
        await cluster.until_ready()
        for prompt, model in (
            ("add the numbers", "large"),
            ("good morning", "small"),
            ("other", "small"),
        ):
            assert (await ask(cluster, prompt=prompt))[1]["model"] == model


async def test_grpc_names_the_model_by_which_an_answer_is_resumed() -> None:
    async with two_models(tenants=[], virtual_models=[AUTO]) as cluster:
        messages = [ChatMessage("user", LONG)]
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        last = None
        async for delta in cluster.client.generate(messages, sampling, model="auto"):
            last = delta
        assert last is not None
        assert last.receipt is not None
        assert last.receipt.model_choice is not None
        assert last.receipt.model_choice.model == "large"
        cards = {x.name: x for x in await cluster.client.list_models()}
        assert cards["auto"].max_model_len == cards["small"].max_model_len
