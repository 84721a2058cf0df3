"""docs/architecture.md is true: the files that it names are those that serve a request."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from pdserve.background import background
from tests.support.cluster import Cluster

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r"^(?:pdserve|router|workers|kv_transfer)/")
NAMED = re.compile(r"`((?:pdserve|router|workers|kv_transfer)/[\w/]+\.py)`")
# Measures the lag of the event loop, often enough to run beside every request.
BESIDE = {"pdserve/background.py"}
# The cluster of this test has fake engines, which need neither vLLM nor the KV plane.
WITH_VLLM = re.compile(r"^(?:kv_transfer|workers/vllm)/")


async def _files_until_first_token() -> set[str]:
    """Return our files that run for a streaming chat request, from socket to first token out.

    Those are the files that run for each of several requests, outside of background tasks: what
    runs every second, such as checks of workers, falls into a request by chance, and on a slow
    machine into each.
    """
    touched: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not _is_background(asyncio.current_task()):
            touched.add(frame.f_code.co_filename)

    body = {
        "model": "pdserve-demo",
        "messages": [{"role": "user", "content": "What is a block?"}],
        "stream": True,
        "max_tokens": 8,
        "ignore_eos": True,
    }

    async def files_of_one_request(session: aiohttp.ClientSession, url: str) -> set[str]:
        touched.clear()
        sys.setprofile(note)
        try:
            async with session.post(url, json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if b'"content":"' in line.replace(b" ", b""):
                        break
                sys.setprofile(None)
                await answer.read()
        finally:
            sys.setprofile(None)
        return set(touched)

    async with Cluster(prefill=1, decode=1) as cluster, aiohttp.ClientSession() as session:
        url = f"http://{cluster.http}/v1/chat/completions"
        await files_of_one_request(session, url)  # the first request imports and connects
        of_each = [await files_of_one_request(session, url) for _ in range(5)]
    paths = (Path(name) for name in set.intersection(*of_each))
    names = {path.relative_to(ROOT).as_posix() for path in paths if path.is_relative_to(ROOT)}
    return {name for name in names if OURS.match(name)}


def _is_background(task: asyncio.Task[Any] | None) -> bool:
    code = getattr(task and task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename == background.__wrapped__.__code__.co_filename


async def test_one_request_runs_through_the_files_that_the_document_names() -> None:
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(NAMED.findall(document.partition("## One request")[2].partition("\n## ")[0]))
    assert 5 <= len(named) <= 15
    touched = await _files_until_first_token()
    assert {name for name in named if not WITH_VLLM.match(name)} - touched == set()
    # The steps are a list, of which a reader needs no more than the names.
    # The fake engine stands for vLLM.
    unread = ("router/steps/", "workers/fake/")
    read = {name for name in touched - BESIDE if not name.startswith(unread)}
    assert len(read) <= 58, "\n".join(sorted(read))
