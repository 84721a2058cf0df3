"""Images through router and workers, with fake engines, whose answers depend on their hashes."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.support.cluster import Cluster
from tests.support.images import png
from tests.support.timeouts import WAIT_S, wait_until
from workers.fake.render import IMAGE_TOKENS
from workers.fake.settings import FakeFaults
from workers.link.router_link import RouterLink

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MANY = 24
SIZE = {"block_size": 8, "max_images": 2, "prefix_cache": True}


def body(*images: bytes, **more: Any) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(x).decode()}" for x in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is this?"}, *parts]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 12, "ignore_eos": True, **more}


async def ask(cluster: Cluster, *bodies: dict[str, Any]) -> Sequence[tuple[int, dict[str, Any]]]:
    """Ask all at once."""
    async with aiohttp.ClientSession() as session:

        async def one(asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            url = f"http://{cluster.http}/v1/chat/completions"
            async with session.post(url, json=asked) as answer:
                return answer.status, await answer.json()

        return await asyncio.gather(*map(one, bodies))


def text_of(answer: tuple[int, dict[str, Any]]) -> str:
    status, found = answer
    assert status == 200, found
    return str(found["choices"][0]["message"]["content"])


# Large enough that some bodies are read by the process for large bodies.
IMAGES = [png(i + 1, 1) + bytes(40_000 * (i % 2)) for i in range(MANY)]


async def test_each_answer_is_about_its_own_image() -> None:
    async with Cluster(aggregated=1, engine_args=SIZE) as cluster:
        expected = [text_of((await ask(cluster, body(image)))[0]) for image in IMAGES]
    assert len(set(expected)) == MANY
    bombs = [body(png(1 << 16, 1 << 16)), body(b"no image"), body(*IMAGES[:3])]
    async with Cluster(prefill=2, decode=2, engine_args=SIZE) as cluster:
        *answers, bomb, text, many = await ask(cluster, *map(body, IMAGES), *bombs)
        assert list(map(text_of, answers)) == expected
        assert [bomb[0], text[0], many[0]] == [400] * 3
        again = await ask(cluster, *map(body, IMAGES))
        assert list(map(text_of, again)) == expected, "also from caches"
        usage, receipt = again[0][1]["usage"], again[0][1]["pdserve"]["receipt"]
        assert usage["prompt_tokens"] > IMAGE_TOKENS
        assert (receipt["images"], receipt["prefill_worker"][:7]) == (1, "prefill")
        assert receipt["decode_worker"][:6] == "decode"
        page = await cluster.metrics()
        assert f'pdserve_render_seconds_count{{model="pdserve-demo"}} {2 * MANY}' in page


async def test_decode_gets_less_than_2_kib_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the connections of real workers. Prefill gets all of it."""
    received: Counter[str] = Counter()
    data_received = RouterLink.data_received

    def counted(link: RouterLink, data: bytes) -> None:
        received[link._instance_id.partition("-")[0]] += len(data)
        data_received(link, data)

    monkeypatch.setattr(RouterLink, "data_received", counted)
    pair = [png(3, 1) + bytes(100_000), png(4, 1) + bytes(100_000)]
    async with Cluster(prefill=1, decode=1, engine_args=SIZE) as cluster:
        await ask(cluster, body())
        text = received.copy()
        await ask(cluster, body(*pair))
    assert received["prefill"] - text["prefill"] > 200_000
    assert received["decode"] - text["decode"] < 2 * 2048


@pytest.mark.parametrize(
    ("role", "act"), [("prefill", "kill"), ("decode", "kill"), ("decode", "drain")]
)
async def test_an_answer_goes_on_without_its_worker(role: str, act: str) -> None:
    """A dead worker's prompt is computed again, from the images that the router has kept."""
    asked = body(*IMAGES[:2], max_tokens=60)
    names = (f"{role}-0", f"{role}-1")
    async with Cluster(aggregated=1, engine_args=SIZE) as cluster:
        expected = text_of((await ask(cluster, asked))[0])
    async with Cluster(prefill=2, decode=2, engine_args=SIZE) as cluster:
        for name in names:
            # Prefill stalls before the prompt, decode in the answer.
            cluster.faults(name, FakeFaults(stall_at_step=1 if role == "prefill" else 30))
        asking = asyncio.create_task(ask(cluster, asked))
        await wait_until(lambda: cluster.busy(*names))
        (busy,) = cluster.busy(*names)
        idle, engine = names[1 - names.index(busy)], cluster.engine(busy)
        await wait_until(lambda: engine.faults.stalls(engine.steps.done + 1))
        if act == "kill":
            await cluster.kill(busy)
            cluster.faults(idle, FakeFaults())
        else:
            drain = cluster.command("drain", busy, "--timeout", str(WAIT_S), "--json")
            draining = asyncio.create_task(drain)
            await cluster.until_state(busy, "draining")
            for name in names:
                cluster.faults(name, FakeFaults())
            assert await draining == 0
        (answer,) = await asking
        assert text_of(answer) == expected
        assert answer[1]["pdserve"]["receipt"]["fallbacks"]
        await cluster.until_empty()


async def test_images_go_to_an_encode_worker_while_prefill_is_busy(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A lone request does not. Answers are those without it, `explain` says why, and the ledger has
    each transfer of images and of their features."""
    ledger = tmp_path / "ledger"
    router = {"residency": {"ledger": str(ledger)}}
    slow = {**SIZE, "prefill_s": 0.002}
    async with Cluster(aggregated=1, engine_args=SIZE) as cluster:
        expected = [text_of(x) for x in await ask(cluster, *map(body, IMAGES))]
    async with Cluster(prefill=1, decode=1, encode=1, engine_args=slow, router=router) as cluster:
        (alone,) = await ask(cluster, body(IMAGES[0]))
        assert alone[1]["pdserve"]["receipt"]["encode_worker"] == ""
        answers = await ask(cluster, *map(body, IMAGES))
        assert list(map(text_of, answers)) == expected
        receipts = {x[1]["id"]: x[1]["pdserve"]["receipt"] for x in answers}
        encoded = [x for x, receipt in receipts.items() if receipt["encode_worker"]]
        assert encoded
        for request_id in encoded:
            receipt = receipts[request_id]
            assert (receipt["encode_worker"], receipt["fetched_images"]) == ("encode-0", 1)
            assert receipt["encode_s"] > 0
            capfd.readouterr()
            assert await cluster.command("explain", request_id) == 0
            text = capfd.readouterr().out
            assert "images on encode-0, prefill on prefill-0" in text
            assert "images are encoded by encode-0: " in text
        page = await cluster.metrics()
        fetched = sum(x["fetched_images"] for x in receipts.values())
        assert f'pdserve_fetched_images_total{{model="pdserve-demo"}} {fetched}' in page
        line = 'kind="encode",model="pdserve-demo",reason="",role="encode"'
        assert f"pdserve_engine_seconds_total{{{line}}}" in page, [
            x for x in page.splitlines() if "engine_seconds" in x
        ]
    lines = [json.loads(x) for x in ledger.read_text().splitlines()]
    features = {x["request_id"]: x for x in lines if x["data"] == "image_features"}
    assert features.keys() == {x for x, receipt in receipts.items() if receipt["fetched_images"]}
    assert {(x["from"], x["to"]) for x in features.values()} == {("encode-0", "prefill-0")}
    assert all(x["bytes"] == 4 * IMAGE_TOKENS for x in features.values())
    files = [x for x in lines if x["data"] == "image_files"]
    assert {x["from"] for x in files} == {"router"}
    assert len({x["request_id"] for x in files}) == MANY  # the lone one's is cached
    rendered = [x for x in lines if x["data"] == "images" and x["to"] == "router"]
    assert [x["request_id"] for x in rendered] == [x["request_id"] for x in files]
    assert all(x["bytes"] for x in (*files, *rendered))


@pytest.mark.parametrize("act", ["kill", "crash", "drain"])
async def test_answers_go_on_without_the_encode_worker(act: str) -> None:
    slow = {**SIZE, "prefill_s": 0.001}
    async with Cluster(aggregated=1, engine_args=SIZE) as cluster:
        expected = [text_of(x) for x in await ask(cluster, *map(body, IMAGES))]
    async with Cluster(prefill=1, decode=1, encode=1, engine_args=slow) as cluster:
        # It takes images, and encodes none.
        cluster.faults("encode-0", FakeFaults(stall_at_step=1))
        asking = asyncio.create_task(ask(cluster, *map(body, IMAGES)))
        await wait_until(lambda: cluster.busy("encode-0"))
        if act == "kill":
            await cluster.kill("encode-0")
        elif act == "crash":
            cluster.crash("encode-0")
        else:
            cluster.faults("encode-0", FakeFaults())
            assert await cluster.command("drain", "encode-0", "--json") == 0
        answers = await asking
        assert list(map(text_of, answers)) == expected
        assert all(not x[1]["pdserve"]["receipt"]["fallbacks"] for x in answers)
        again = await ask(cluster, *map(body, IMAGES))
        assert list(map(text_of, again)) == expected


async def test_a_request_says_why_its_images_are_not_rendered() -> None:
    async with Cluster(aggregated=1) as cluster:
        ((status, answer),) = await ask(cluster, body(IMAGES[0]))
    assert status == 400
    assert "takes no images" in answer["error"]["message"]
