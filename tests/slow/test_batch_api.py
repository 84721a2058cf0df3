"""The Batch API with OpenAI's client, over routers that are really killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest

from pdserve.config import BatchConfig
from tests.cluster import Cluster
from tests.patience import WAIT_S
from tests.up_process import up

if TYPE_CHECKING:
    from pathlib import Path

LINES = 60


def lines(count: int = LINES) -> bytes:
    bodies = [
        {"model": "fake", "prompt": f"line {i}", "max_tokens": 10 + 4 * i, "ignore_eos": True}
        for i in range(count)
    ]
    return b"".join(
        json.dumps(
            {"custom_id": f"{i}", "method": "POST", "url": "/v1/completions", "body": body}
        ).encode()
        + b"\n"
        for i, body in enumerate(bodies)
    )


def wait_for(client: openai.OpenAI, batch_id: str, *, completed: int) -> Any:
    ends_at = time.monotonic() + WAIT_S
    while time.monotonic() < ends_at:
        batch = client.batches.retrieve(batch_id)
        assert batch.request_counts is not None
        if batch.status == "completed" or batch.request_counts.completed >= completed:
            return batch
        time.sleep(0.05)
    pytest.fail(f"{batch}")


def test_a_killed_router_loses_no_line_and_writes_none_twice(tmp_path: Path) -> None:
    slow = ("--set", "worker.engine_args={step_s: 0.02}", "--set", "router.lease_s=20")
    with up(tmp_path, "--routers", "2", *slow) as running:
        ready = running.wait_until_serving()
        model = {"api_key": "none", "max_retries": 10}
        first, second = (
            openai.OpenAI(base_url=f"{router['http']}/v1", **model) for router in ready["routers"]
        )
        with first, second:
            name = first.models.list().data[0].id
            data = lines().replace(b'"fake"', json.dumps(name).encode())
            file = first.files.create(file=("in.jsonl", data), purpose="batch")
            assert first.files.content(file.id).read() == data
            batch = first.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            # Either router may have it: each is killed once.
            for i, router in enumerate(ready["routers"]):
                batch = wait_for(first, batch.id, completed=(1 + i) * LINES // 10)
                assert batch.status == "in_progress"
                os.kill(router["pid"], signal.SIGKILL)
                running.wait_for_line(f"router-{i}", "is back")
            while batch.status not in ("completed", "failed"):
                batch = wait_for(first, batch.id, completed=LINES)
            assert batch.request_counts.completed == LINES
            rows = first.files.content(batch.output_file_id).text.splitlines()
            assert [json.loads(row)["custom_id"] for row in rows] == [f"{i}" for i in range(LINES)]
            assert {json.loads(row)["response"]["status_code"] for row in rows} == {200}
        running.send(signal.SIGINT)
        assert running.wait() == 0


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
    router = {"batch": BatchConfig(directory=str(tmp_path))}
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
