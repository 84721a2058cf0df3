"""Routers and workers in processes of their own, so that a test can kill them."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.patience import START_S, WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """Where it serves, and its process."""

    http: str
    grpc: str
    process: asyncio.subprocess.Process

    async def kill(self) -> None:
        """SIGKILL, and the end of it."""
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        """SIGTERM, and the end of it."""
        self.process.terminate()
        await asyncio.wait_for(self.process.wait(), WAIT_S)


@asynccontextmanager
async def a_router(**options: object) -> AsyncIterator[RouterProcess]:
    """`pdserve router` with the configuration of `options`; ended at the end, if it still runs."""
    settings = {"http_port": 0, "grpc_port": 0, "stop_grace_s": 0, "lease_s": 60, **options}
    settings["health.stall_s"] = 60  # a test that holds a worker still means no failure
    async with _process("router", settings) as (process, reports):
        ready = await _ready(reports)
        yield RouterProcess(ready["http"], ready["grpc"], process)


@asynccontextmanager
async def a_worker(*, cwd: Path = _ROOT, **options: object) -> AsyncIterator[None]:
    """`pdserve worker` with a fake engine and the configuration of `options`, which waits for its
    routers."""
    async with _process("worker", {"engine": "fake", **options}, cwd):
        yield


async def _ready(reports: asyncio.StreamReader) -> Any:
    async with asyncio.timeout(START_S):
        while "ready" not in (report := json.loads(await reports.readline())):
            pass
    return report["ready"]


@asynccontextmanager
async def _process(
    kind: str, settings: dict[str, object], cwd: Path = _ROOT
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """The process and what it reports."""
    ours, theirs = socket.socketpair()
    reports, writer = await asyncio.open_connection(sock=ours)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve", kind, "--report-fd", str(theirs.fileno())),
        *(word for key, value in settings.items() for word in ("--set", f"{kind}.{key}={value}")),
        cwd=cwd,
        pass_fds=(theirs.fileno(),),
    )
    theirs.close()
    try:
        yield process, reports
    finally:
        writer.close()
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), WAIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
