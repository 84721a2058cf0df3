"""A router is killed at each call of its store, and the next one goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.config import StoreConfig
from pdserve.process.forkserver import ForkServer
from router.store.store import make_store
from tests.support.postgres import needs_postgres, running_postgres
from tests.support.timeouts import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUTER = "tests.support.dying_batch_runner"
ENDPOINT = "/v1/completions"
NAMES = list("abcdef")


async def check_kills(place: str, folder: Path, routers: ForkServer) -> None:
    store = make_store(StoreConfig(database=place, files=str(folder)), Path(place), "client")
    for moment in ("before", "after"):
        for dies_at in range(1, 100):
            upload = await store.files.upload("acme")
            for name in NAMES:
                row = {"custom_id": name, "method": "POST", "url": ENDPOINT}
                await upload.write(json.dumps(row | {"body": {"prompt": name}}).encode() + b"\n")
            file = await store.files.keep(upload, "acme", "in.jsonl")
            made = await store.batches.create(file, ENDPOINT, "1h", 3600, {})
            statuses = []
            for die in (dies_at, 0):
                arguments = (place, str(folder), str(die), moment)
                process = await routers.start(ROUTER, *arguments, env=os.environ)
                statuses.append(await asyncio.wait_for(process.wait(), WAIT_S))
            batch = await store.batches.batch(made.id, "acme")
            assert batch is not None
            assert (batch.status, batch.total, batch.completed) == ("completed", 6, 6), dies_at
            assert batch.output_file_id is not None
            output = await store.files.file(batch.output_file_id, "acme")
            assert output is not None
            data = b"".join([chunk async for chunk in store.files.chunks(output)])
            assert [json.loads(line)["custom_id"] for line in data.splitlines()] == NAMES
            assert statuses[1] == 0
            if statuses[0] == 0:
                break
            assert statuses[0] == -signal.SIGKILL
        assert dies_at > len(NAMES)
    await store.files.close()
    await store.database.close()


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[ForkServer]:
    """Yield a process whose forks have imported all that a router needs."""
    server = ForkServer("importlib:import_module", tmp_path / "log", [ROUTER])
    yield server
    server.close()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=needs_postgres)])
async def test_no_line_is_lost_or_written_twice(
    kind: str, tmp_path: Path, routers: ForkServer
) -> None:
    if kind == "sqlite":
        await check_kills(str(tmp_path / "store"), tmp_path / "files", routers)
        return
    with running_postgres() as server:
        await check_kills(server.new_database(), tmp_path / "files", routers)
