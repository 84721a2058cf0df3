"""Images through router and workers, with fake engines, whose answers depend on their hashes."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.support.cluster import Cluster
from tests.support.images import png
from tests.support.timeouts import WAIT_S, wait_until
from workers.fake.render import IMAGE_TOKENS
from workers.fake.settings import FakeFaults

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        await wait_until(lambda: engine.faults.stalls(engine._steps + 1))
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
        await cluster.assert_no_leaks()


async def test_a_request_says_why_its_images_are_not_rendered() -> None:
    async with Cluster(aggregated=1) as cluster:
        ((status, answer),) = await ask(cluster, body(IMAGES[0]))
    assert status == 400
    assert "takes no images" in answer["error"]["message"]
