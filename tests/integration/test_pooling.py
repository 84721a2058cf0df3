"""Inputs that are longer than a client wants used, at a router with fake pooling workers."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import aiohttp

from router.intake.body_processes import LARGE_BODY_BYTES
from tests.support.cluster import Cluster
from tests.support.timeouts import wait_until
from workers.fake.settings import FakeFaults

IDS = list(range(20, 60))
CONTEXT = 8192
TEXT = "What does a prefill worker do, and why?"


async def test_inputs_are_truncated_at_the_side_that_is_asked_for() -> None:
    async with (
        Cluster(pooling=1) as cluster,
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
    ):

        async def ask(path: str, **body: Any) -> dict[str, Any]:
            async with http.post(path, json=body) as response:
                found: dict[str, Any] = await response.json()
                return found

        async def embed(given: Any, most: int | None = None, **more: Any) -> Any:
            more["truncate_prompt_tokens"] = most
            return (await ask("/v1/embeddings", input=given, **more))["data"][0]["embedding"]

        assert await embed(IDS, 5) == await embed(IDS[:5])
        assert await embed(IDS, 5, truncation_side="left") == await embed(IDS[-5:])
        assert await embed(IDS, -1) == await embed(IDS, 50) == await embed(IDS)
        ids = (await ask("/tokenize", prompt=TEXT))["tokens"]
        assert await embed(TEXT, 4) == await embed(ids[:4])
        assert await embed(TEXT, 4, truncation_side="left") == await embed(ids[-4:])
        scored = await ask("/v1/score", text_1=TEXT, text_2=[TEXT], truncate_prompt_tokens=4)
        assert scored["usage"]["prompt_tokens"] == 8
        for most in (0, 1 << 20):
            refused = await ask("/v1/embeddings", input=TEXT, truncate_prompt_tokens=most)
            assert refused["error"]["param"] == "truncate_prompt_tokens"


async def test_large_bodies_get_the_same_answers() -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": [TEXT, TEXT, "x"], "truncate_prompt_tokens": 9}),
        ("/v1/embeddings", {"input": [IDS], "encoding_format": "base64"}),
        ("/v1/score", {"text_1": TEXT, "text_2": [TEXT, "x"]}),
        ("/v1/rerank", {"query": TEXT, "documents": [TEXT, "x"], "top_n": 1}),
        ("/v1/rerank", {"query": TEXT, "documents": ["x"], "return_documents": False}),
        ("/v1/embeddings", {"input": ["a", ""]}),
    ]
    async with (
        Cluster(pooling=1) as cluster,
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
    ):

        async def ask(path: str, data: bytes) -> dict[str, Any]:
            headers = {"content-type": "application/json"}
            async with http.post(path, data=data, headers=headers) as response:
                found: dict[str, Any] = await response.json()
                found.pop("id", None)
                return found

        for path, body in bodies:
            data = json.dumps(body).encode()
            assert await ask(path, data + b" " * LARGE_BODY_BYTES) == await ask(path, data)


async def test_an_input_may_fill_the_context() -> None:
    async with (
        Cluster(pooling=1) as cluster,
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
    ):

        async def embed(**body: Any) -> Any:
            async with http.post("/v1/embeddings", json=body) as response:
                found = await response.json()
                return found["data"][0]["embedding"] if response.status == 200 else found["error"]

        ids = [20 + i % 200 for i in range(CONTEXT + 1)]
        whole = await embed(input=ids[:CONTEXT])
        assert len(whole) == 8
        assert await embed(input=ids[:CONTEXT], truncate_prompt_tokens=-1) == whole
        assert await embed(input=ids, truncate_prompt_tokens=CONTEXT) == whole
        assert (await embed(input=ids))["code"] == "context_length_exceeded"


async def test_the_paths_and_forms_of_vllm_and_cohere() -> None:
    async with (
        Cluster(pooling=1) as cluster,
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
    ):

        async def ask(path: str, **body: Any) -> Any:
            async with http.post(path, json=body) as response:
                found = await response.json()
                assert response.status == 200, found
                found.pop("id")
                found.pop("created", None)
                return found

        async def tokens(text: str) -> list[int]:
            async with http.post("/tokenize", json={"prompt": text}) as response:
                found: list[int] = (await response.json())["tokens"]
                return found

        first, second = (
            x["embedding"] for x in (await ask("/v1/embeddings", input=[TEXT, "x"]))["data"]
        )
        pooled = (await ask("/pooling", input=[TEXT, "x"]))["data"]
        assert pooled == [
            {"object": "pooling", "index": 0, "data": first},
            {"object": "pooling", "index": 1, "data": second},
        ]
        kinds = ["float", "base64", "ubinary", "binary"]
        typed = await ask("/v2/embed", texts=[TEXT, "x"], embedding_types=kinds, input_type="a")
        assert (typed["texts"], typed["response_type"]) == ([TEXT, "x"], "embeddings_by_type")
        found = typed["embeddings"]
        assert found["float"] == [first, second]
        packed = struct.pack("<8f", *first)
        assert base64.b64decode(found["base64"][0]) == packed
        signs = sum((x >= 0) << 7 - i for i, x in enumerate(first))
        assert (found["ubinary"][0], found["binary"][0]) == ([signs], [signs - 128])
        ids = await tokens(TEXT)
        for side, kept in (("START", ids[-5:]), ("END", ids[:5])):
            cut = await ask("/v2/embed", texts=[TEXT], truncate=side, max_tokens=5)
            own = (await ask("/v1/embeddings", input=kept))["data"][0]["embedding"]
            assert cut["embeddings"]["float"] == [own]

        scores = await ask("/v1/score", text_1=TEXT, text_2=[TEXT, "x"])
        assert await ask("/score", queries=TEXT, documents=[TEXT, "x"]) == scores
        once = 2 * len(ids) + len(await tokens("x"))
        assert scores["usage"]["prompt_tokens"] == once, "the query counts once"
        ranked = await ask("/v1/rerank", query=TEXT, documents=[TEXT, "x"], top_n=0)
        assert len(ranked["results"]) == 2
        for path in ("/rerank", "/v2/rerank"):
            assert await ask(path, query=TEXT, documents=[TEXT, "x"]) == ranked

        said = [{"role": "user", "content": TEXT}]
        async with http.post(
            "/tokenize", json={"messages": said, "add_generation_prompt": False}
        ) as response:
            rendered = (await response.json())["tokens"]
        as_ids = await ask("/v1/embeddings", input=rendered)
        assert await ask("/v1/embeddings", messages=said) == as_ids

        both = {"input": [TEXT, "x"]}
        for form in ("bytes", "bytes_only"):
            async with http.post("/v1/embeddings", json={**both, "encoding_format": form}) as sent:
                assert sent.content_type == "application/octet-stream"
                assert await sent.read() == packed + struct.pack("<8f", *second)
                metadata = json.loads(sent.headers.get("metadata", "{}"))
                places = [(x["start"], x["end"]) for x in metadata.get("data", ())]
                assert places == ([(0, 32), (32, 64)] if form == "bytes" else [])
        async with http.get("/load") as response:
            assert await response.json() == {"server_load": 0}


async def test_a_killed_worker_costs_no_embedding() -> None:
    async with (
        Cluster(pooling=2) as cluster,
        aiohttp.ClientSession(f"http://{cluster.http}") as http,
    ):

        async def embed(number: int) -> int:
            async with http.post("/v1/embeddings", json={"input": f"text {number}"}) as response:
                return response.status

        cluster.faults("pooling-0", FakeFaults(stalled=True))
        asked = [asyncio.create_task(embed(number)) for number in range(20)]
        await wait_until(lambda: cluster.busy("pooling-0"))
        await cluster.kill("pooling-0")
        assert await asyncio.gather(*asked) == [200] * len(asked)
        said = {"messages": [{"role": "user", "content": "a"}]}
        async with http.post("/v1/chat/completions", json=said) as response:
            refused = (await response.json())["error"]
        assert (response.status, refused["param"]) == (400, "model")
