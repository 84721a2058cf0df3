"""Inputs that are longer than a client wants used, at a router with fake pooling workers."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from router.api.body_process import LARGE_BODY_BYTES
from tests.support.cluster import Cluster

IDS = list(range(20, 60))
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
