"""A service that `pdserve serve` or `up` started, with clients of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.net import rpc
from pdserve.security.local import admin_key
from tests.support.service import Service
from tests.support.timeouts import START_S

if TYPE_CHECKING:
    import asyncio

    import openai

    from tests.support.pdserve_up import UpProcess


class ServedUp(Service):
    """A `pdserve serve` that is ready, with clients. `ready` is its ready file."""

    def __init__(self, up: UpProcess) -> None:
        self.up = up
        self.ready: dict[str, Any] = up.wait_until_serving(within_s=START_S)
        self.url, self.grpc = self.ready["http"], self.ready["grpc"]
        self.operator = rpc.Dialer(token=admin_key(Path(self.ready["run_dir"])))
        self.start_s = START_S

    @property
    def names(self) -> set[str]:
        return {worker["worker_id"] for worker in self.ready["workers"]}

    def client(self) -> openai.AsyncOpenAI:
        import openai  # takes a second, and each run of tests loads this module

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def sees(self, what: str, task: asyncio.Task[Any]) -> bool:
        """Wait until a worker's ledger counts `what`. Return False if the task ends first."""
        while not task.done():
            if any(getattr(x.ledger, what) for x in (await self.statuses()).values()):
                return True
        return False
