"""The Batch API with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.cluster import Cluster
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("endpoint", "prompt", "kind"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}]},
            "chat.completion",
        ),
        ("/v1/completions", {"prompt": "Hi"}, "text_completion"),
        ("/v1/responses", {"input": "Hi"}, "response"),
        ("/v1/embeddings", {"input": ["Hi", "you"]}, "list"),
    ],
)
async def test_a_line_is_answered_as_its_endpoint_does(
    endpoint: str, prompt: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": endpoint, "body": body}
        for name, body in (("good", prompt), ("bad", prompt | {"stream": True}))
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    router = {"store": {"database": str(tmp_path)}}
    async with (
        Cluster(prefill=1, decode=1, pooling=1, router=router) as cluster,
        openai.AsyncOpenAI(base_url=f"http://{cluster.http}/v1", api_key="none") as client,
    ):
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        batch: Any = await client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
        )
        async with asyncio.timeout(WAIT_S):
            while batch.status != "completed":
                await asyncio.sleep(0.05)
                batch = await client.batches.retrieve(batch.id)
        good = json.loads((await client.files.content(batch.output_file_id)).text)
        bad = json.loads((await client.files.content(batch.error_file_id)).text)
        assert (good["custom_id"], good["response"]["body"]["object"]) == ("good", kind)
        assert (bad["custom_id"], bad["response"]["body"]["error"]["param"]) == ("bad", "stream")
        if kind == "response":
            assert (await client.responses.retrieve(good["response"]["body"]["id"])).output_text
