"""The Batch API with OpenAI's client, over routers that are really killed."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest

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


@pytest.mark.slow
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
