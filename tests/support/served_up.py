"""A service that `pdserve serve` or `up` started, with clients of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli import main
from pdserve.net import rpc
from pdserve.security.local import admin_key
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import WorkerStub
from tests.support.timeouts import START_S, WAIT_S, wait_until

if TYPE_CHECKING:
    import openai

    from tests.support.pdserve_up import UpProcess


class ServedUp:
    """A `pdserve serve` that is ready, with clients. `ready` is its ready file."""

    def __init__(self, up: UpProcess) -> None:
        self.up = up
        self.ready: dict[str, Any] = up.wait_until_serving(within_s=START_S)
        self.http: str = self.ready["http"]
        self.grpc: str = self.ready["grpc"]
        self.operator = rpc.Dialer(token=admin_key(Path(self.ready["run_dir"])))

    async def command(self, *words: str) -> int:
        """Run a `pdserve` command for the router in this process. Return its exit status."""
        key = admin_key(Path(self.ready["run_dir"]))
        return await asyncio.to_thread(main, [*words, "--grpc", self.grpc, "--api-key", key])

    def client(self) -> openai.AsyncOpenAI:
        import openai  # takes a second, and each run of tests loads this module

        return openai.AsyncOpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0)

    async def statuses(self) -> list[w.WorkerStatus]:
        """Return the status of each worker."""
        found = []
        for worker in self.ready["workers"]:
            async with self.operator.open_channel(worker["address"]) as channel:
                found.append(
                    await WorkerStub(channel).GetStatus(
                        w.GetStatusRequest(), timeout=WAIT_S, metadata=self.operator.metadata
                    )
                )
        return found

    async def until_empty(self) -> None:
        """Wait until no worker has a pinned block or a request."""

        async def is_empty() -> bool:
            ledgers = [x.ledger for x in await self.statuses()]
            return not any(x.pinned_blocks or x.transfers or x.engine_requests for x in ledgers)

        await wait_until(is_empty)

    async def sees(self, what: str, task: asyncio.Task[Any]) -> bool:
        """Wait until a worker's ledger counts `what`. Return False if the task ends first."""
        while not task.done():
            if any(getattr(s.ledger, what) for s in await self.statuses()):
                return True
        return False
