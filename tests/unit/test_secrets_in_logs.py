"""Prompts, answers and secrets pass through router and workers, in successful and failed requests.
No record of any logger contains them."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.client import Client
from pdserve.config import (
    AccessConfig,
    GrpcConfig,
    HttpConfig,
    RouterAccessConfig,
    RouterConfig,
    TenantConfig,
    WorkerConfig,
)
from pdserve.errors import PdserveError
from pdserve.security.keys import hash_key
from pdserve.types import Role, SamplingParams
from router.main import RouterServer
from tests.support.timeouts import WAIT_S, wait_until
from workers.fake.engine import FakeEngine
from workers.make_engine import make_engine
from workers.server import WorkerServer

if TYPE_CHECKING:
    from pathlib import Path

API_KEY, WRONG_KEY = "pd-marker-of-a-client", "pd-marker-of-a-stranger"
ADMIN_KEY, TOKEN = "pd-marker-of-an-admin", "marker-of-the-workers-and-routers-1"
PROMPT = "zanzibar quokka marker"
# Unlikely to be anything else's number: as text and as what a list of them looks like.
TOKEN_IDS = [397, 211, 389, 157, 401]
SECRETS = (API_KEY, WRONG_KEY, ADMIN_KEY, TOKEN, PROMPT, "zanzibar", "quokka", "397, 211, 389")


class Everything(logging.Handler):
    """A handler that keeps each record with its exception and its arguments."""

    def __init__(self) -> None:
        super().__init__(level=1)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{self.format(record)} {record.args!r}")


async def chat(session: aiohttp.ClientSession, key: str, **changes: Any) -> int:
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], **changes}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with session.post(
        "/v1/chat/completions", data=json.dumps(body), headers=headers
    ) as answer:
        await answer.read()
        return answer.status


async def use(http: str, grpc: str, engine: FakeEngine) -> None:
    """Send requests through every path of the service that may write a log record."""
    async with aiohttp.ClientSession(f"http://{http}") as session:
        body: dict[str, Any] = {"max_tokens": 4}
        assert await chat(session, API_KEY, **body) == 200
        assert await chat(session, API_KEY, stream=True, **body) == 200
        assert await chat(session, WRONG_KEY, **body) == 401
        assert await chat(session, API_KEY, temperature=PROMPT) == 400
        assert await chat(session, API_KEY, **{PROMPT: 1}) == 400
        assert await chat(session, API_KEY, max_tokens=1 << 20) == 400
        assert await chat(session, API_KEY, model=PROMPT) == 404
        headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
        async with session.post(
            "/v1/completions", data=f'{{"prompt": "{PROMPT}', headers=headers
        ) as answer:
            assert answer.status == 400
    async with Client(grpc, api_key=API_KEY) as client:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        assert [x async for x in client.generate(TOKEN_IDS, sampling)]
        async with Client(grpc, api_key=WRONG_KEY) as stranger:
            with pytest.raises(PdserveError):
                _ = [x async for x in stranger.generate(PROMPT, sampling)]
        # In the middle of an answer.
        long = SamplingParams(max_tokens=10_000, ignore_eos=True)
        with pytest.raises(PdserveError):
            await crash_in_the_middle(client, long, engine)


async def crash_in_the_middle(client: Client, long: SamplingParams, engine: FakeEngine) -> None:
    async for _ in client.generate(TOKEN_IDS, long):
        engine.crash()


async def test_no_log_contains_a_secret_a_prompt_or_an_answer(tmp_path: Path) -> None:
    handler, root = Everything(), logging.getLogger()
    before = root.level
    file = tmp_path / "token"
    file.write_text(TOKEN)
    access: dict[str, Any] = {
        "worker_token_file": str(file),
        "admin_keys": (hash_key(ADMIN_KEY),),
    }
    router = RouterServer(
        RouterConfig(
            http=HttpConfig(port=0),
            grpc=GrpcConfig(port=0),
            stop_grace_s=0.0,
            tenants=(TenantConfig(name="t", keys=(hash_key(API_KEY),)),),
            access=RouterAccessConfig(**access),
        )
    )
    root.addHandler(handler)
    root.setLevel(1)
    try:
        addresses = await router.start()
        config = WorkerConfig(
            worker_id="w",
            role=Role.AGGREGATED,
            engine="fake",
            model_names=("demo",),
            routers=(addresses.grpc,),
            access=AccessConfig(**access),
            engine_args={"step_s": 0.001},
        )
        engine = make_engine(config, "e1")
        assert isinstance(engine, FakeEngine)
        worker = WorkerServer(config, engine=engine, instance_id="e1")
        try:
            await worker.start()
            await asyncio.wait_for(worker.registered(), WAIT_S)
            await until_ready(addresses.http)
            await use(addresses.http, addresses.grpc, engine)
        finally:
            await worker.stop()
    finally:
        await router.stop()
        root.removeHandler(handler)
        root.setLevel(before)
    assert any("worker w" in line for line in handler.lines)
    told = [line for line in handler.lines for secret in SECRETS if secret in line]
    assert not told


async def until_ready(http: str) -> None:
    async with aiohttp.ClientSession(f"http://{http}") as session:

        async def is_ready() -> bool:
            async with session.get("/ready") as answer:
                return answer.status == 200

        await wait_until(is_ready)
