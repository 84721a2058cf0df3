"""Routers and workers in processes of their own, so that a test can kill them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.local.forkserver import launched
from tests.patience import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.local.forkserver import Process

_LOG = Path("/dev/stderr")


@dataclass(frozen=True, slots=True)
class Running:
    """A process and its reports."""

    process: Process
    reports: asyncio.StreamReader

    async def report(self, kind: str) -> Any:
        """The next report of that kind."""
        async with asyncio.timeout(START_S):
            while line := await self.reports.readline():
                message = json.loads(line)
                if kind in message:
                    return message[kind]
        raise AssertionError(f"the process ended without saying {kind}")

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)

    async def kill(self) -> None:
        """SIGKILL, and the end of it."""
        self.process.kill()
        await self.exit_code()

    async def stop(self) -> None:
        """SIGTERM, and the end of it."""
        self.process.send_signal(signal.SIGTERM)
        await self.exit_code()


@dataclass(frozen=True, slots=True)
class RouterProcess(Running):
    """Where it serves, and its process."""

    http: str
    grpc: str


@asynccontextmanager
async def a_router(**options: object) -> AsyncIterator[RouterProcess]:
    """`pdserve router` with the configuration of `options`; ended at the end, if it still runs."""
    settings = {"http_port": 0, "grpc_port": 0, "stop_grace_s": 0, "lease_s": 60, **options}
    settings["health.stall_s"] = 60  # a test that holds a worker still means no failure
    async with _process("router", settings) as running:
        ready = await running.report("ready")
        yield RouterProcess(running.process, running.reports, ready["http"], ready["grpc"])


@asynccontextmanager
async def a_worker(**options: object) -> AsyncIterator[Running]:
    """`pdserve worker` with a fake engine and the configuration of `options`, which waits for its
    routers."""
    async with _process("worker", {"engine": "fake", **options}) as running:
        yield running


@asynccontextmanager
async def _process(kind: str, settings: dict[str, object]) -> AsyncIterator[Running]:
    values = [x for key, value in settings.items() for x in ("--set", f"{kind}.{key}={value}")]
    started = launched(None, "pdserve", kind, *values, env=os.environ, log=_LOG)
    async with started as (process, reports):
        running = Running(process, reports)
        yield running
        if process.returncode is None:
            await running.stop()
