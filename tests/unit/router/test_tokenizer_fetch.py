"""The tokenizers of models: fetched from workers, and only what those registered with."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.demo import MODEL_DIR
from pdserve.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.model.tokenizer import digest_of, read_files
from pdserve.net.rpc import PLAIN
from pdserve.types import Role
from pdserve.v1 import worker_pb2 as w
from router.fleet.peers import RegionPeers
from router.fleet.registry import Fleet
from router.intake.tokenizers import fetch_tokenizer
from tests.support.router_stack import MODEL, ScriptedWorker, worker_info

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


FILES = read_files(MODEL_DIR)
SERVED = replace(MODEL, tokenizer=digest_of(FILES))


class Sender(ScriptedWorker):
    """Sends these files."""

    def __init__(self, worker_id: str, files: dict[str, bytes]) -> None:
        super().__init__(worker_id, Role.AGGREGATED, model=SERVED)
        self.files = files
        self.asked = 0

    async def GetTokenizer(self, request: object, context: object) -> w.TokenizerFiles:  # noqa: N802
        self.asked += 1
        return w.TokenizerFiles(files=self.files)


@asynccontextmanager
async def fleet_of(*workers: Sender) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet()
        for worker in workers:
            fleet.register((await stack.enter_async_context(worker.serving())).info)
        yield fleet


async def test_another_worker_is_asked_where_one_has_changed_files() -> None:
    changed, right = Sender("a", FILES | {"chat_template.jinja": b"new"}), Sender("b", FILES)
    async with fleet_of(changed, right) as fleet:
        assert (await fetch_tokenizer(fleet, PLAIN, RegionPeers(""), SERVED)).encode("hi")
        assert (changed.asked, right.asked) == (1, 1)


async def test_a_tokenizer_that_no_worker_sends_is_said_to_be_missing() -> None:
    async with fleet_of(Sender("a", {})) as fleet:
        with pytest.raises(Unavailable, match="worker a: the files of its tokenizer have changed"):
            await fetch_tokenizer(fleet, PLAIN, RegionPeers(""), SERVED)
        with pytest.raises(Unavailable, match="no worker is there"):
            await fetch_tokenizer(fleet, PLAIN, RegionPeers(""), replace(SERVED, name="other"))
        with pytest.raises(ConfigError, match="have none that a router can use"):
            await fetch_tokenizer(fleet, PLAIN, RegionPeers(""), MODEL)


async def test_a_worker_with_another_tokenizer_is_refused() -> None:
    fleet = Fleet()
    fleet.register(worker_info("a", Role.AGGREGATED, model=SERVED))
    other = replace(SERVED, tokenizer="another")
    wanted = f"worker b: model demo has tokenizer another, but {SERVED.tokenizer} on worker a"
    with pytest.raises(InvalidRequest, match=wanted) as caught:
        fleet.register(worker_info("b", Role.AGGREGATED, model=other))
    assert caught.value.field == "worker.model.tokenizer"
